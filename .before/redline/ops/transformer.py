"""A model whole, from ids to the likeliest next tokens: the embedding, all blocks, the last norm, the head.

On a CPU the kernel is the same in one call: between two native calls Python finds its caches full of weights, and what
takes 5 us elsewhere takes 20 there (benchmarks/step_profile.py). The bits are the same.

T tokens, D hidden, L blocks, F states that are kept, R tokens whose next one is asked for, V vocabulary.
"""

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from redline.ops import native
from redline.ops.add_norm import add_norm
from redline.ops.best import best
from redline.ops.block import Block, Inputs, block, example
from redline.ops.linear import linear
from redline.ops.mla import FP8, NANO, TINY, kv_type
from redline.ops.op import Case, Cost, Op
from redline.ops.tiled import Tiled
from redline.ops.weights import PANEL, Matrix


@dataclass(frozen=True)
class Transformer:
    embedding_VD: Tensor  # bf16
    blocks: tuple[Block, ...]
    norm: Tensor  # float32 [D]
    head: Matrix | Tiled
    eps: float

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the kernels take all of it."""
        return (
            bool(self.blocks)
            and all(block_.fits for block_ in self.blocks)
            and self.embedding_VD.dtype == torch.bfloat16
            and isinstance(self.head, Matrix)
            and self.head.panels
        )

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Of activations: float32 where the CPU computes, the weights' own bf16 on a GPU."""
        return torch.bfloat16 if self.embedding_VD.is_cuda else torch.float32

    @functools.cached_property
    def width(self) -> int:
        return self.norm.shape[0]

    @functools.cached_property
    def logits_width(self) -> int:
        """Of the kernel's rows, which are whole panels."""
        return (self.head.outputs + PANEL - 1) // PANEL * PANEL

    @functools.cached_property
    def address(self) -> int:
        return ctypes.addressof(self._layout)

    @functools.cached_property
    def _layout(self) -> "_Weights":
        """As transformer.cpp reads it."""
        assert isinstance(self.head, Matrix), "the CPU's kernels read panels"
        return _Weights(
            *(native.pointer(self.embedding_VD), ctypes.addressof(self._blocks), native.pointer(self.norm)),
            *(self.head.address, self.eps, len(self.blocks), self.width, self.head.outputs),
        )

    @functools.cached_property
    def _blocks(self) -> "ctypes.Array[ctypes.c_void_p]":
        return (ctypes.c_void_p * len(self.blocks))(*(ctypes.addressof(block_.layout) for block_ in self.blocks))


class _Weights(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("embedding", "blocks", "norm", "head")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in "LDV"),
    ]


class Predicted(NamedTuple):
    """What comes of a step. Most steps are asked for their tokens alone: the rest becomes tensors where it is read."""

    likeliest: list[int]  # R; the first of them where several are, -1 where a logit is not finite
    features: Tensor | None  # [T, F D]: the residual stream as it enters some layers
    hidden: Callable[[], Tensor]  # [T, D]: the normed last state
    logits: Callable[[], Tensor]  # float32 [R, V]


def predicted(hidden_TD: Tensor, features: Tensor | None, logits_RV: Tensor) -> Predicted:
    ids_R, finite_R = best(logits_RV)
    return Predicted(ids_R.masked_fill_(~finite_R, -1).tolist(), features, lambda: hidden_TD, lambda: logits_RV)


def reference(
    planes: Tensor, weights: Transformer, inputs: Inputs, layers: Sequence[int], asked: Sequence[int]
) -> Predicted:
    """planes [L, pages, 64, kv width]: read, and written at rows_T. layers: whose entering states are kept; L is the
    last norm. asked: tokens of the step, R of them."""
    residual, partial = weights.embedding_VD[inputs.ids_T].to(weights.dtype), None
    features = residual.new_empty(residual.shape[0], len(layers), residual.shape[1]) if layers else None
    wanted = {layer: place for place, layer in enumerate(layers)}
    for layer, (block_, plane) in enumerate(zip(weights.blocks, planes.unbind(0), strict=True)):
        if features is not None and layer in wanted:
            features[:, wanted[layer]] = residual if partial is None else residual + partial
        residual, partial = block(residual, partial, block_, inputs, plane)
    residual, x = add_norm(residual, partial, weights.norm, weights.eps)
    if features is not None and len(weights.blocks) in wanted:
        features[:, wanted[len(weights.blocks)]] = residual
    logits_RV = linear(x[list(asked)], weights.head).float()
    return predicted(x, None if features is None else features.flatten(1), logits_RV)


def kernel(
    planes: Tensor, weights: Transformer, inputs: Inputs, layers: Sequence[int], asked: Sequence[int]
) -> Predicted:
    library = native.library()
    assert library is not None
    tokens, rows, d = inputs.count, len(asked), weights.width
    features = torch.empty(tokens, len(layers) * d) if layers else None
    hidden, logits = _floats(tokens, d), _floats(rows, weights.logits_width)
    asked_R, likeliest = array("i", asked), array("q", bytes(8 * rows))
    library.redline_transformer(
        *(weights.address, inputs.address),
        *(native.pointer(planes), planes.stride(0) * planes.element_size(), kv_type(planes)),
        *(_places(len(weights.blocks), tuple(layers)), len(layers), 0 if features is None else features.data_ptr()),
        *(asked_R.buffer_info()[0], rows, hidden, logits, likeliest.buffer_info()[0]),
    )
    return Predicted(
        likeliest.tolist(),
        features,
        lambda: _tensor(hidden, tokens, d),
        lambda: _tensor(logits, rows, weights.logits_width)[:, : weights.head.outputs],
    )


def _floats(rows: int, width: int) -> "ctypes.Array[ctypes.c_float]":
    """Memory as Python has it: a tensor takes ten times longer to make."""
    return (ctypes.c_float * (rows * width))()


def _tensor(floats: "ctypes.Array[ctypes.c_float]", rows: int, width: int) -> Tensor:
    return torch.frombuffer(floats, dtype=torch.float32).view(rows, width) if rows else torch.empty(0, width)


@functools.cache
def _places(blocks: int, layers: tuple[int, ...]) -> "ctypes.Array[ctypes.c_int32]":
    """Where the state that enters each block and the last norm goes; -1: nowhere."""
    return (ctypes.c_int32 * (blocks + 1))(*(layers.index(i) if i in layers else -1 for i in range(blocks + 1)))


def fits(planes: Tensor, weights: Transformer, *_: object) -> bool:
    return weights.fits


def cost(planes: Tensor, weights: Transformer, inputs: Inputs, layers: Sequence[int], asked: Sequence[int]) -> Cost:
    tokens, d = inputs.count, weights.width
    residual_TD = torch.empty(tokens, d, dtype=weights.dtype, device="meta")
    row_bytes = d * weights.embedding_VD.element_size()
    total = Cost(tokens * row_bytes + residual_TD.nbytes * (2 + len(layers)) + weights.norm.nbytes)
    for block_, plane in zip(weights.blocks, planes.unbind(0), strict=True):
        total += block.cost(residual_TD, None, block_, inputs, plane)
    if asked:
        total += linear.cost(residual_TD[: len(asked)], weights.head)
    return total


def cases() -> Iterator[Case]:
    def make(dims: tuple[int, ...], chunk: int, lengths: tuple[int, ...], dtype: torch.dtype, layers: tuple[int, ...]):
        def inputs(g: torch.Generator) -> tuple[Tensor, Transformer, Inputs, tuple[int, ...], list[int]]:
            _, _, first, step, plane = example(g, dims, 0, chunk, lengths, dtype)
            rest = [example(g, dims, 8, chunk, lengths, dtype)[2] for _ in range(2)]
            planes = torch.stack([plane, *(torch.randn(plane.shape, generator=g).to(dtype) for _ in rest)])
            d, vocabulary, tokens = dims[0], 500, chunk + len(lengths)
            table, head = torch.randn(2, vocabulary, d, generator=g).to(torch.bfloat16)
            norm = torch.rand(d, generator=g) + 0.5
            weights = Transformer(table, (first, *rest), norm, Matrix.prepare(head), 1e-5)
            step = replace(step, ids_T=torch.randint(vocabulary, (tokens,), generator=g))
            asked = list(range(max(0, chunk - 1), tokens)) if lengths else []
            return planes, weights, step, layers, asked

        return inputs

    yield Case("T=1 nano", make(NANO, 0, (70,), torch.bfloat16, ()))
    yield Case("a chunk and queries, states kept, nano", make(NANO, 20, (1, 65), torch.bfloat16, (3, 0, 2)))
    yield Case("a chunk and queries, nano fp8 pages", make(NANO, 20, (1, 65), FP8, ()))
    yield Case("queries, the last state kept, tiny float32 pages", make(TINY, 0, (5, 130), torch.float32, (3,)))
    yield Case("nothing is asked for, tiny", make(TINY, 20, (), torch.bfloat16, (1,)))


transformer = Op("transformer", reference, kernel, cost, cases, rtol=0.0, fits=fits)
