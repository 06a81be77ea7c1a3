"""The forward pass of an EAGLE-3 drafter with paged KV, top to bottom: feature fusion, one layer, and greedy drafting.

Row t reads the embedding of the token at position t + 1 and the target's feature of position t. It is rotated by t, and
its KV is stored at place t + 1 of its slot's pages; place 0 is unused. Its logits predict the token at position t + 2.

    feature = fc [norm(state) | norm(state) | ...]
    x       = [norm(embedding) | norm(feature)]
    a       = feature + o_proj(attention(x))          or the normed feature + ...
    b       = a + mlp(norm(a))
    normed  = norm(b)                                 input of the head
    fed     = b                                       or normed: feature of the next drafted row, which has no states

This module is the reference. The single-call CPU path produces the same bits (law 1), and the trained module agrees
closely over whole sequences (`module.py`). Ops run as CPU kernels; within `references()`, and for sizes that a kernel
does not support, each op runs as its plain torch reference.

T rows of a pass, R finished rows (those whose output is needed), D hidden, H heads, X query width, S states of W
values, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from redline.kernels.by_chip import best, linear
from redline.kernels.cpu.add_norm import add_norm
from redline.kernels.cpu.blocks.draft_pass import (
    DraftChainArgs,
    DraftFuseArgs,
    DraftLayer,
    DraftPages,
    DraftPassArgs,
    DraftRows,
)
from redline.kernels.cpu.mla import mla_qkv
from redline.kernels.cpu.moe import moe
from redline.kernels.cpu.panels import Matrix
from redline.kernels.inputs import Inputs
from redline.messages.job import PAGE_TOKENS
from redline.model.k2.forward import attend
from redline.ops.gqa import GqaWeights, gqa_decode, gqa_prefill, heads_and_row
from redline.ops.mla import MlaWeights, rounds, stored
from redline.ops.staged import staged

SKIP = 1  # place 0 of a job is unused


def fuse(args: DraftFuseArgs) -> Tensor:
    """-> [T, D]"""
    x = args.features_NF[list(args.sources)]
    if args.norms_SW is not None:
        x = normed_states(x, [partial(_norm, weight=weight, eps=args.eps) for weight in args.norms_SW])
    return linear(x, args.fc)


def chain(args: DraftChainArgs) -> Tensor:
    """Runs the pass of `rows`, then drafts greedily: `wanted` tokens for each query.

    -> int64 [R, max(wanted)], padded with 0. KV rows of all drafts but the last of each query are written to the plane.
    """
    weights, rows, wanted = args.weights, args.rows, args.wanted
    normed, fed = forward(DraftPassArgs(args.feature_TD, weights, args.pages, rows, args.plane))
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
            normed, fed = forward(DraftPassArgs(fed[going], weights, args.pages, next_, args.plane))
    return drafted


def forward(args: DraftPassArgs) -> tuple[Tensor, Tensor]:
    """A pass that looks up its inputs by row -> (normed, fed) [R, D] of the queries, in their order."""
    return layer(args.weights, looked_up(args.pages, args.rows), args.feature_TD, args.plane)


def looked_up(pages: DraftPages, rows: DraftRows) -> Inputs:
    """The inputs of the rows: their tokens, rotations and places."""

    device = pages.tokens.device
    slot_T, position_T, query_R = (staged(each, device) for each in (rows.slots, rows.positions, rows.queries))
    place_T = position_T + 1
    return Inputs(
        ids_T=pages.tokens[slot_T, place_T] if rows.ids is None else staged(rows.ids, device),
        cos_T=pages.cos[position_T],
        sin_T=pages.sin[position_T],
        rows_T=pages.tables[slot_T, place_T // PAGE_TOKENS].long() * PAGE_TOKENS + place_T % PAGE_TOKENS,
        chunks=(),
        tokens_Q=query_R.int(),
        slots_Q=slot_T[query_R].int(),
        lengths_Q=(place_T[query_R] + 1).int(),
        tables=pages.tables,
    )


def layer(weights: DraftLayer, inputs: Inputs, feature_TD: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
    """-> (normed, fed) [R, D], of the rows of the chunks, then of the queries. `feature_TD` is not modified.

    inputs  rows_T, Chunk.start and lengths_Q are places. For a row in no chunk and no query, only its KV is written to
            its page
    plane   [pages, 64, kv width]: written at rows_T, then read; place 0 of a slot is never read
    """
    eps = weights.eps
    embedding = _norm(weights.embedding_VD[inputs.ids_T].to(feature_TD.dtype), weights.input_norm, eps)
    hidden = _norm(feature_TD, weights.hidden_norm, eps)
    q_THX = _project(side_by_side(embedding, hidden), weights.attention, inputs, plane)
    rows_R = _finished(inputs)
    residual = begun(weights, feature_TD, lambda _: hidden)[rows_R]
    if not residual.shape[0]:
        return residual, residual
    o_THV = _attend(q_THX, weights.attention, weights.softmax_scale, inputs, plane)
    added = linear(o_THV[rows_R].flatten(1), weights.o_proj, rounds(plane))
    residual, x = add_norm(residual, added, weights.mlp_norm, eps)
    added = moe(x, weights.gate_up, weights.down, None, rounds(plane))
    residual, normed = add_norm(residual, added, weights.norm, eps)
    return normed, fed_back(weights, normed, residual)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return add_norm(x.contiguous(), None, weight, eps)[1]


def _finished(inputs: Inputs) -> Tensor:
    """int64 [R]: indices of the finished rows: those of the chunks, then the queries."""
    device = inputs.tokens_Q.device
    chunks = [torch.arange(c.first, c.first + c.count, device=device) for c in inputs.chunks]
    return torch.cat([*chunks, inputs.tokens_Q.long()])


def _project(x_TF: Tensor, w: MlaWeights[Matrix] | GqaWeights[Matrix], inputs: Inputs, plane: Tensor) -> Tensor:
    """[T, 2 D] -> query heads [T, H, X], rotated. Writes the plane."""
    if isinstance(w, MlaWeights):
        return mla_qkv(x_TF, w, inputs.cos_T, inputs.sin_T, inputs.rows_T, plane)
    q, k, v = linear(x_TF, w.qkv).unflatten(-1, (-1, w.width)).split((w.heads, w.key_heads, w.key_heads), -2)
    q, row = heads_and_row(q, k, v, inputs.cos_T, inputs.sin_T)
    plane.view(-1, plane.shape[-1])[inputs.rows_T] = stored(row, plane.dtype)
    return q


def _attend(
    q_THX: Tensor, w: MlaWeights[Matrix] | GqaWeights[Matrix], scale: float, inputs: Inputs, plane: Tensor
) -> Tensor:
    """-> [T, H, value width]; only finished rows are filled."""
    if isinstance(w, MlaWeights):
        o = q_THX.new_empty(q_THX.shape[0], w.heads, w.value)
        attend(q_THX, w, scale, inputs, plane, o, SKIP)
        return o
    o = torch.empty_like(q_THX)
    for chunk in inputs.chunks:
        rows = slice(chunk.first, chunk.first + chunk.count)
        gqa_prefill(q_THX[rows], scale, chunk.start, inputs.tables[chunk.slot], plane, o[rows], SKIP)
    queries = inputs.tokens_Q, inputs.slots_Q, inputs.lengths_Q
    gqa_decode(q_THX, scale, *queries, inputs.tables, plane, o, SKIP)
    return o


# Shared by this module and by the trained module.


class Rules(Protocol):
    """Options in which drafters differ, apart from their sizes."""

    @property
    def norm_before_residual(self) -> bool:
        """Whether the residual starts from the normed feature."""
        ...

    @property
    def norm_output(self) -> bool:
        """Whether the normed output is fed back as the next feature."""
        ...


Norm = Callable[[Tensor], Tensor]


def normed_states(features: Tensor, norms: Sequence[Norm]) -> Tensor:
    """[..., S W], S concatenated states -> the same, each normed by its own weight."""
    states = features.unflatten(-1, (len(norms), -1)).unbind(-2)
    return torch.cat([norm(state) for norm, state in zip(norms, states, strict=True)], -1)


def side_by_side(embedding: Tensor, hidden: Tensor) -> Tensor:
    """[..., D] each, normed -> [..., 2 D] in this order: the input of the attention's projection."""
    return torch.cat([embedding, hidden], -1)


def begun(rules: Rules, feature: Tensor, norm: Norm) -> Tensor:
    """[..., D]: the initial residual of the layer."""
    return norm(feature) if rules.norm_before_residual else feature


def fed_back(rules: Rules, normed: Tensor, residual: Tensor) -> Tensor:
    """[..., D]: the feature of the next row if the target's states are not known."""
    return normed if rules.norm_output else residual
