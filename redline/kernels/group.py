"""The ranks of one model: processes that hold a part of each weight and add up what each computes of a layer.

A rank has some of the heads and a slice of every expert's width, so a sublayer's result is a partial sum on each rank.
`Group.add` makes the sum of them, the same bits on every rank, since each adds in the order of ranks. What follows
from equal bits is equal: norms, experts chosen, tokens drawn. So ranks never ask one another what was decided.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Group(Protocol):
    """What a rank's model needs of the other ranks. Every rank makes the same calls in the same order.

    Each call raises RankLost, which names the rank that did not come, the call and the seconds waited, once another
    rank has kept it waiting beyond the group's deadline.
    """

    @property
    def rank(self) -> int:
        """This one's number, from 0."""
        ...

    @property
    def ranks(self) -> int:
        """How many there are."""
        ...

    def add(self, partial: Tensor) -> Tensor:
        """The sum over all ranks of their partial sums [T, D], added in the order of ranks; may be the given tensor."""
        ...

    def begin_add(self, partial: Tensor) -> Callable[[], Tensor]:
        """Begins `add`; what comes back ends it, once: until then the device may do other work."""
        ...

    def begin_add_rows(self, partial: Tensor) -> Callable[[], Tensor]:
        """Begins to add partial sums [ranks * n, D] as `begin_add` does; of the sum this rank is given its own n rows,
        those from rank * n on. What is given must not be read or written before the end."""
        ...

    def begin_gather_rows(self, own: Tensor, whole: Tensor) -> Callable[[], None]:
        """Begins to write the n rows of each rank, one rank's behind another's, into whole [ranks * n, W] on every
        rank; what comes back ends it, once. Neither must be touched until then."""
        ...

    def gather(self, part_RV: Tensor) -> Tensor:
        """[R, V / ranks] of each rank -> [R, V] on every rank, side by side in the order of ranks."""
        ...

    def check(self) -> None:
        """Raises RankLost where a rank has kept a device waiting too long: what came of it since is nothing."""
        ...

    def allow(self, seconds: float) -> None:
        """From now on a rank may keep this one waiting for so long, in one call."""
        ...

    def lose(self, reason: str) -> None:
        """A rank is lost, in these words: whoever waits here wakes within a second and raises RankLost, as does every
        later call. Any thread may call this."""
        ...

    def close(self) -> None:
        """Lets go of what the ranks share, at the same time as the others, or once they are gone."""
        ...


class Alone:
    """A group of one rank: nothing is sent, nothing is copied."""

    rank = 0
    ranks = 1

    def add(self, partial: Tensor) -> Tensor:
        """The same tensor."""
        return partial

    def begin_add(self, partial: Tensor) -> Callable[[], Tensor]:
        """Gives the same tensor."""
        return lambda: partial

    def begin_add_rows(self, partial: Tensor) -> Callable[[], Tensor]:
        """Gives the same tensor, all of whose rows are its own."""
        return lambda: partial

    def begin_gather_rows(self, own: Tensor, whole: Tensor) -> Callable[[], None]:
        """Copies them."""
        whole.copy_(own)
        return lambda: None

    def gather(self, part_RV: Tensor) -> Tensor:
        """The same tensor."""
        return part_RV

    def check(self) -> None:
        """Nobody else can be lost."""

    def allow(self, seconds: float) -> None:
        """Nobody is waited for."""

    def lose(self, reason: str) -> None:
        """Nobody else can be lost."""

    def close(self) -> None:
        """Nothing is shared."""


ALONE = Alone()
LOAD_S = 3600.0  # that the first rank to have its weights waits for the last
START_S = 120.0  # that a rank is waited for while ranks start, compile, record and measure
STEP_S = 5.0  # afterwards


def least(group: Group, number: int, device: torch.device) -> int:
    """The least of the ranks' numbers, each up to 2^24, on every rank. Raises RankLost where one does not come."""
    if group.ranks == 1:
        return number
    found = group.gather(torch.full((1, 4), float(number), device=device)).min().item()
    group.check()  # a device that has waited in vain gives NaN
    return int(found)


def meet(group: Group, device: torch.device, seconds: float, afterwards: float) -> None:
    """Waits until every rank has come here, for `seconds` at most; `afterwards` is what ranks are allowed from then on.

    Raises RankLost where one does not come.
    """
    group.allow(seconds)
    least(group, 0, device)
    group.allow(afterwards)
