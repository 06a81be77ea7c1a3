"""One block on a GPU: the block's arithmetic as kernel launches.        T tokens, D hidden.

`decode_block`: up to 256 decode tokens, or 64 with tensor parallelism. Nine launches up to 8 tokens, each streaming its
weights once. Norms are folded into the matmuls, and a launch begins to fetch its weights before the preceding one has
ended. From 9 tokens on there are twelve launches: the experts' second half writes one row per (expert, token) pair, and
the rows are then summed; over several ranks there are ten up to 32 tokens. A dense layer is eight launches at any size.
Context parallelism (ranks that divide long contexts) adds two launches.
`prefill_block`: prompts, and larger batches. Matmuls run in Triton up to 512 tokens and in cuBLAS beyond. Attention is
expanded for chunks of prompts, and absorbed for decode tokens in the same step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.kernels.cuda.collectives.all_gather import all_gather_queries
from redline.kernels.cuda.collectives.rank_links import ATTENTION, EXPERTS, RankLinks
from redline.kernels.cuda.collectives.share_latents import divides, share_latents
from redline.kernels.cuda.decode.absorb import absorb
from redline.kernels.cuda.decode.attend import attend
from redline.kernels.cuda.decode.choose_experts import (
    MOST_EXPERTS,
    MOST_PAIRS,
    RouterChoice,
    choose_experts,
)
from redline.kernels.cuda.decode.experts_down import experts_down
from redline.kernels.cuda.decode.experts_up import experts_up
from redline.kernels.cuda.decode.gates import gates
from redline.kernels.cuda.decode.pairs_down import pairs_down, reads
from redline.kernels.cuda.decode.project_a import project_a
from redline.kernels.cuda.decode.project_out import project_out
from redline.kernels.cuda.decode.project_q import project_q
from redline.kernels.cuda.decode.unabsorb import unabsorb
from redline.kernels.cuda.layouts.records import Records, Slabs
from redline.kernels.cuda.layouts.tiled import TILE_N, Tiled, padded
from redline.kernels.cuda.linear import products
from redline.kernels.cuda.prefill.chunk_attention import attend_chunks
from redline.kernels.cuda.prefill.grouped import grouped_experts
from redline.kernels.cuda.prefill.rowwise import rotate_heads, split_a, swiglu
from redline.kernels.cuda.prefill.stream import CommunicatedRows, PromptStream
from redline.kernels.inputs import Inputs
from redline.messages.job import PAGE_TOKENS
from redline.ops.route_experts import choose

MOST_DECODED = 256  # maximum tokens of a decode step of one rank
SUMMED = 32  # maximum tokens for which the experts' second half may sum the pairs of a token in shared memory
FEW = 8  # maximum tokens for which it does so on one rank: docs/log.md, 2026-11-28
LISTED = 256  # maximum tokens for which experts stream their weights once per eight pairs; more run as grouped GEMM


@dataclass(frozen=True)
class GpuMoe:
    """The routed experts of a layer, in the layouts of `experts_up`, `experts_down` and `grouped_experts`."""

    bias_E: Tensor  # float32: added for the choice, not to the weights
    up: Records  # [E, 2 I, D], gate first
    down: Records  # [E, D, I]
    chosen: int  # number of experts per token
    normalise: bool  # whether a token's weights are divided by their sum
    scale: float  # factor of the weights after normalisation
    notes: Tensor  # as in `RouterChoice`

    def choice(self, forced_TK: Tensor | None) -> RouterChoice:
        """How `gates` chooses this layer's experts. forced_TK int32 [T, K]: experts to use instead."""
        return RouterChoice(self.bias_E, self.chosen, self.normalise, self.scale, self.notes, forced_TK)

    def lists(self, tokens: int) -> bool:
        """Whether the pairs of `tokens` tokens are listed for `experts_up` and `pairs_down`."""
        few = tokens <= LISTED and tokens * self.chosen <= MOST_PAIRS and self.up.experts <= MOST_EXPERTS
        return few and self.chosen <= min(32, self.up.experts) and reads(self.down.form)


@dataclass(frozen=True)
class GpuMla:
    """One layer's latent attention without its output projection: `mla.MlaWeights` in tiles."""

    w_a: Tiled  # [Rq + R + P, D]
    q_norm: Tensor  # float32 [Rq]
    kv_norm: Tensor  # float32 [R]
    w_q: Tiled  # [H (N + P), Rq]
    w_uk: Tiled  # [H, R, N]
    w_uv: Tiled  # [H, V, R]
    eps: float  # of both low-rank norms

    @property
    def heads(self) -> int:
        """H: the number of query heads."""
        return self.w_uk.shape[0]

    @property
    def rank(self) -> int:
        """R: the width of a latent."""
        return self.w_uk.shape[1]

    @property
    def width(self) -> int:
        """N + P: the width of a query head."""
        return self.w_q.shape[0] // self.heads


@dataclass(frozen=True)
class GpuBlock:
    """One layer's weights in the layouts of the GPU kernels, and its scalar parameters."""

    attention_norm: Tensor  # float32 [D]
    attention: GpuMla
    o_proj: Tiled  # [D, H V]
    mlp_norm: Tensor  # float32 [D]
    gates: Tiled  # `gates.gates_weight`: the router, then gate and up of the shared expert or of the dense MLP
    width: int  # of the hidden row of the shared expert or of the dense MLP
    down: Tiled | Slabs  # of the dense MLP, or of the shared expert in the layout of `experts_down`
    experts: GpuMoe | None  # None: a dense layer
    eps: float  # of both norms
    softmax_scale: float  # factor of the attention scores


@dataclass(frozen=True)
class ResidualStream:
    """The state between blocks. x is the residual times the next norm's weights, not yet divided by its rms."""

    residual_TD: Tensor  # float32 [T, D]
    x_TK: Tensor  # bf16 [T, D padded to 128 with zeros]
    squares: Tensor  # float32 [parts, T padded to 8]: sums of squares of the residual's rows


def decode_block(
    stream: ResidualStream,
    w: GpuBlock,
    inputs: Inputs,
    plane: Tensor,
    next_norm: Tensor,
    forced_TK: Tensor | None,
    links: RankLinks | None = None,
) -> ResidualStream:
    """One block of a decode-only step: all tokens are queries, in order; at most MOST_DECODED of them.

    plane [pages, 64, R + P]: read, and written at rows_T. next_norm float32 [D]: the norm weight of the next block, or
    the model's last norm. forced_TK int32 [T, K]: experts to use instead of choosing. links: to the other tensor
    parallel ranks; None: one rank.
    """
    attention = w.attention
    q_a, q_squares, kv = project_a(stream.x_TK, stream.squares, attention.w_a, attention.q_norm, w.eps, links)
    q = project_q(
        *(q_a, q_squares, attention.w_q, attention.heads, kv, attention.kv_norm),
        *(inputs.cos_T, inputs.sin_T, inputs.rows_T, plane, attention.eps),
    )
    o = _absorbed(q, inputs.tokens_Q, w, inputs, plane, links)
    residual, x, squares = project_out(o, w.o_proj, stream.residual_TD, w.mlp_norm, None, links, ATTENTION)
    experts = w.experts
    count = 0 if experts is None else experts.bias_E.shape[0]
    choice = None if experts is None else experts.choice(forced_TK)
    _, h, rstd, pairs = gates(x, squares, w.gates, count, w.width, w.eps, choice)
    if experts is None:
        assert isinstance(w.down, Tiled)
        return ResidualStream(*project_out(h, w.down, residual, next_norm, None, links, EXPERTS))
    assert isinstance(w.down, Slabs)
    assert pairs is not None
    if x.shape[0] <= (FEW if links is None and experts.lists(x.shape[0]) else SUMMED):
        routed = experts_up(x, rstd, experts.up, pairs)
        return ResidualStream(*experts_down(routed, pairs, experts.down, h, w.down, residual, next_norm, links))
    if experts.lists(x.shape[0]):
        routed = pairs_down(experts_up(x, rstd, experts.up, pairs), pairs, experts.down)
    else:
        routed = grouped_experts(x, pairs.ids, pairs.weights, experts.up, experts.down, rstd)
    return ResidualStream(*project_out(h, w.down, residual, next_norm, routed, links, EXPERTS))


def prefill_block(
    stream: PromptStream, w: GpuBlock, inputs: Inputs, plane: Tensor, forced_TK: Tensor | None
) -> PromptStream:
    """One block of any step; the stream's group are the tensor parallel ranks that share the block.

    stream: its residual is changed in place, and it must not be used afterwards. plane [pages, 64, R + P]: read, and
    written at rows_T. forced_TK int32 [T, K]: experts to use instead of choosing.
    """
    return _mlp(_attention(stream, w, inputs, plane), w, forced_TK)


def _attention(stream: PromptStream, w: GpuBlock, inputs: Inputs, plane: Tensor) -> PromptStream:
    """The attention of `prefill_block`; on return its all-reduce is in flight."""
    attention, tokens = w.attention, stream.tokens
    heads, value = attention.heads, attention.w_uv.shape[1]
    into_a, into_q = products(attention.w_a, torch.float32), products(attention.w_q, torch.bfloat16)
    a, arriving = stream.gather(into_a(x) for x in stream.normed(w.attention_norm, w.eps))
    q = torch.empty(tokens, heads * attention.width, dtype=torch.bfloat16, device=a.device)
    for rows in arriving:
        placed = inputs.cos_T[rows], inputs.sin_T[rows], inputs.rows_T[rows]
        into_q(split_a(a[rows], attention.q_norm, attention.kv_norm, *placed, plane, attention.eps), q[rows])
    q = rotate_heads(q.view(tokens, heads, attention.width), inputs.cos_T, inputs.sin_T)
    o = torch.empty(tokens, heads, value, dtype=torch.bfloat16, device=q.device)
    if inputs.chunks:
        chunks = inputs.chunks, inputs.rows_T, inputs.tables
        attend_chunks(q, attention, w.softmax_scale, *chunks, plane, o)
    if inputs.tokens_Q.shape[0]:
        decoding = inputs.tokens_Q.long()
        places = torch.arange(decoding.shape[0], dtype=torch.int32, device=q.device)
        o[decoding] = _absorbed(q[decoding], places, w, inputs, plane)[:, : heads * value].unflatten(1, (heads, value))
    out = products(w.o_proj, torch.bfloat16)
    return stream.adding(lambda part: out(part.of(o.flatten(1))))


def _mlp(stream: PromptStream, w: GpuBlock, forced_TK: Tensor | None) -> PromptStream:
    """The MLP of `prefill_block`; on return its all-reduce is in flight, as attention's is at the beginning."""
    e = w.experts
    count = 0 if e is None else e.bias_E.shape[0]
    gated = products(w.gates, torch.float32)
    x, arriving = stream.gather(stream.normed(w.mlp_norm, w.eps))
    logits: list[Tensor] = []
    hidden: list[Tensor] = []
    for rows in arriving:
        both = gated(x[rows])
        logits.append(both[:, :count])
        hidden.append(swiglu(both, padded(count, TILE_N), w.width))
    h = _joined(hidden)
    if e is None:
        assert isinstance(w.down, Tiled)
        down = products(w.down, torch.bfloat16)
        return stream.adding(lambda part: down(part.of(h)))
    assert isinstance(w.down, Slabs)
    from redline.kernels.cuda.triton.linear import laid_out  # Triton is imported only on use

    logits_TE = _joined(logits).contiguous()
    choosing = logits_TE, e.bias_E, e.chosen, e.normalise, e.scale, forced_TK
    if stream.tokens <= SUMMED:
        (part,) = stream.parts
        pairs = choose_experts(*choosing)
        routed = experts_up(x, torch.ones(stream.tokens, device=x.device), e.up, pairs)
        alone = stream.group.ranks == 1
        before = part.residual if alone else torch.zeros_like(part.residual)
        after = experts_down(routed, pairs, e.down, h, w.down, before, w.mlp_norm)[0]
        if not alone:
            return stream.adding(lambda _: after)
        part.residual.copy_(after)
        return stream.settled()
    if e.lists(stream.tokens):
        pairs = choose_experts(*choosing)
        routed = pairs_down(experts_up(x, torch.ones(stream.tokens, device=x.device), e.up, pairs), pairs, e.down)
    else:
        ids, weights = choose(*choosing, ties=False)
        routed = grouped_experts(x, ids, weights, e.up, e.down)
    shared = laid_out(w.down).T

    def partial(part: CommunicatedRows) -> Tensor:
        own = part.of(h)[:, : w.width] @ shared
        if not stream.divided:
            return own + routed[part.rows]  # float32
        own[: part.count] += routed[part.rows]  # bf16, as for attention: halves the bytes to send
        return own

    return stream.adding(partial)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _absorbed(
    q_THX: Tensor, tokens_Q: Tensor, w: GpuBlock, inputs: Inputs, plane: Tensor, links: RankLinks | None = None
) -> Tensor:
    """Attention of queries over latents. tokens_Q int32 [Q]: their rows of q. -> o bf16 [Q, H V padded to 128].

    links: to the ranks that may divide every context among themselves.
    """
    longest = inputs.longest or inputs.tables.shape[1] * PAGE_TOKENS
    q = absorb(q_THX, w.attention.w_uk)
    given = tokens_Q, inputs.slots_Q, inputs.lengths_Q, inputs.tables, plane, w.softmax_scale, longest
    positions = inputs.positions
    if links is None or not divides(links, q.shape[0], q.shape[1], w.attention.rank, longest, positions):
        return unabsorb(*attend(q, *given, positions=positions), w.attention.w_uv)
    parts = attend(all_gather_queries(q, links), *given, rank=links.rank, ranks=links.ranks, positions=positions)
    return unabsorb(*share_latents(*parts, links), w.attention.w_uv)
