"""One block: latent attention, then experts.        T tokens, D hidden, H heads, V value, P rope, Q queries.

residual += partial; residual += attention(norm(residual)); partial = experts(norm(residual)). The last addition belongs
to whoever norms next (`add_norm`).

The reference is the seven ops one after another. On a CPU the kernel is the same in one call: the way from Python costs
some 5 us an op, and a step of one token has nearly sixty of them. The bits are the same.
"""

import ctypes
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.ops import native
from redline.ops.add_norm import add_norm
from redline.ops.formats import Int4, quantize_int4
from redline.ops.linear import linear
from redline.ops.mla import (
    FP8,
    NANO,
    TINY,
    MlaWeights,
    kv_type,
    mla_decode,
    mla_prefill,
    mla_qkv,
    prefill_whole,
    random_weights,
    rounds,
)
from redline.ops.moe import Routed, addresses_of, moe
from redline.ops.op import Case, Cost, Op
from redline.ops.route_experts import route_experts
from redline.ops.weights import PANEL, Experts, Matrix, prepare_experts
from redline.wire.job import PAGE_TOKENS


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
    router: Matrix
    bias_E: Tensor  # float32
    gate_up: Experts
    down: Experts
    chosen: int  # experts of a token
    normalise: bool
    scale: float


@dataclass(frozen=True)
class Block:
    attention_norm: Tensor  # float32 [D]
    attention: MlaWeights
    o_proj: Matrix
    mlp_norm: Tensor  # float32 [D]
    shared_gate_up: Matrix  # of the shared expert, or of the dense MLP
    shared_down: Matrix
    experts: Moe | None
    eps: float  # of the two norms
    softmax_scale: float

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the kernels take all these sizes."""
        w, moe_ = self.attention, self.experts
        if not w.panels:
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


class _Tokens(ctypes.Structure):  # cpu/kernels.h: BlockTokens
    _fields_ = [
        *_fields(ctypes.c_void_p, "ids cos sin rows chunks tokens slots lengths tables"),
        *_fields(ctypes.c_int64, "table_width"),
        *_fields(ctypes.c_int, "T C Q"),
    ]


def reference(
    residual_TD: Tensor, partial_TD: Tensor | None, weights: Block, inputs: Inputs, plane: Tensor
) -> tuple[Tensor, Tensor]:
    """-> (residual, partial). Both given ones may be changed in place and must not be used afterwards.

    plane [pages, 64, kv width]: read, and written at rows_T.
    """
    w = weights.attention
    residual, x = add_norm(residual_TD, partial_TD, weights.attention_norm, weights.eps)
    q = mla_qkv(x, w, inputs.cos_T, inputs.sin_T, inputs.rows_T, plane)
    o = torch.empty(x.shape[0], w.heads, w.value, dtype=x.dtype, device=x.device)
    _attend(q, w, weights.softmax_scale, inputs, plane, o)
    partial = linear(o.flatten(1), weights.o_proj, rounds(plane))
    residual, x = add_norm(residual, partial, weights.mlp_norm, weights.eps)
    routed = _route(x, weights.experts)
    return residual, moe(x, weights.shared_gate_up, weights.shared_down, routed, rounds(plane))


def _attend(q: Tensor, w: MlaWeights, scale: float, inputs: Inputs, plane: Tensor, o: Tensor) -> None:
    chunks = inputs.chunks
    if q.is_cuda and (whole := [(chunk.first, chunk.count) for chunk in chunks if chunk.start == 0]):
        prefill_whole(q, w, scale, whole, inputs.rows_T, plane, o)
        chunks = [chunk for chunk in chunks if chunk.start]
    for chunk in chunks:
        rows = slice(chunk.first, chunk.first + chunk.count)
        mla_prefill(q[rows], w, scale, chunk.start, inputs.tables[chunk.slot], plane, o[rows])
    if inputs.tokens_Q.shape[0]:
        mla_decode(q, w, scale, inputs.tokens_Q, inputs.slots_Q, inputs.lengths_Q, inputs.tables, plane, o)


def _route(x: Tensor, experts: Moe | None) -> Routed | None:
    if experts is None:
        return None
    e = experts
    ids, weights = route_experts(x, e.router, e.bias_E, e.chosen, e.normalise, e.scale)
    return Routed(e.gate_up, e.down, ids, weights)


def kernel(
    residual_TD: Tensor, partial_TD: Tensor | None, weights: Block, inputs: Inputs, plane: Tensor
) -> tuple[Tensor, Tensor]:
    library = native.library()
    assert library is not None
    given = 0 if partial_TD is None else native.pointer(partial_TD)
    y_TD = torch.empty_like(residual_TD) if partial_TD is None else partial_TD
    library.redline_block(
        ctypes.addressof(weights.layout),
        inputs.address,
        native.pointer(plane),
        kv_type(plane),
        native.pointer(residual_TD),
        given,
        y_TD.data_ptr(),
    )
    return residual_TD, y_TD


def fits(residual_TD: Tensor, partial_TD: Tensor | None, weights: Block, *_: object) -> bool:
    return weights.fits


def cost(residual_TD: Tensor, partial_TD: Tensor | None, weights: Block, inputs: Inputs, plane: Tensor) -> Cost:
    """The weights, of the routed experts only as many as one token chooses; each query's and each chunk's context."""
    tokens = residual_TD.shape[0]
    w, moe_ = weights.attention, weights.experts
    dense = (weights.o_proj, weights.shared_gate_up, weights.shared_down)
    read = w.nbytes + sum(matrix.nbytes for matrix in dense)
    inner = w.w_a.shape[0] * w.w_a.shape[1] + w.w_q.shape[0] * w.w_q.shape[1] + w.heads * w.rank * (w.nope + w.value)
    inner += sum(matrix.shape[0] * matrix.shape[1] for matrix in dense)
    if moe_ is not None:
        experts, d, width = moe_.down.shape
        read += moe_.router.nbytes + (moe_.gate_up.nbytes + moe_.down.nbytes) // experts * moe_.chosen
        inner += moe_.chosen * 3 * d * width + experts * d
    context = int(inputs.lengths_Q.sum()) + sum(chunk.start + chunk.count for chunk in inputs.chunks)
    moved = read + context * plane.shape[-1] * plane.element_size() + 4 * residual_TD.nbytes
    return Cost(moved, 2 * tokens * inner)


def example(
    g: torch.Generator, dims: tuple[int, ...], experts: int, chunk: int, lengths: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Block, Inputs, Tensor]:
    """Random arguments. Slot 0: a chunk of a prompt that begins at 64; slots 1...: queries."""
    d, w, width, count = dims[0], random_weights(g, *dims), 64, chunk + len(lengths)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) * shape[-1] ** -0.5).to(torch.bfloat16)

    def routed(*shape: int) -> Experts:
        return prepare_experts(weight(*shape) if dtype == torch.float32 else quantize_int4(weight(*shape)))

    moe_ = None
    if experts:
        router, bias = Matrix.prepare(weight(experts, d)), torch.randn(experts, generator=g) * 0.1
        up, down = routed(experts, 2 * width, d), routed(experts, d, width)
        moe_ = Moe(router, bias, up, down, 4, True, 2.5)
    norms = torch.rand(2, d, generator=g) + 0.5
    block_ = Block(
        *(norms[0], w, Matrix.prepare(weight(d, w.heads * w.value)), norms[1]),
        *(Matrix.prepare(weight(2 * width, d)), Matrix.prepare(weight(d, width)), moe_, 1e-5, 0.1),
    )
    contexts = (64 + chunk, *lengths)
    pages = -(-max(contexts) // PAGE_TOKENS)
    tables = torch.randperm(len(contexts) * pages, generator=g).to(torch.int32).view(-1, pages)
    plane = torch.randn(tables.numel(), PAGE_TOKENS, w.rank + w.rope, generator=g).to(dtype)
    places = [(0, 64 + i) for i in range(chunk)] + [(1 + i, length - 1) for i, length in enumerate(lengths)]
    rows = [int(tables[slot, at // PAGE_TOKENS]) * PAGE_TOKENS + at % PAGE_TOKENS for slot, at in places]
    angle = torch.rand(count, w.rope // 2, generator=g) * 6.28
    step = Inputs(
        ids_T=torch.zeros(count, dtype=torch.int64),
        cos_T=angle.cos(),
        sin_T=angle.sin(),
        rows_T=torch.tensor(rows),
        chunks=(Chunk(0, chunk, 64, 0),) if chunk else (),
        tokens_Q=torch.arange(chunk, count, dtype=torch.int32),
        slots_Q=torch.arange(1, 1 + len(lengths), dtype=torch.int32),
        lengths_Q=torch.tensor(lengths, dtype=torch.int32),
        tables=tables,
    )
    return torch.randn(count, d, generator=g), torch.randn(count, d, generator=g), block_, step, plane


def cases() -> Iterator[Case]:
    def make(dims: tuple[int, ...], experts: int, chunk: int, lengths: tuple[int, ...], dtype: torch.dtype):
        return functools.partial(example, dims=dims, experts=experts, chunk=chunk, lengths=lengths, dtype=dtype)

    yield Case("T=1 nano", make(NANO, 16, 0, (200,), torch.bfloat16))
    yield Case("a chunk and queries, nano", make(NANO, 16, 30, (1, 64, 65, 300), torch.bfloat16))
    yield Case("a chunk and queries, nano fp8 pages", make(NANO, 16, 30, (1, 64, 65, 300), FP8))
    yield Case("a chunk alone, tiny, dense MLP", make(TINY, 0, 70, (), torch.bfloat16))
    yield Case("queries, tiny float32 pages, bf16 experts", make(TINY, 8, 0, (5, 400, 70), torch.float32))


block = Op("block", reference, kernel, cost, cases, rtol=0.0, fits=fits)
