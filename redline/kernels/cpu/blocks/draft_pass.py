"""A pass of an EAGLE-3 drafter with latent attention, what comes before it, and the greedy chain of passes.

T rows, R queries (rows that are finished), D hidden, H heads, P rope, V value width (in logits: vocabulary).

`draft_fuse`   the target's states of some positions, each normed, to one feature
`draft_pass`   embeddings and features, normed, side by side, through one layer of latent attention and an MLP
`draft_chain`  a pass, the likeliest token of each query, a pass over those, and so on

Row t takes the token at place t + 1, is rotated by t, and lies at place t + 1 of its slot's pages; place 0 holds
nothing. The references are the ops one after another. On a CPU the kernels are the same in one call: a pass has some
twenty small tensors and twelve calls, which together cost as much as its arithmetic. The bits are the same.
"""

import ctypes
import functools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.by_chip import best, linear
from redline.kernels.cpu import native
from redline.kernels.cpu.add_norm import add_norm
from redline.kernels.cpu.mla import in_panels, kv_type, mla_decode, mla_qkv
from redline.kernels.cpu.moe import moe
from redline.kernels.cpu.panels import PANEL, Matrix, panels_of
from redline.kernels.hopper.layouts.tiled import Tiled
from redline.kernels.kernel import Kernel
from redline.ops.mla import FP8, NANO, TINY, MlaWeights, random_weights, rounds
from redline.ops.op import Case, Cost, Op
from redline.wire.job import PAGE_TOKENS

SKIP = 1  # place 0 of a job


@dataclass(frozen=True)
class DraftLayer:
    """All of a drafter but its fusion. `head`: of the whole vocabulary, in its order; only the chain reads it."""

    embedding_VD: Tensor  # bf16
    input_norm: Tensor  # float32 [D], as are the others
    hidden_norm: Tensor
    attention: MlaWeights[Matrix]  # over [embedding | feature], 2 D
    o_proj: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    norm: Tensor
    head: Matrix | Tiled
    eps: float
    softmax_scale: float
    norm_before_residual: bool
    norm_output: bool  # whether what is fed back is normed

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the kernels take all these sizes."""
        w = self.attention
        widths = w.w_q.outputs, w.rank, w.rope, w.value, *self.down.shape
        return (
            self.embedding_VD.dtype == torch.bfloat16 and in_panels(w) and all(width % PANEL == 0 for width in widths)
        )

    @functools.cached_property
    def layout(self) -> "_Weights":
        """As draft_pass.cpp reads it."""
        w, head, pointer = self.attention, self.head, native.pointer
        assert isinstance(head, Matrix), "the CPU's kernels read panels"
        return _Weights(
            *map(pointer, (self.embedding_VD, self.input_norm, self.hidden_norm)),
            *(w.w_a.address, pointer(w.q_norm), pointer(w.kv_norm), w.w_q.address, w.w_uk.address, w.w_uv.address),
            *(self.o_proj.address, pointer(self.mlp_norm), self.gate_up.address, self.down.address),
            *(pointer(self.norm), head.address, self.eps, w.eps, self.softmax_scale),
            *(self.norm.shape[0], w.q_norm.shape[0], *w.sizes, self.down.shape[1], head.outputs),
            *(self.norm_before_residual, self.norm_output),
        )


@dataclass(frozen=True)
class DraftPages:
    """What rows are looked up in; it lasts as long as these tensors, whose contents may change."""

    tokens: Tensor  # int64 [slots, places]
    tables: Tensor  # int32 [slots, pages per slot]
    cos: Tensor  # float32 [positions, P / 2]
    sin: Tensor

    @functools.cached_property
    def layout(self) -> "_Pages":
        pointers = map(native.pointer, (self.tokens, self.tables, self.cos, self.sin))
        return _Pages(*pointers, self.tokens.shape[1], self.tables.shape[1])


@dataclass(frozen=True)
class DraftRows:
    """`queries`: the rows that are finished. `ids`: the rows' tokens; None: those that their slots have."""

    slots: Sequence[int]
    positions: Sequence[int]
    queries: Sequence[int]
    ids: Sequence[int] | None = None


_Kind = type[ctypes.c_void_p] | type[ctypes.c_float] | type[ctypes.c_int] | type[ctypes.c_int64]


def _fields(kind: _Kind, names: str) -> list[tuple[str, _Kind]]:
    return [(name, kind) for name in names.split()]


class _Weights(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_void_p, "embedding input_norm hidden_norm w_a q_norm kv_norm w_q w_uk w_uv o_proj mlp_norm"),
        *_fields(ctypes.c_void_p, "gate_up down norm head"),
        *_fields(ctypes.c_float, "eps low_rank_eps softmax_scale"),
        *_fields(ctypes.c_int, "D Rq H Nn P R V I vocabulary norm_before_residual norm_output"),
    ]


class _Pages(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_void_p, "tokens tables cos sin"),
        *_fields(ctypes.c_int64, "tokens_width table_width"),
    ]


def _ints(values: Sequence[int]) -> tuple[int, "array[int]"]:
    """The address of int32, and what keeps them."""
    kept = array("i", values)
    return kept.buffer_info()[0], kept


# ------------------------------------------------------------------------------------------------------- draft_fuse


class DraftFuseArgs(NamedTuple):
    """What `draft_fuse` takes."""

    features_NF: Tensor
    sources: Sequence[int]
    norms_SW: Tensor | None
    fc: Matrix
    eps: float


def _fuse_reference(args: DraftFuseArgs) -> Tensor:
    """Rows `sources` of S states side by side, F = S W -> [T, D]. norms_SW: float32; None: they go in as they are."""
    norms_SW = args.norms_SW
    x = args.features_NF[list(args.sources)]
    if norms_SW is not None:
        states = x.unflatten(-1, tuple(norms_SW.shape)).unbind(-2)
        x = torch.cat(
            [add_norm(s.contiguous(), None, w, args.eps)[1] for s, w in zip(states, norms_SW, strict=True)], -1
        )
    return linear(x, args.fc)


def _fuse_kernel(args: DraftFuseArgs) -> Tensor:
    features_NF, norms_SW, fc = args.features_NF, args.norms_SW, args.fc
    library = native.library()
    assert library is not None
    rows, kept_rows = _ints(args.sources)
    states, width = (1, features_NF.shape[1]) if norms_SW is None else norms_SW.shape
    fused = features_NF.new_empty(len(kept_rows), fc.outputs)
    library.redline_draft_fuse(
        native.pointer(features_NF),
        rows,
        0 if norms_SW is None else native.pointer(norms_SW),
        fc.address,
        fused.data_ptr(),
        *(args.eps, len(kept_rows), states, width, fc.outputs),
    )
    return fused


def _fuse_fits(args: DraftFuseArgs) -> bool:
    return args.fc.panels and args.fc.outputs % PANEL == 0 and args.features_NF.is_contiguous()


def _fuse_cost(args: DraftFuseArgs) -> Cost:
    outputs, inputs = args.fc.shape
    rows = len(args.sources)
    return Cost(
        rows * (inputs + outputs) * args.features_NF.element_size() + args.fc.nbytes, 2 * rows * inputs * outputs
    )


# ------------------------------------------------------------------------------------------------------- draft_pass


class DraftPassArgs(NamedTuple):
    """What `draft_pass` takes."""

    feature_TD: Tensor
    weights: DraftLayer
    pages: DraftPages
    rows: DraftRows
    plane: Tensor


def _pass_reference(args: DraftPassArgs) -> tuple[Tensor, Tensor]:
    """-> normed [R, D], which the head reads, and fed [R, D], the feature of a next row. feature_TD: fused or fed.

    plane [pages, 64, kv width]: written at the rows' places, then read.
    """
    feature_TD, weights, pages, rows, plane = args.feature_TD, args.weights, args.pages, args.rows, args.plane
    w, device = weights.attention, feature_TD.device

    def tensor(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    slot_T, position_T = tensor(rows.slots), tensor(rows.positions)
    query_R, place_T = tensor(rows.queries), position_T + 1
    ids_T = pages.tokens[slot_T, place_T] if rows.ids is None else tensor(rows.ids)
    row_T = pages.tables[slot_T, place_T // PAGE_TOKENS].long() * PAGE_TOKENS + place_T % PAGE_TOKENS
    _, embedding = add_norm(weights.embedding_VD[ids_T].to(feature_TD.dtype), None, weights.input_norm, weights.eps)
    _, hidden = add_norm(feature_TD, None, weights.hidden_norm, weights.eps)
    x = torch.cat([embedding, hidden], -1)
    q = mla_qkv(x, w, pages.cos[position_T], pages.sin[position_T], row_T, plane)[query_R]
    residual = (hidden if weights.norm_before_residual else feature_TD)[query_R]
    if not rows.queries:
        return residual, residual
    o = q.new_empty(q.shape[0], w.heads, w.value)
    order = torch.arange(len(rows.queries), dtype=torch.int32, device=device)
    queries = order, slot_T[query_R].int(), (place_T[query_R] + 1).int()
    mla_decode(q, w, weights.softmax_scale, *queries, pages.tables, plane, o, SKIP)
    residual, x = add_norm(residual, linear(o.flatten(1), weights.o_proj, rounds(plane)), weights.mlp_norm, weights.eps)
    partial = moe(x, weights.gate_up, weights.down, None, rounds(plane))
    residual, normed = add_norm(residual, partial, weights.norm, weights.eps)
    return normed, normed if weights.norm_output else residual


def _pass_kernel(args: DraftPassArgs) -> tuple[Tensor, Tensor]:
    feature_TD, rows = args.feature_TD, args.rows
    library = native.library()
    assert library is not None
    slots, kept_slots = _ints(rows.slots)
    positions, kept_positions = _ints(rows.positions)
    queries, kept_queries = _ints(rows.queries)
    ids, kept_ids = (0, None) if rows.ids is None else _ints(rows.ids)
    normed, fed = feature_TD.new_empty(2, len(kept_queries), feature_TD.shape[1]).unbind(0)
    library.redline_draft_pass(
        ctypes.addressof(args.weights.layout),
        ctypes.addressof(args.pages.layout),
        native.pointer(feature_TD),
        *(slots, positions, ids, queries, len(kept_slots), len(kept_queries)),
        native.pointer(args.plane),
        kv_type(args.plane),
        normed.data_ptr(),
        fed.data_ptr(),
    )
    del kept_positions, kept_ids
    return normed, fed


def _pass_cost(args: DraftPassArgs) -> Cost:
    """The weights once, and each query's context."""
    weights, rows, plane = args.weights, args.rows, args.plane
    w = weights.attention
    tokens, d = args.feature_TD.shape
    queries, width = len(rows.queries), plane.shape[-1]
    context = sum(rows.positions[i] + 1 for i in rows.queries)
    dense = weights.o_proj, weights.gate_up, weights.down
    read = w.nbytes + sum(matrix.nbytes for matrix in dense) + context * width * plane.element_size()
    inner = sum(matrix.shape[0] * matrix.shape[1] for matrix in dense) + w.heads * w.rank * (w.nope + w.value)
    flops = 2 * tokens * (w.w_a.shape[0] * 2 * d + w.w_q.shape[0] * w.w_q.shape[1]) + 2 * queries * inner
    return Cost(
        read + args.feature_TD.nbytes + tokens * (2 * d + width * plane.element_size()) + 8 * queries * d, flops
    )


def _pass_fits(args: "DraftPassArgs | DraftChainArgs") -> bool:
    return args.weights.fits and args.feature_TD.is_contiguous()


# ------------------------------------------------------------------------------------------------------ draft_chain


class DraftChainArgs(NamedTuple):
    """What `draft_chain` takes."""

    feature_TD: Tensor
    weights: DraftLayer
    pages: DraftPages
    rows: DraftRows
    wanted: Sequence[int]
    plane: Tensor


def _chain_reference(args: DraftChainArgs) -> Tensor:
    """The pass of `rows`, then for each query as many drafts as are `wanted` of it, at least one.

    -> int64 [R, most wanted], 0 where fewer are. The rows of all drafts but a query's last are written to the plane.
    """
    weights, rows, wanted = args.weights, args.rows, args.wanted
    normed, fed = draft_pass(args.feature_TD, weights, args.pages, rows, args.plane)
    drafted = torch.zeros(len(rows.queries), max(wanted, default=0), dtype=torch.int64)
    asked, slots = list(range(len(wanted))), [rows.slots[i] for i in rows.queries]
    positions = [rows.positions[i] for i in rows.queries]
    done = 0
    while asked:
        ids = best(linear(normed, weights.head).float())[0].cpu()
        drafted[asked, done] = ids
        done += 1
        going = [i for i, query in enumerate(asked) if wanted[query] > done]
        asked, slots = [asked[i] for i in going], [slots[i] for i in going]
        positions = [positions[i] + 1 for i in going]
        if going:
            next_ = DraftRows(slots, positions, range(len(going)), ids[going].tolist())
            normed, fed = draft_pass(fed[going], weights, args.pages, next_, args.plane)
    return drafted


def _chain_kernel(args: DraftChainArgs) -> Tensor:
    rows = args.rows
    assert rows.ids is None, "the chain begins behind what the slots have"
    library = native.library()
    assert library is not None
    slots, kept_slots = _ints(rows.slots)
    positions, kept_positions = _ints(rows.positions)
    queries, kept_queries = _ints(rows.queries)
    wants, kept_wants = _ints(args.wanted)
    drafted = torch.zeros(len(kept_queries), max(args.wanted, default=0), dtype=torch.int64)
    library.redline_draft_chain(
        ctypes.addressof(args.weights.layout),
        ctypes.addressof(args.pages.layout),
        native.pointer(args.feature_TD),
        *(slots, positions, queries, wants, len(kept_slots), len(kept_queries)),
        native.pointer(args.plane),
        kv_type(args.plane),
        drafted.data_ptr(),
        drafted.shape[1],
    )
    del kept_positions, kept_wants
    return drafted


def _chain_cost(args: DraftChainArgs) -> Cost:
    weights, rows = args.weights, args.rows
    total = _pass_cost(DraftPassArgs(args.feature_TD, weights, args.pages, rows, args.plane))
    for done in range(max(args.wanted, default=0)):
        going = [i for i, want in zip(rows.queries, args.wanted, strict=True) if want > done]
        head = weights.head
        total += Cost(head.nbytes, 2 * len(going) * head.shape[0] * head.shape[1])
        if done:
            slots, positions = [rows.slots[i] for i in going], [rows.positions[i] + done for i in going]
            fed, rows_ = args.feature_TD[: len(going)], DraftRows(slots, positions, range(len(going)))
            total += _pass_cost(DraftPassArgs(fed, weights, args.pages, rows_, args.plane))
    return total


# ------------------------------------------------------------------------------------------------------------ cases


def _inputs(
    g: torch.Generator, dims: tuple[int, ...], spans: Sequence[tuple[int, int]], dtype: torch.dtype, kind: int
) -> tuple[Tensor, DraftLayer, DraftPages, DraftRows, Tensor]:
    """Slot i: rows of positions [start, stop), the last of which is a query, in pages of room for 6 drafts.

    kind: bit 0, what is fed back is normed; bit 1, the residual begins normed.
    """
    d, vocabulary, width = dims[0], 500, 2 * dims[0]
    w = panels_of(random_weights(g, 2 * d, *dims[1:]))

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) * shape[-1] ** -0.5).to(torch.bfloat16)

    norms = torch.rand(4, d, generator=g) + 0.5
    layer = DraftLayer(
        *(weight(vocabulary, d), norms[0], norms[1], w, Matrix.prepare(weight(d, w.heads * w.value)), norms[2]),
        *(Matrix.prepare(weight(2 * width, d)), Matrix.prepare(weight(d, width)), norms[3]),
        *(Matrix.prepare(weight(vocabulary, d)), 1e-5, 0.1, bool(kind & 2), bool(kind & 1)),
    )
    places = max(stop for _, stop in spans) + 8
    count = -(-places // PAGE_TOKENS)
    angle = torch.rand(places, w.rope // 2, generator=g) * 6.28
    pages = DraftPages(
        torch.randint(vocabulary, (len(spans), places), generator=g),
        torch.randperm(len(spans) * count, generator=g).to(torch.int32).view(-1, count),
        *(angle.cos(), angle.sin()),
    )
    plane = torch.randn(pages.tables.numel(), PAGE_TOKENS, w.rank + w.rope, generator=g).to(dtype)
    slots = [slot for slot, (start, stop) in enumerate(spans) for _ in range(start, stop)]
    positions = [position for span in spans for position in range(*span)]
    queries = [i for i, slot in enumerate(slots) if slots[i + 1 : i + 2] != [slot]]
    feature = torch.randn(len(slots), d, generator=g)
    return feature, layer, pages, DraftRows(slots, positions, queries), plane


_ALONE, _COMPANY = ((130, 131),), ((60, 64), (0, 70), (200, 203), (0, 1), (62, 63))


def _fuse_cases() -> Iterator[Case]:
    def make(d: int, states: int, sources: Sequence[int], normed: bool):
        def inputs(g: torch.Generator) -> DraftFuseArgs:
            weight = (torch.randn(d, states * d, generator=g) * (states * d) ** -0.5).to(torch.bfloat16)
            norms = torch.rand(states, d, generator=g) + 0.5 if normed else None
            return DraftFuseArgs(torch.randn(40, states * d, generator=g), sources, norms, Matrix.prepare(weight), 1e-5)

        return inputs

    yield Case("T=2 nano", make(320, 3, (5, 6), normed=True))
    yield Case("T=30, some left out, nano", make(320, 3, (*range(2, 31), 39), normed=True))
    yield Case("no norms, tiny", make(64, 3, range(40), normed=False))


def _pass_cases() -> Iterator[Case]:
    def make(dims: tuple[int, ...], spans: Sequence[tuple[int, int]], dtype: torch.dtype, kind: int, given: bool):
        def inputs(g: torch.Generator) -> DraftPassArgs:
            feature, layer, pages, rows, plane = _inputs(g, dims, spans, dtype, kind)
            if given:
                rows = replace(rows, ids=torch.randint(500, (len(rows.slots),), generator=g).tolist())
            return DraftPassArgs(feature, layer, pages, rows, plane)

        return inputs

    yield Case("T=1 nano", make(NANO, _ALONE, torch.bfloat16, 1, given=True))
    yield Case("some rows are queries, nano", make(NANO, _COMPANY, torch.bfloat16, 1, given=False))
    yield Case("some rows are queries, nano fp8 pages", make(NANO, _COMPANY, FP8, 1, given=False))
    yield Case("what is fed back is not normed, tiny float32 pages", make(TINY, _COMPANY, torch.float32, 0, given=True))
    yield Case("the residual begins normed, tiny", make(TINY, _COMPANY, torch.bfloat16, 2, given=False))


def _chain_cases() -> Iterator[Case]:
    def make(dims: tuple[int, ...], spans: Sequence[tuple[int, int]], dtype: torch.dtype, kind: int, *wanted: int):
        def inputs(g: torch.Generator) -> DraftChainArgs:
            feature, layer, pages, rows, plane = _inputs(g, dims, spans, dtype, kind)
            rows = rows if wanted else replace(rows, queries=())
            return DraftChainArgs(feature, layer, pages, rows, wanted, plane)

        return inputs

    yield Case("one row, 3 drafts, nano", make(NANO, _ALONE, torch.bfloat16, 1, 3))
    yield Case("each its own number, over a page's end, nano", make(NANO, _COMPANY, torch.bfloat16, 1, 3, 1, 6, 2, 4))
    yield Case("each its own number, nano fp8 pages", make(NANO, _COMPANY, FP8, 1, 3, 1, 6, 2, 4))
    yield Case("what is fed back is not normed, tiny", make(TINY, _COMPANY, torch.float32, 0, 2, 2, 2, 5, 1))
    yield Case("nobody drafts, tiny", make(TINY, _COMPANY, torch.bfloat16, 3))


draft_fuse = Kernel(
    Op("draft_fuse", DraftFuseArgs, _fuse_reference, _fuse_cost, _fuse_cases, rtol=0.0), _fuse_kernel, "cpu", _fuse_fits
)
draft_pass = Kernel(
    Op("draft_pass", DraftPassArgs, _pass_reference, _pass_cost, _pass_cases, rtol=0.0, writes=("plane",)),
    _pass_kernel,
    "cpu",
    _pass_fits,
)
draft_chain = Kernel(
    Op("draft_chain", DraftChainArgs, _chain_reference, _chain_cost, _chain_cases, rtol=0.0, writes=("plane",)),
    _chain_kernel,
    "cpu",
    _pass_fits,
)
