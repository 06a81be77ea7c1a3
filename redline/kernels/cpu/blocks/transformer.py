"""A model in one call on a CPU: the embedding, all blocks, the last norm, the head, the argmax of the next tokens.

A call from Python costs about 5 us per op, and 20 us if the native calls in between have filled Python's caches with
weights (`benchmarks/results/step-profile.json`). A step of one token has nearly sixty ops. The computation, and the
bits of its results, are defined in `redline.model.k2.forward`.

T tokens, D hidden, L blocks, F captured states, R rows with a requested next token, V vocabulary.
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
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.inputs import Inputs
from redline.kernels.record import ArgumentStruct

_transformer = native.function("transformer")
_TransformerWeights = native.record("TransformerWeights")


@dataclass(frozen=True)
class Transformer:
    """A whole model's weights, in the form of the native call."""

    embedding_VD: Tensor  # bf16
    blocks: tuple[Block, ...]
    norm: Tensor  # float32 [D]
    head: Matrix | Tiled  # bf16 [V, D]; the native call takes a Matrix in panels
    eps: float  # of the last norm

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the native call supports the model: all blocks fit, the embedding is bf16, the head is in panels."""
        return (
            bool(self.blocks)
            and all(block_.fits for block_ in self.blocks)
            and self.embedding_VD.dtype == torch.bfloat16
            and isinstance(self.head, Matrix)
            and self.head.panels
        )

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of activations: float32 on a CPU, bf16 (that of the weights) on a GPU."""
        return torch.bfloat16 if self.embedding_VD.is_cuda else torch.float32

    @functools.cached_property
    def width(self) -> int:
        """D."""
        return self.norm.shape[0]

    @functools.cached_property
    def logits_width(self) -> int:
        """The width of a row of the kernel's logits: V, padded to whole panels of 32."""
        return (self.head.outputs + PANEL - 1) // PANEL * PANEL

    @functools.cached_property
    def address(self) -> int:
        """Address of the record that the kernels read; valid for the lifetime of this object."""
        return ctypes.addressof(self._layout)

    @functools.cached_property
    def _layout(self) -> ArgumentStruct:
        """The record that the kernels read; valid for the lifetime of these weights."""
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


class TransformerOutput(NamedTuple):
    """The result of a step. Most steps need only tokens: the other results become tensors when they are read."""

    likeliest: list[int]  # R argmax tokens; ties go to the lowest id, -1 if a logit is not finite
    features: Tensor | None  # [T, F D]: the residual stream at the input of the captured layers; None: none captured
    hidden: Callable[[], Tensor]  # [T, D]: the normed last state
    logits: Callable[[], Tensor]  # float32 [R, V]


class TransformerArgs(NamedTuple):
    """Runs a step of the whole model, from its tokens to the argmax of the next ones."""

    planes: Tensor  # [L, pages, 64, R + P] float32, bf16 or e4m3: read, and written at rows_T
    weights: Transformer
    inputs: Inputs
    layers: Sequence[int]  # F layers whose input states are captured, in the order of `features`; L: the last norm
    asked: Sequence[int]  # R indices of tokens in the step


def run(args: TransformerArgs) -> TransformerOutput:
    """The whole step in one native call, with float32 intermediates; writes the planes at rows_T."""
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
    return TransformerOutput(
        likeliest.tolist(),
        features,
        lambda: _tensor(hidden, tokens, d),
        lambda: _tensor(logits, rows, weights.logits_width)[:, : weights.head.outputs],
    )


def _floats(rows: int, width: int) -> "ctypes.Array[ctypes.c_float]":
    """Zeroed memory from ctypes: allocating a tensor takes ten times longer."""
    return (ctypes.c_float * (rows * width))()


def _tensor(floats: "ctypes.Array[ctypes.c_float]", rows: int, width: int) -> Tensor:
    return torch.frombuffer(floats, dtype=torch.float32).view(rows, width) if rows else torch.empty(0, width)


@functools.cache
def _places(blocks: int, layers: tuple[int, ...]) -> "ctypes.Array[ctypes.c_int32]":
    """int32 [L + 1]: index in `features` of the input of each block and of the last norm; -1: not captured."""
    return (ctypes.c_int32 * (blocks + 1))(*(layers.index(i) if i in layers else -1 for i in range(blocks + 1)))


def fits(args: TransformerArgs) -> bool:
    """Whether the native call supports these weights; any number and mixture of tokens is supported."""
    return args.weights.fits
