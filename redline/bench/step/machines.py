"""Machines that nobody here needs to have: what a chip holds, how fast it reads, how its ranks reach one another.

Every figure says where it is from: measured (by this repository, or by a probe of its own), published (the maker's data
sheet), or assumed.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from redline.errors import ConfigError
from redline.model.k2.shard import RANKS


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


@dataclass(frozen=True)
class Several:
    """So many GPUs of one host."""

    count: int
    chip: Chip

    @property
    def name(self) -> str:
        """As it is asked for: 8 x H200."""
        return f"{self.count} x {self.chip.name}"


_HOPPER_LINK = Figure(397e9, "measured between two H200s, by sums of 1 to 32 rows; NVLink 4 is published as 450 GB/s")
_OURS = ("all: they are written for compute capability 9.0",)
CHIPS = {
    "H100": Chip(
        "H100",
        Figure(80e9, "published, SXM; a driver shows a few percent more"),
        Figure(0.94 * 3.35e12, "assumed, 94% of the published 3.35, as the H200 reads 4.50 of 4.8"),
        _HOPPER_LINK,
        Figure(0.989e15, "published"),
        132,
        _OURS,
    ),
    "H200": Chip(
        "H200",
        Figure(141e9, "published; a driver shows a few percent more"),
        Figure(4.505e12, "measured; published 4.8"),
        _HOPPER_LINK,
        Figure(0.889e15, "measured"),
        132,
        _OURS,
    ),
    "B200": Chip(
        "B200",
        Figure(180e9, "published, in HGX"),
        Figure(0.94 * 7.7e12, "assumed, 94% of the published 7.7 (HGX), as the H200 reads 4.50 of 4.8"),
        Figure(2 * 397e9, "assumed, twice the H200's, as NVLink 5 is published as twice NVLink 4"),
        Figure(2.25e15, "published"),
        148,
        (
            "today none: the driver refuses anything but compute capability 9.x, and this is 10.0, so a server there "
            "runs the reference path; the times below assume a build for 10.0, which nobody has made",
            "would run as they are: the mma.sync family and Triton's products, which are all of a decode step of 1 to "
            "32 tokens but for attention over 64 heads; nobody has run them there",
            "would not: wgmma, which that chip lacks (attend_warpgroups.cu, prefill/grouped.cu); attend.cu stands in "
            "for the one, and a rank of 32 heads or fewer takes it anyway; for the other, a prompt's experts, nothing "
            "fast does beyond 32 tokens",
            "no FP4 unit is used: NVFP4 is not faster than INT4",
        ),
    ),
}


def machine(text: str) -> Several:
    """Reads "8 x H200", also "8xH200" or "H200" alone. ConfigError, with the names that are known, for all else."""
    found = re.fullmatch(r"\s*(?:(\d{1,3})\s*[x*]\s*)?(?:NVIDIA\s+)?([A-Za-z]+\d+)\s*", text, re.IGNORECASE | re.ASCII)
    if found is None or found[2].upper() not in CHIPS or int(found[1] or 1) not in RANKS:
        raise ConfigError(
            f"on is {text[:40]!r}; expected {', '.join(map(str, RANKS))} GPUs of one host, as in '8 x H200'; chips: "
            f"{', '.join(CHIPS)}"
        )
    return Several(int(found[1] or 1), CHIPS[found[2].upper()])
