"""A step of the model, as tensors: what every chip's blocks read of it.

T tokens, Q queries, P rope.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Tokens [first, first + count) of the step are positions [start, start + count) of a prompt."""

    first: int
    count: int
    start: int
    slot: int


@dataclass(frozen=True, eq=False)
class Inputs:
    """One step. Every token is in exactly one chunk or is one query."""

    ids_T: Tensor  # int64
    cos_T: Tensor  # float32 [T, P / 2]
    sin_T: Tensor
    rows_T: Tensor  # int64: page * 64 + place, where each token's latent goes
    chunks: Sequence[Chunk]  # prompt tokens: expanded attention
    tokens_Q: Tensor  # int32: generated tokens: absorbed attention
    slots_Q: Tensor  # int32
    lengths_Q: Tensor  # int32: context of each query, itself included
    tables: Tensor  # int32 [slots, pages per slot]
    longest: int | None = None  # no query's context is longer; None: as long as a table
    positions: int = 1  # of each row: so many queries side by side are of one slot
    routing: Tensor | None = None  # int32 [layers, T, k]: experts that are given, not chosen, for benchmarks on a GPU

    @functools.cached_property
    def count(self) -> int:
        """T"""
        return self.ids_T.shape[0]
