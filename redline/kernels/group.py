"""The ranks of one model: processes that hold a part of each weight and add up what each computes of a layer.

A rank has some of the heads and a slice of every expert's width, so a sublayer's result is a partial sum on each rank.
`Group.add` makes the sum of them, the same bits on every rank, since each adds in the order of ranks. What follows
from equal bits is equal: norms, experts chosen, tokens drawn. So ranks never ask one another what was decided.
"""

from typing import Protocol

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


ALONE = Alone()
