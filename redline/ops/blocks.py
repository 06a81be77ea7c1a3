"""All blocks of a model, then the last norm.        T tokens, D hidden, L blocks, F states that are kept.

On a CPU the kernel is the same in one call: a step of one token spends a tenth of its time between eight blocks, in
Python that finds its caches full of weights (benchmarks/step_profile.py). The bits are the same.
"""

import ctypes
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.ops import native
from redline.ops.add_norm import add_norm
from redline.ops.block import Block, Inputs, block, example
from redline.ops.mla import FP8, NANO, TINY, kv_type
from redline.ops.op import Case, Cost, Op


@dataclass(frozen=True)
class Blocks:
    blocks: tuple[Block, ...]
    norm: Tensor  # float32 [D]
    eps: float

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the kernels take all of them."""
        return bool(self.blocks) and all(block_.fits for block_ in self.blocks)

    @functools.cached_property
    def addresses(self) -> "ctypes.Array[ctypes.c_void_p]":
        """Of each block's weights, as block.cpp reads them."""
        return (ctypes.c_void_p * len(self.blocks))(*(ctypes.addressof(block_.layout) for block_ in self.blocks))


def reference(
    residual_TD: Tensor, weights: Blocks, inputs: Inputs, planes: Tensor, layers: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None]:
    """-> the normed last state [T, D], and the residual stream as it enters each of `layers`, [T, F, D]; None for none.

    planes [L, pages, 64, kv width]: read, and written at rows_T. Layer L is the last norm. `residual_TD` may be changed
    in place and must not be used afterwards.
    """
    residual, partial = residual_TD, None
    features = residual.new_empty(residual.shape[0], len(layers), residual.shape[1]) if layers else None
    wanted = {layer: place for place, layer in enumerate(layers)}
    for layer, (block_, plane) in enumerate(zip(weights.blocks, planes.unbind(0), strict=True)):
        if features is not None and layer in wanted:
            features[:, wanted[layer]] = residual if partial is None else residual + partial
        residual, partial = block(residual, partial, block_, inputs, plane)
    residual, x = add_norm(residual, partial, weights.norm, weights.eps)
    if features is not None and len(weights.blocks) in wanted:
        features[:, wanted[len(weights.blocks)]] = residual
    return x, features


def kernel(
    residual_TD: Tensor, weights: Blocks, inputs: Inputs, planes: Tensor, layers: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None]:
    library = native.library()
    assert library is not None
    tokens, d = residual_TD.shape
    y_TD, x_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
    features = residual_TD.new_empty(tokens, len(layers), d) if layers else None
    library.redline_blocks(
        ctypes.addressof(weights.addresses),
        ctypes.addressof(inputs.layout),
        native.pointer(planes),
        planes.stride(0) * planes.element_size(),
        kv_type(planes),
        *(native.pointer(residual_TD), y_TD.data_ptr(), native.pointer(weights.norm), x_TD.data_ptr()),
        ctypes.addressof(_places(len(weights.blocks), tuple(layers))),
        0 if features is None else features.data_ptr(),
        *(weights.eps, len(weights.blocks), len(layers), tokens, d),
    )
    return x_TD, features


@functools.cache
def _places(blocks: int, layers: tuple[int, ...]) -> "ctypes.Array[ctypes.c_int32]":
    """Where the state that enters each block and the last norm goes; -1: nowhere."""
    return (ctypes.c_int32 * (blocks + 1))(*(layers.index(i) if i in layers else -1 for i in range(blocks + 1)))


def fits(residual_TD: Tensor, weights: Blocks, *_: object) -> bool:
    return weights.fits and residual_TD.dtype == torch.float32


def cost(residual_TD: Tensor, weights: Blocks, inputs: Inputs, planes: Tensor, layers: Sequence[int] = ()) -> Cost:
    total = Cost(residual_TD.nbytes * (2 + len(layers)) + weights.norm.nbytes)
    for block_, plane in zip(weights.blocks, planes.unbind(0), strict=True):
        total += block.cost(residual_TD, None, block_, inputs, plane)
    return total


def cases() -> Iterator[Case]:
    def make(dims: tuple[int, ...], chunk: int, lengths: tuple[int, ...], dtype: torch.dtype, layers: tuple[int, ...]):
        def inputs(g: torch.Generator) -> tuple[Tensor, Blocks, Inputs, Tensor, tuple[int, ...]]:
            residual, _, first, step, plane = example(g, dims, 0, chunk, lengths, dtype)
            rest = [example(g, dims, 8, chunk, lengths, dtype)[2] for _ in range(2)]
            planes = torch.stack([plane, *(torch.randn(plane.shape, generator=g).to(dtype) for _ in rest)])
            return residual, Blocks((first, *rest), torch.rand(dims[0], generator=g) + 0.5, 1e-5), step, planes, layers

        return inputs

    yield Case("T=1 nano", make(NANO, 0, (70,), torch.bfloat16, ()))
    yield Case("a chunk and queries, states kept, nano", make(NANO, 20, (1, 65), torch.bfloat16, (3, 0, 2)))
    yield Case("a chunk and queries, nano fp8 pages", make(NANO, 20, (1, 65), FP8, ()))
    yield Case("queries, the last state kept, tiny float32 pages", make(TINY, 0, (5, 130), torch.float32, (3,)))


blocks = Op("blocks", reference, kernel, cost, cases, rtol=0.0, fits=fits)
