"""The ranks of one model: processes that hold a part of each weight and add up what each computes of a layer.

A rank has some of the heads and a slice of every expert's width, so a sublayer's result is a partial sum on each rank.
`Group.add` makes the sum of them, the same bits on every rank, since each adds in the order of ranks. What follows
from equal bits is equal: norms, experts chosen, tokens drawn. So ranks never ask one another what was decided.
"""

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

    def gather(self, part_RV: Tensor) -> Tensor:
        """[R, V / ranks] of each rank -> [R, V] on every rank, side by side in the order of ranks."""
        ...

    def check(self) -> None:
        """Raises RankLost where a rank has kept a device waiting too long: what came of it since is nothing."""
        ...

    def hurry(self) -> None:
        """From now on nothing is loaded, compiled or recorded any more: ranks are waited for a short time only."""
        ...

    def lose(self, reason: str) -> None:
        """A rank has ended, in these words: whoever waits for it raises RankLost soon. Any thread may call this."""
        ...

    def close(self) -> None:
        """Lets go of what the ranks share."""
        ...


class Alone:
    """A group of one rank: nothing is sent, nothing is copied."""

    rank = 0
    ranks = 1

    def add(self, partial: Tensor) -> Tensor:
        """The same tensor."""
        return partial

    def gather(self, part_RV: Tensor) -> Tensor:
        """The same tensor."""
        return part_RV

    def check(self) -> None:
        """Nobody else can be lost."""

    def hurry(self) -> None:
        """Nobody is waited for."""

    def lose(self, reason: str) -> None:
        """Nobody else can be lost."""

    def close(self) -> None:
        """Nothing is shared."""


ALONE = Alone()
START_S = 120.0  # that a rank is waited for while ranks load, compile and record
STEP_S = 5.0  # afterwards


def least(group: Group, number: int, device: torch.device) -> int:
    """The least of the ranks' numbers, each up to 2^24, on every rank."""
    if group.ranks == 1:
        return number
    return int(group.gather(torch.full((1, 4), float(number), device=device)).min())
