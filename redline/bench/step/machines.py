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
_OURS = ("all: they are written for compute capability 9.0",)
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
        SourcedFigure(2 * 397e9, "assumed, twice the H200's, as NVLink 5 is published as twice NVLink 4"),
        SourcedFigure(2.25e15, "published"),
        148,
        (
            "none today: the kernels' loader requires compute capability 9.x, and this chip is 10.0, so a server on it "
            "runs the reference path; the times below assume a build for 10.0, which does not exist",
            "would run unchanged: the mma.sync kernels and Triton's matrix products, which are a whole decode step of "
            "1 to 32 tokens except attention over 64 heads; not tested on this chip",
            "would not run: wgmma, which this chip lacks (attend_warpgroups.cu, prefill/grouped.cu); attend.cu "
            "replaces the first, and a rank of 32 heads or fewer uses it anyway; the second, the experts of prefill, "
            "has no fast replacement beyond 32 tokens",
            "FP4 units are not used: NVFP4 is not faster than INT4",
        ),
    ),
}


def machine(text: str) -> Several:
    """Parses "8 x H200", "8xH200" or "H200". Raises ConfigError, with the known names, for anything else."""
    found = re.fullmatch(r"\s*(?:(\d{1,3})\s*[x*]\s*)?(?:NVIDIA\s+)?([A-Za-z]+\d+)\s*", text, re.IGNORECASE | re.ASCII)
    if found is None or found[2].upper() not in CHIPS or int(found[1] or 1) not in RANKS:
        raise ConfigError(
            f"on is {text[:40]!r}; expected {', '.join(map(str, RANKS))} GPUs of one host, as in '8 x H200'; chips: "
            f"{', '.join(CHIPS)}"
        )
    return Several(int(found[1] or 1), CHIPS[found[2].upper()])
