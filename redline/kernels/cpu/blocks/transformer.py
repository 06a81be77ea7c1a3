"""A model in one call on a CPU: the embedding, all blocks, the last norm, the head, the likeliest next tokens.

The way from Python costs some 5 us an op, and between two native calls Python finds its caches full of weights: then 20
(redline/bench/runs/step_profile.py). A step of one token has nearly sixty ops. What they mean together, and the bits
that this has to have, is `redline.model.k2.forward`.

T tokens, D hidden, L blocks, F states that are kept, R tokens whose next one is asked for, V vocabulary.
"""

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.blocks.block import Block, address_of
from redline.kernels.cpu.mla import kv_type
from redline.kernels.cpu.panels import PANEL, Matrix
from redline.kernels.hopper.layouts.tiled import Tiled
from redline.kernels.inputs import Inputs
from redline.kernels.record import Record

_transformer = native.function("transformer")
_TransformerWeights = native.record("TransformerWeights")


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
    def _layout(self) -> Record:
        """As the kernels read it; it lasts as long as these weights."""
        assert isinstance(self.head, Matrix), "the CPU's kernels read panels"
        blocks = (ctypes.c_void_p * len(self.blocks))(*(ctypes.addressof(block_.layout) for block_ in self.blocks))
        return _TransformerWeights(
            embedding=self.embedding_VD,
            blocks=blocks,
            norm=self.norm,
            head=self.head.data,
            eps=self.eps,
            L=len(self.blocks),
            D=self.width,
            V=self.head.outputs,
        )


class Predicted(NamedTuple):
    """What comes of a step. Most steps are asked for their tokens alone: the rest becomes tensors where it is read."""

    likeliest: list[int]  # R; the first of them where several are, -1 where a logit is not finite
    features: Tensor | None  # [T, F D]: the residual stream as it enters some layers
    hidden: Callable[[], Tensor]  # [T, D]: the normed last state
    logits: Callable[[], Tensor]  # float32 [R, V]


class TransformerArgs(NamedTuple):
    """A step of the whole model: L blocks, F states that are kept, R tokens whose next one is asked for."""

    planes: Tensor  # [L, pages, 64, kv width]: read, and written at rows_T
    weights: Transformer
    inputs: Inputs
    layers: Sequence[int]  # F layers whose entering states are kept; L is the last norm
    asked: Sequence[int]  # R tokens of the step


def run(args: TransformerArgs) -> Predicted:
    planes, weights, inputs, layers, asked = args
    tokens, rows, d = inputs.count, len(asked), weights.width
    features = torch.empty(tokens, len(layers) * d) if layers else None
    hidden, logits = _floats(tokens, d), _floats(rows, weights.logits_width)
    asked_R, likeliest = array("i", asked), array("q", bytes(8 * rows))
    _transformer(
        weights=weights.address,
        tokens=address_of(inputs),
        planes=planes,
        plane_bytes=planes.stride(0) * planes.element_size(),
        kv_type=kv_type(planes),
        places=ctypes.addressof(_places(len(weights.blocks), tuple(layers))),
        kept=len(layers),
        features=features,
        asked=asked_R.buffer_info()[0],
        R=rows,
        x=ctypes.addressof(hidden),
        logits=ctypes.addressof(logits),
        likeliest=likeliest.buffer_info()[0],
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


def fits(args: TransformerArgs) -> bool:
    return args.weights.fits
