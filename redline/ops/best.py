"""Argmax of each row (greedy sampling); the first index wins ties.        R rows, V vocabulary.

The op also returns whether the whole row is finite: one pass over the logits computes both.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.ops.op import Case, Cost, Op


class BestArgs(NamedTuple):
    """Finds the argmax of each row, and whether the whole row is finite."""

    logits_RV: Tensor  # float32 [R, V]; the row stride may exceed V


def reference(args: BestArgs) -> tuple[Tensor, Tensor]:
    """-> (ids int64 [R], finite bool [R]). A row with a NaN has any id below V."""
    return args.logits_RV.argmax(-1), args.logits_RV.isfinite().all(-1)


def cost(args: BestArgs) -> Cost:
    """The logits are read once; an id of 8 bytes and a flag of 1 are written for each row."""
    return Cost(args.logits_RV.nbytes + 9 * args.logits_RV.shape[0])


def cases() -> Iterator[Case]:
    """Vocabularies of nano, of Kimi and of an odd size, rows with many equal maxima, rows that are not finite."""

    def make(rows: int, vocabulary: int):
        def inputs(g: torch.Generator) -> BestArgs:
            return BestArgs(
                torch.randn(rows, vocabulary, generator=g),
            )

        return inputs

    def ties(g: torch.Generator) -> BestArgs:
        return BestArgs(
            torch.randint(3, (40, 100), generator=g).float(),
        )

    def infinite(g: torch.Generator) -> BestArgs:
        x = torch.randn(4, 70, generator=g)
        x[0, 3], x[1, 69], x[2] = torch.inf, -torch.inf, -torch.inf
        return BestArgs(
            x,
        )

    yield Case("R=1 nano", make(1, 4096))
    yield Case("R=64 nano", make(64, 4096))
    yield Case("many of the greatest, V no multiple of 16", ties)
    yield Case("infinite numbers", infinite)
    yield Case("R=4 Kimi", make(4, 163840))


best = Op("best", BestArgs, reference, cost, cases)
