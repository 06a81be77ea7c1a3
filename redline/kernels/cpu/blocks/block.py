"""What a block of the model reads, and a step: the records that a CPU's kernels take by address.

T tokens, D hidden, H heads, V value, P rope, Q queries. What they mean together is `redline.model.k2.forward`.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.mla import in_panels
from redline.kernels.cpu.moe import addresses_of
from redline.kernels.cpu.panels import PANEL, Experts, Matrix
from redline.ops.formats import Int4
from redline.ops.mla import MlaWeights


@dataclass(frozen=True)
class Chunk:
    """Tokens [first, first + count) of the step are positions [start, start + count) of a prompt."""

    first: int
    count: int
    start: int
    slot: int


@dataclass(frozen=True)
class Inputs:
    """One step, as tensors. Every token is in exactly one chunk or is one query."""

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
    routing: Tensor | None = None  # int32 [layers, T, k]: experts that are given, not chosen, for benchmarks on a GPU

    @functools.cached_property
    def count(self) -> int:
        """T"""
        return self.ids_T.shape[0]

    @functools.cached_property
    def address(self) -> int:
        """Of what the kernels read; it lasts as long as these tensors."""
        return ctypes.addressof(self._layout)

    @functools.cached_property
    def _layout(self) -> "_Tokens":
        queries = self.tokens_Q, self.slots_Q, self.lengths_Q
        return _Tokens(
            *map(native.pointer, (self.ids_T, self.cos_T, self.sin_T, self.rows_T)),
            ctypes.addressof(self._chunks),
            *map(native.pointer, (*queries, self.tables)),
            *(self.tables.shape[1], self.count, len(self.chunks), self.tokens_Q.shape[0]),
        )

    @functools.cached_property
    def _chunks(self) -> "ctypes.Array[ctypes.c_int]":
        values = [value for c in self.chunks for value in (c.first, c.count, c.start, c.slot)]
        return (ctypes.c_int * len(values))(*values)


@dataclass(frozen=True)
class Moe:
    """The routed experts of a layer and their router, as `route_experts` and `moe` take them."""

    router: Matrix  # bf16 [E, D]
    bias_E: Tensor  # float32
    gate_up: Experts  # [E, 2 I, D], gate first
    down: Experts  # [E, D, I]
    chosen: int  # experts of a token
    normalise: bool  # whether a token's weights are divided by their sum
    scale: float  # what they are multiplied by then


@dataclass(frozen=True)
class Block:
    """One layer's weights, and the numbers of its formulas that are no weights."""

    attention_norm: Tensor  # float32 [D]
    attention: MlaWeights[Matrix]
    o_proj: Matrix  # bf16 [D, H V]
    mlp_norm: Tensor  # float32 [D]
    shared_gate_up: Matrix  # bf16 [2 Is, D], gate first: of the shared expert, or of the dense MLP
    shared_down: Matrix  # bf16 [D, Is]
    experts: Moe | None  # None: a dense layer
    eps: float  # of the two norms
    softmax_scale: float  # what attention's scores are multiplied by

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the kernels take these weights: all in panels, and every width that they write a multiple of 32."""
        w, moe_ = self.attention, self.experts
        if not in_panels(w):
            return False
        widths = [w.w_q.outputs, w.rank, w.rope, w.value, *self.shared_down.shape]
        if moe_ is not None:
            if isinstance(moe_.gate_up, Int4) or isinstance(moe_.down, Int4):
                return False
            widths += moe_.down.shape[-2:]
        return all(width % PANEL == 0 for width in widths)

    @functools.cached_property
    def layout(self) -> "_Weights":
        """As block.cpp reads it."""
        w, moe_, pointer = self.attention, self.experts, native.pointer
        routed, sizes, normalise, scale = (0,) * 6, (0, 0, 0), False, 0.0
        if moe_ is not None:
            routed = moe_.router.address, pointer(moe_.bias_E), *addresses_of(moe_.gate_up), *addresses_of(moe_.down)
            sizes, normalise, scale = (moe_.down.shape[0], moe_.chosen, moe_.down.shape[2]), moe_.normalise, moe_.scale
        return _Weights(
            *(pointer(self.attention_norm), w.w_a.address, pointer(w.q_norm), pointer(w.kv_norm)),
            *(w.w_q.address, w.w_uk.address, w.w_uv.address, self.o_proj.address, pointer(self.mlp_norm)),
            *(self.shared_gate_up.address, self.shared_down.address, *routed),
            *(self.eps, w.eps, self.softmax_scale, scale),
            *(self.mlp_norm.shape[0], w.q_norm.shape[0], *w.sizes, self.shared_down.shape[1], *sizes, normalise),
        )


_Kind = type[ctypes.c_void_p] | type[ctypes.c_float] | type[ctypes.c_int] | type[ctypes.c_int64]


def _fields(kind: _Kind, names: str) -> list[tuple[str, _Kind]]:
    return [(name, kind) for name in names.split()]


class _Weights(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_void_p, "attention_norm w_a q_norm kv_norm w_q w_uk w_uv o_proj mlp_norm shared_gate_up"),
        *_fields(ctypes.c_void_p, "shared_down router bias gate_up gate_up_scales down down_scales"),
        *_fields(ctypes.c_float, "norm_eps low_rank_eps softmax_scale routed_scale"),
        *_fields(ctypes.c_int, "D Rq H Nn P R V Is E k I normalise"),
    ]


class _Tokens(ctypes.Structure):  # core/kernels.h: BlockTokens
    _fields_ = [
        *_fields(ctypes.c_void_p, "ids cos sin rows chunks tokens slots lengths tables"),
        *_fields(ctypes.c_int64, "table_width"),
        *_fields(ctypes.c_int, "T C Q"),
    ]
