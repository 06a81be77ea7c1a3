"""A step of the model, as tensors: the inputs of every chip's blocks.

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
    """One step. Every token is either in exactly one chunk or one query."""

    ids_T: Tensor  # int64
    cos_T: Tensor  # float32 [T, P / 2]
    sin_T: Tensor
    rows_T: Tensor  # int64: page * 64 + place, the cache row of each token's latent
    chunks: Sequence[Chunk]  # prompt tokens, which use expanded attention
    tokens_Q: Tensor  # int32: generated tokens, which use absorbed attention
    slots_Q: Tensor  # int32
    lengths_Q: Tensor  # int32: context length of each query, itself included
    tables: Tensor  # int32 [slots, pages per slot]
    longest: int | None = None  # upper bound of the queries' context lengths; None: the length of a table
    positions: int = 1  # of each row: this number of consecutive queries belong to one slot
    routing: Tensor | None = None  # int32 [layers, T, k]: forced expert choices, for benchmarks on a GPU

    @functools.cached_property
    def count(self) -> int:
        """T, the number of tokens."""
        return self.ids_T.shape[0]
