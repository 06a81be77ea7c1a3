"""Machines that nobody here needs to have: what a chip holds, how fast it reads, how its ranks reach one another.

Every figure says where it is from: measured (by this repository, or by a probe of its own), published (the maker's data
sheet), or assumed.
"""

import re
from typing import NamedTuple

from redline.errors import ConfigError

MOST_GPUS = 64


class Figure(NamedTuple):
    """A number in the unit that its place names, and where it is from."""

    value: float
    source: str


class Chip(NamedTuple):
    """One GPU. memory: bytes. reads: bytes a second. link: bytes a second to other ranks, one way. flops: of bf16."""

    name: str
    memory: Figure
    reads: Figure
    link: Figure
    flops: Figure
    sms: int
    kernels: tuple[str, ...]  # lines about which of our kernels run there


class Several(NamedTuple):
    """So many GPUs of one host."""

    count: int
    chip: Chip

    @property
    def name(self) -> str:
        """As it is asked for: 8 x H200."""
        return f"{self.count} x {self.chip.name}"


_HOPPER_LINK = Figure(397e9, "measured between two H200s, by sums of 1 to 32 rows; NVLink 4 is published as 450 GB/s")
_OURS = ("all: they are written for it (compute capability 9.0)",)
CHIPS = {
    "H100": Chip(
        "H100",
        Figure(80e9, "published, SXM"),
        Figure(0.94 * 3.35e12, "94% of the published 3.35 TB/s, assumed from the H200: 4.50 measured of 4.8"),
        _HOPPER_LINK,
        Figure(0.989e15, "published"),
        132,
        _OURS,
    ),
    "H200": Chip(
        "H200",
        Figure(141e9, "published"),
        Figure(4.505e12, "measured; published 4.8 TB/s"),
        _HOPPER_LINK,
        Figure(0.889e15, "measured"),
        132,
        _OURS,
    ),
    "B200": Chip(
        "B200",
        Figure(180e9, "published, in HGX"),
        Figure(0.94 * 7.7e12, "94% of the published 7.7 TB/s (HGX), assumed from the H200"),
        Figure(2 * 397e9, "assumed: twice the H200's, as NVLink 5 is published as twice NVLink 4"),
        Figure(2.25e15, "published"),
        148,
        (
            "as released none: the loader takes compute capability 9.0 alone, and this is 10.0",
            "mma.sync family and Triton (all decode steps of 1 to 32 tokens but for the",
            "  attention of 64 heads): their instructions exist there; nobody has run them",
            "wgmma (attend_warpgroups.cu, prefill/grouped.cu) does not exist there: attend.cu",
            "  stands in for the one (ranks of 32 heads or fewer take it anyway), experts by",
            "  pairs for the other, up to 32 tokens; prompts have no fast stand-in",
            "so the times below assume a build for 10.0, and per step the H200's microseconds",
            "  over the floor; no FP4 unit is used, so NVFP4 is not faster than INT4",
        ),
    ),
}


def machine(text: str) -> Several:
    """Reads "8 x H200", also "8xH200" or "H200" alone. ConfigError, with the names that are known, for all else."""
    found = re.fullmatch(r"\s*(?:(\d{1,3})\s*[x*]\s*)?(?:NVIDIA\s+)?([A-Za-z]+\d+)\s*", text, re.IGNORECASE | re.ASCII)
    if found is None or found[2].upper() not in CHIPS or not 1 <= int(found[1] or 1) <= MOST_GPUS:
        raise ConfigError(
            f"on is {text[:40]!r}; expected a number of GPUs and a chip, as in '8 x H200': 1 to {MOST_GPUS} x one of "
            f"{', '.join(CHIPS)}"
        )
    return Several(int(found[1] or 1), CHIPS[found[2].upper()])
