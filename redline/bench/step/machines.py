"""Figures of GPUs for predictions without the hardware: memory, bandwidth, and the links between ranks.

Every figure names its source: measured (by this repository, or by a separate probe), published (the maker's data
sheet), or assumed.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from redline.errors import ConfigError
from redline.model.k2.shard import RANKS


class SourcedFigure(NamedTuple):
    """A number, in the unit given by its field, and its source."""

    value: float
    source: str


class ChipFigures(NamedTuple):
    """One GPU. memory: bytes. reads: bytes/s from memory. link: bytes/s to other ranks, one way. flops: bf16 FLOP/s."""

    name: str
    memory: SourcedFigure
    reads: SourcedFigure
    link: SourcedFigure
    flops: SourcedFigure
    sms: int
    kernels: tuple[str, ...]  # lines on which of our kernels run on this chip
    served: bool = True  # whether a server on it has kernels


@dataclass(frozen=True)
class Several:
    """`count` GPUs of one host."""

    count: int
    chip: ChipFigures

    @property
    def name(self) -> str:
        """The name, such as 8 x H200."""
        return f"{self.count} x {self.chip.name}"


_HOPPER_LINK = SourcedFigure(
    397e9, "measured between two H200s, with all-reduces of 1 to 32 rows; NVLink 4 is published as 450 GB/s"
)
_BLACKWELL_LINK = SourcedFigure(2 * 397e9, "assumed, twice the H200's, as NVLink 5 is published as twice NVLink 4")
_OURS = ("all: they are written for compute capability 9.0",)
_COMPILED = (
    "all that are launched on it compile (`redline kernels build`); none has been run on this chip",
    "wgmma, which this chip lacks: attention of 64 heads has a form with mma.sync, and the experts of a prompt are "
    "Triton kernels with tcgen05; the speed of neither is known",
    "FP4 units are not used: NVFP4 is not faster than INT4",
)
CHIPS = {
    "H100": ChipFigures(
        "H100",
        SourcedFigure(80e9, "published, SXM; a driver shows a few percent more"),
        SourcedFigure(0.94 * 3.35e12, "assumed, 94% of the published 3.35, as the H200 reads 4.50 of 4.8"),
        _HOPPER_LINK,
        SourcedFigure(0.989e15, "published"),
        132,
        _OURS,
    ),
    "H200": ChipFigures(
        "H200",
        SourcedFigure(141e9, "published; a driver shows a few percent more"),
        SourcedFigure(4.505e12, "measured; published 4.8"),
        _HOPPER_LINK,
        SourcedFigure(0.889e15, "measured"),
        132,
        _OURS,
    ),
    "B200": ChipFigures(
        "B200",
        SourcedFigure(180e9, "published, in HGX"),
        SourcedFigure(0.94 * 7.7e12, "assumed, 94% of the published 7.7 (HGX), as the H200 reads 4.50 of 4.8"),
        _BLACKWELL_LINK,
        SourcedFigure(2.25e15, "published"),
        148,
        _COMPILED,
    ),
    "GB200": ChipFigures(
        "GB200",
        SourcedFigure(186e9, "published"),
        SourcedFigure(0.94 * 8e12, "assumed, 94% of the published 8, as the H200 reads 4.50 of 4.8"),
        _BLACKWELL_LINK,
        SourcedFigure(2.5e15, "published"),
        148,
        _COMPILED,
    ),
    "B300": ChipFigures(
        "B300",
        SourcedFigure(288e9, "published"),
        SourcedFigure(0.94 * 8e12, "assumed, 94% of the published 8, as the H200 reads 4.50 of 4.8"),
        _BLACKWELL_LINK,
        SourcedFigure(2.25e15, "assumed, as a B200"),
        160,
        _COMPILED,
    ),
    "RTX PRO 6000": ChipFigures(
        "RTX PRO 6000",
        SourcedFigure(96e9, "published"),
        SourcedFigure(0.94 * 1.792e12, "assumed, 94% of the published 1.792, as the H200 reads 4.50 of 4.8"),
        SourcedFigure(
            0.8 * 64e9, "assumed, 80% of PCIe 5.0 x16; our all-reduces need GPUs that map each other's memory"
        ),
        SourcedFigure(0.5e15, "assumed, four times the published 125 TFLOP/s of float32"),
        188,
        (
            "none: a block has 99 KB of shared memory and the CUDA kernels need up to 227, so a server on it runs the "
            "reference path; the times below assume kernels that do not exist",
        ),
        served=False,
    ),
}
LISTED = "H100", "H200", "B200", "B300"  # of which the smallest number that holds a model is named


def machine(text: str) -> Several:
    """Parses "8 x H200", "8xH200" or "H200". Raises ConfigError, with the known names, for anything else."""
    pattern = r"\s*(?:(\d{1,3})\s*[x*]\s*)?(?:NVIDIA\s+)?([A-Z]+(?:\s+PRO\s+)?\d+)\s*"
    found = re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII)
    name = "" if found is None else " ".join(found[2].upper().split())
    if found is None or name not in CHIPS or int(found[1] or 1) not in RANKS:
        raise ConfigError(
            f"on is {text[:40]!r}; expected {', '.join(map(str, RANKS))} GPUs of one host, as in '8 x H200'; chips: "
            f"{', '.join(CHIPS)}"
        )
    return Several(int(found[1] or 1), CHIPS[name])
