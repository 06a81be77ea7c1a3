"""An EAGLE-3 drafter's forward pass in one call on a CPU, with its test cases; bit-identical to `forward.py`.

`draft_fuse`, `draft_pass` and `draft_chain` correspond to `fuse`, `forward` and `chain` of that module.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from redline.kernels.cpu.blocks import draft_pass as one_call
from redline.kernels.cpu.blocks.draft_pass import (
    DraftChainArgs,
    DraftFuseArgs,
    DraftLayer,
    DraftPages,
    DraftPassArgs,
    DraftRows,
)
from redline.kernels.cpu.panels import Matrix, panels_of
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.model.eagle3.forward import chain, forward, fuse
from redline.ops.mla import FP8, NANO, TINY, MlaWeights, random_weights
from redline.ops.op import Case, Cost, Op


def _fuse_cost(args: DraftFuseArgs) -> Cost:
    outputs, inputs = args.fc.shape
    rows = len(args.sources)
    return Cost(
        rows * (inputs + outputs) * args.features_NF.element_size() + args.fc.nbytes, 2 * rows * inputs * outputs
    )


def _pass_cost(args: DraftPassArgs) -> Cost:
    """The weights once, and each query's context."""
    weights, rows, plane = args.weights, args.rows, args.plane
    w = weights.attention
    assert isinstance(w, MlaWeights), "the cost of latent attention"
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


def _inputs(
    g: torch.Generator, dims: tuple[int, ...], spans: Sequence[tuple[int, int]], dtype: torch.dtype, kind: int
) -> tuple[Tensor, DraftLayer, DraftPages, DraftRows, Tensor]:
    """Slot i: rows of positions [start, stop), the last of which is a query, in pages with space for 6 drafts.

    kind: bit 0: the normed output is fed back; bit 1: the residual starts normed.
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
    Op("draft_fuse", DraftFuseArgs, fuse, _fuse_cost, _fuse_cases, rtol=0.0),
    one_call.fuse,
    "cpu",
    one_call.fuse_fits,
)
draft_pass = Kernel(
    Op("draft_pass", DraftPassArgs, forward, _pass_cost, _pass_cases, rtol=0.0, writes=("plane",)),
    one_call.run,
    "cpu",
    one_call.fits,
)
draft_chain = Kernel(
    Op("draft_chain", DraftChainArgs, chain, _chain_cost, _chain_cases, rtol=0.0, writes=("plane",)),
    one_call.chain,
    "cpu",
    one_call.fits,
)
