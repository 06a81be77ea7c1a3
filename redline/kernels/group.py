"""Tensor parallelism: the ranks of one model, processes that each hold a part of every weight and all-reduce results.

A rank has some of the heads and a slice of every expert's width, so a sublayer's result is a partial sum on each rank.
`Group.all_reduce` produces the same bits on every rank, since each adds in rank order. Everything that follows from
equal bits is equal: norms, experts chosen, tokens sampled. So ranks never exchange decisions.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Group(Protocol):
    """The communication that a rank's model needs. Every rank makes the same calls in the same order.

    A call raises RankLost, with the rank that did not arrive, the call and the seconds waited, if another rank exceeds
    the group's timeout.
    """

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        ...

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' partial sums [T, D], added in rank order; may reuse the given tensor."""
        ...

    def begin_all_reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        """Begins `all_reduce`. Call the result once to finish it; until then the device may do other work."""
        ...

    def begin_reduce_scatter(self, partial: Tensor) -> Callable[[], Tensor]:
        """Begins to add partial sums [ranks * n, D], as in `begin_all_reduce`; this rank gets its own n rows of the
        sum, from rank * n on. The input must not be read or written until it is finished."""
        ...

    def begin_all_gather_rows(self, own: Tensor, whole: Tensor) -> Callable[[], Tensor]:
        """Begins to write the n rows of each rank, in rank order, into whole [ranks * n, W] on every rank.
        Call the result once to finish it; it returns `whole`. Neither tensor may be touched until then."""
        ...

    def all_gather(self, part_RV: Tensor) -> Tensor:
        """Columns: [R, V / ranks] of each rank -> [R, V] on every rank, concatenated in rank order."""
        ...

    def check(self) -> None:
        """Raises RankLost if a device timed out waiting for a rank: all its results since then are invalid."""
        ...

    def set_timeout(self, seconds: float) -> None:
        """Sets the timeout, in seconds, of one call while waiting for another rank."""
        ...

    def abort(self, reason: str) -> None:
        """Marks a rank as lost, with this reason: calls that are waiting raise RankLost within a second, as does every
        later call. Thread-safe."""
        ...

    def close(self) -> None:
        """Releases the memory that the ranks share, at the same time as the others, or after they have ended."""
        ...


class Alone:
    """A group of one rank: no communication, no copies."""

    rank = 0
    ranks = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The same tensor."""
        return partial

    def begin_all_reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        """Returns the same tensor."""
        return lambda: partial

    def begin_reduce_scatter(self, partial: Tensor) -> Callable[[], Tensor]:
        """Returns the same tensor, since all rows are this rank's own."""
        return lambda: partial

    def begin_all_gather_rows(self, own: Tensor, whole: Tensor) -> Callable[[], Tensor]:
        """Copies `own` into `whole`."""
        whole.copy_(own)
        return lambda: whole

    def all_gather(self, part_RV: Tensor) -> Tensor:
        """The same tensor."""
        return part_RV

    def check(self) -> None:
        """Does nothing: there is no other rank."""

    def set_timeout(self, seconds: float) -> None:
        """Does nothing: there is no other rank to wait for."""

    def abort(self, reason: str) -> None:
        """Does nothing: there is no other rank."""

    def close(self) -> None:
        """Does nothing: no memory is shared."""


ALONE = Alone()
LOAD_S = 3600.0  # timeout while the ranks load their weights
START_S = 120.0  # timeout while ranks start, compile, capture CUDA graphs and measure
STEP_S = 5.0  # timeout afterwards


def all_reduce_min(group: Group, number: int, device: torch.device) -> int:
    """The minimum of the ranks' numbers, each up to 2^24, on every rank. Raises RankLost if a rank does not arrive."""
    if group.ranks == 1:
        return number
    found = group.all_gather(torch.full((1, 4), float(number), device=device)).min().item()
    group.check()  # a device that timed out returns NaN
    return int(found)


def barrier(group: Group, device: torch.device, seconds: float, afterwards: float) -> None:
    """A barrier: waits at most `seconds` until every rank is here, then sets the timeout to `afterwards`.

    Raises RankLost if a rank does not arrive.
    """
    group.set_timeout(seconds)
    all_reduce_min(group, 0, device)
    group.set_timeout(afterwards)
