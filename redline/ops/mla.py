"""Latent attention (MLA) in three ops.        T tokens, D hidden, H heads, N nope, P rope, R latent rank, V value.

`mla_qkv`      projections: the query heads, and each token's latent row, written into its page
`mla_prefill`  expanded form, for a chunk of a prompt: keys and values are computed from the cached latents
`mla_decode`   absorbed form, for generated tokens: multi-query attention over the latents themselves

A cache row is [latent after its norm (R) | rotated key (P)], shared by all heads. On a CPU each op's bits depend only
on a token's own position and context; the two forms of attention agree to rounding. With float32 pages a kernel's
products are exact; with bf16 and e4m3 pages a kernel may round the inputs of a product to bf16.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol

import torch
from torch import Tensor

from redline.messages.job import PAGE_TOKENS
from redline.ops.add_norm import rms_norm
from redline.ops.formats import E4M3_MOST, Plain, W, Weight
from redline.ops.linear import ROUNDED
from redline.ops.op import Case, Cost, Op

FP8 = torch.float8_e4m3fn
FP8_STEPS = 1e-2  # relative error between two computations of e4m3 rows: some numbers round to different neighbours


@dataclass(frozen=True)
class MlaWeights(Generic[W]):
    """One layer's latent attention without its output projection. Rq is the rank of the query projection."""

    w_a: W  # bf16 [Rq + R + P, D]: q_a and kv_a stacked
    q_norm: Tensor  # float32 [Rq]
    kv_norm: Tensor  # float32 [R]
    w_q: W  # bf16 [H (N + P), Rq]: q_b
    w_uk: W  # bf16 [H, R, N]: W_UK transposed, from latents to keys
    w_uv: W  # bf16 [H, V, R]: from latents to values
    eps: float  # for both low-rank norms

    # Cached, since every step reads them; these objects never change.

    @functools.cached_property
    def heads(self) -> int:
        """H: the number of query heads."""
        return self.w_uk.shape[0]

    @functools.cached_property
    def rank(self) -> int:
        """R: the width of a latent."""
        return self.w_uk.shape[1]

    @functools.cached_property
    def nope(self) -> int:
        """N: the width of the part of a head without rotary embedding."""
        return self.w_uk.shape[2]

    @functools.cached_property
    def value(self) -> int:
        """V: the width of a head's value."""
        return self.w_uv.shape[1]

    @functools.cached_property
    def rope(self) -> int:
        """P: the width of the part of a head with rotary embedding."""
        return self.w_q.shape[0] // self.heads - self.nope

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(H, N, P, R, V)"""
        return self.heads, self.nope, self.rope, self.rank, self.value

    @property
    def nbytes(self) -> int:
        """Bytes of the four weights; the norms are not counted."""
        return self.w_a.nbytes + self.w_q.nbytes + self.w_uk.nbytes + self.w_uv.nbytes


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs (2i, 2i + 1) of the last axis [..., P] by their angles, cos and sin [..., P / 2]."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def angles(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [..., P / 2], of integer positions; inv_freq [P / 2]: radians per position."""
    angle = positions.float()[..., None] * inv_freq
    return angle.cos(), angle.sin()


def rotate_heads(q: Tensor, nope: int, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., H, N + P]: query heads with all but their first `nope` numbers rotated by cos, sin [..., P / 2]."""
    rope = q[..., nope:]
    return torch.cat([q[..., :nope], rotate(rope.float(), cos[..., None, :], sin[..., None, :]).to(q.dtype)], -1)


def cache_row(latent: Tensor, key: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Projections [..., R] and [..., P] -> a token's row, [..., R + P]: [latent after its norm | rotated key]."""
    return torch.cat([rms_norm(latent, norm, eps), rotate(key.float(), cos, sin).to(key.dtype)], -1)


def rounds(plane: Tensor) -> bool:
    """Whether kernels over these pages may round the inputs of a product to bf16."""
    return plane.dtype != torch.float32


def stored(row: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as stored in pages of this dtype: rounded to nearest even; e4m3 saturates at 448."""
    return (row.clamp(-E4M3_MOST, E4M3_MOST) if dtype == FP8 else row).to(dtype)


# ---------------------------------------------------------------------------------------------------------- mla_qkv


class MlaQkvArgs(NamedTuple, Generic[W]):
    """Projects each token to its query heads, and writes its latent row into its page."""

    x_TD: Tensor  # [T, D], normed; float32 on a CPU
    w: MlaWeights[W]  # weights in the layout of their chip
    cos: Tensor  # float32 [T, P / 2]: cosine of the angles of each token's position
    sin: Tensor  # float32 [T, P / 2]: sine
    slots_T: Tensor  # int64 [T]: page * 64 + place: the destination of each token's row
    plane: Tensor  # [pages, 64, R + P], float32, bf16 or e4m3; written at slots_T


def _qkv_reference(args: MlaQkvArgs[Weight]) -> Tensor:
    """-> q [T, H, N + P] in x's dtype, the last P of each head rotated."""
    x_TD, w, plane = args.x_TD, args.w, args.plane
    a = x_TD @ w.w_a.dense().to(x_TD.dtype).T
    q_latent, latent, key = a.split([a.shape[-1] - w.rank - w.rope, w.rank, w.rope], -1)
    row = cache_row(latent, key, w.kv_norm, w.eps, args.cos, args.sin)
    plane.view(-1, plane.shape[-1])[args.slots_T] = stored(row, plane.dtype)
    q = (rms_norm(q_latent, w.q_norm, w.eps) @ w.w_q.dense().to(x_TD.dtype).T).unflatten(-1, (w.heads, -1))
    return rotate_heads(q, w.nope, args.cos, args.sin)


def _qkv_cost(args: MlaQkvArgs[Weight]) -> Cost:
    """x, queries, page rows and the two weights, each moved once."""
    x_TD, w = args.x_TD, args.w
    tokens, d = x_TD.shape
    n_a, n_q = w.w_a.shape[-2], w.w_q.shape[-2]
    moved = x_TD.nbytes + tokens * (args.plane.shape[-1] * args.plane.element_size() + n_q * x_TD.element_size())
    return Cost(moved + w.w_a.nbytes + w.w_q.nbytes, 2 * tokens * (d * n_a + w.q_norm.shape[0] * n_q))


# ------------------------------------------------------------------------------------------------------- mla_decode


def context_rows(plane: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` rows of a slot, float32 [length, R + P]."""
    pages = (length + PAGE_TOKENS - 1) // PAGE_TOKENS
    return plane[table[:pages].long()].flatten(0, 1)[:length].float()


class MlaDecodeArgs(NamedTuple, Generic[W]):
    """Attends from each query token to its slot's context, in the absorbed form; Q queries."""

    q_THX: Tensor  # [T, H, N + P], the last P of each head rotated; float32 on a CPU
    w: MlaWeights[W]  # weights in the layout of their chip; only w_uk and w_uv are read
    scale: float  # factor of the scores before the softmax
    tokens_Q: Tensor  # int32 [Q]: the query's row in q and out
    slots_Q: Tensor  # int32 [Q]: the query's row in tables
    lengths_Q: Tensor  # int32 [Q]: rows of its context, its own row last; all are already in their pages
    tables: Tensor  # int32 [slots, pages per slot]: the pages of each slot, in order
    plane: Tensor  # [pages, 64, R + P], float32, bf16 or e4m3; read
    out_THV: Tensor  # [T, H, V] in q's dtype; written at tokens_Q, and nowhere else
    skip: int = 0  # leading rows of every slot that are empty and not read: 0, or 1 for a drafter


def _decode_reference(args: MlaDecodeArgs[Weight]) -> None:
    """Query i attends to rows [skip, lengths_Q[i]) of slot slots_Q[i]. In float32, whatever the pages' dtype."""
    w = args.w
    w_uk, w_uv = w.w_uk.dense().float(), w.w_uv.dense().float()
    for token, slot, length in zip(args.tokens_Q.tolist(), args.slots_Q.tolist(), args.lengths_Q.tolist(), strict=True):
        rows_SW = context_rows(args.plane, args.tables[slot], length)[args.skip :]
        nope, rope = args.q_THX[token].float().split([w.nope, w.rope], -1)
        absorbed = torch.einsum("hn,hrn->hr", nope, w_uk)
        scores = (torch.cat([absorbed, rope], -1) @ rows_SW.T) * args.scale
        latent = scores.softmax(-1) @ rows_SW[:, : w.rank]
        args.out_THV[token] = torch.einsum("hr,hvr->hv", latent, w_uv).to(args.out_THV.dtype)


def _decode_cost(args: MlaDecodeArgs[Weight]) -> Cost:
    """Each slot's context once, however many of its tokens read it; the two weights once; queries and outputs."""
    w = args.w
    heads, nope, rope, rank, value = w.sizes
    longest: dict[int, int] = {}
    for slot, length in zip(args.slots_Q.tolist(), args.lengths_Q.tolist(), strict=True):
        longest[slot] = max(length, longest.get(slot, 0))
    rows = (sum(longest.values()) - args.skip * len(longest)) * args.plane.shape[-1] * args.plane.element_size()
    queries = args.tokens_Q.shape[0]
    moved = rows + w.w_uk.nbytes + w.w_uv.nbytes + queries * heads * (nope + rope + value) * args.q_THX.element_size()
    attention = 2 * heads * (2 * rank + rope) * (int(args.lengths_Q.sum()) - args.skip * queries)
    return Cost(moved, attention + 2 * queries * heads * rank * (nope + value))


# ------------------------------------------------------------------------------------------------------ mla_prefill


class MlaPrefillArgs(NamedTuple, Generic[W]):
    """Attends from a chunk of a prompt to all earlier positions and causally to itself, in the expanded form."""

    q_CHX: Tensor  # [C, H, N + P]: the chunk's C tokens, the last P of each head rotated; float32 on a CPU
    w: MlaWeights[W]  # weights in the layout of their chip; only w_uk and w_uv are read
    scale: float  # factor of the scores before the softmax
    start: int  # the position of the chunk's first token
    table: Tensor  # int32 [pages per slot]: the slot's pages, in order
    plane: Tensor  # [pages, 64, R + P], float32, bf16 or e4m3; read: rows [0, start + C) are in their pages
    out_CHV: Tensor  # [C, H, V] in q's dtype; all of it is written
    skip: int = 0  # leading rows of the slot that are empty and not read: 0 or 1, at most `start`


def _prefill_reference(args: MlaPrefillArgs[Weight]) -> None:
    """The token at position p attends to rows [skip, p]. In float32, whatever the pages' dtype."""
    q_CHX, w, start = args.q_CHX, args.w, args.start
    count = q_CHX.shape[0]
    rows_SW = context_rows(args.plane, args.table, start + count)[args.skip :]
    latent, rope = rows_SW.split([w.rank, w.rope], -1)
    keys = torch.cat([torch.einsum("sr,hrn->hsn", latent, w.w_uk.dense().float()), rope.expand(w.heads, -1, -1)], -1)
    values = torch.einsum("sr,hvr->hsv", latent, w.w_uv.dense().float())
    scores = torch.einsum("chx,hsx->hcs", q_CHX.float(), keys) * args.scale
    position = torch.arange(start, start + count, device=q_CHX.device)
    scores = scores.masked_fill(
        torch.arange(args.skip, start + count, device=q_CHX.device) > position[:, None], -torch.inf
    )
    args.out_CHV.copy_(torch.einsum("hcs,hsv->chv", scores.softmax(-1), values))


def _prefill_cost(args: MlaPrefillArgs[Weight]) -> Cost:
    """The context and both weights once; computing keys and values once; scores and values of every visible pair."""
    w = args.w
    heads, nope, rope, rank, value = w.sizes
    count = args.q_CHX.shape[0]
    context = args.start + count - args.skip
    pairs = count * (args.start - args.skip) + count * (count + 1) // 2
    moved = context * args.plane.shape[-1] * args.plane.element_size() + args.q_CHX.nbytes + args.out_CHV.nbytes
    unfold = 2 * context * heads * rank * (nope + value)
    return Cost(moved + w.w_uk.nbytes + w.w_uv.nbytes, unfold + 2 * pairs * heads * (nope + rope + value))


class Unfolding(Protocol):
    """The two weights that turn latents into keys and values."""

    @property
    def w_uk(self) -> Weight:
        """bf16 [H, R, N]: from latents to keys."""
        ...

    @property
    def w_uv(self) -> Weight:
        """bf16 [H, V, R]: from latents to values."""
        ...


def unfolded(rows_SW: Tensor, w: Unfolding) -> tuple[Tensor, Tensor]:
    """Cache rows [S, R + P] -> keys [S, H, N + P] and values [S, H, V], in the rows' dtype."""
    keys, ropes, values = unfolded_apart(rows_SW, w)
    return torch.cat([keys, ropes[:, None].expand(-1, keys.shape[1], -1)], -1), values


def unfolded_apart(rows_SW: Tensor, w: Unfolding) -> tuple[Tensor, Tensor, Tensor]:
    """As `unfolded`, with the parts of the keys apart: [S, H, N] of each head, and the view [S, P] that all share."""
    w_uk, w_uv = w.w_uk.dense().to(rows_SW.dtype), w.w_uv.dense().to(rows_SW.dtype)
    heads, rank, _ = w_uk.shape
    latent = rows_SW[:, :rank]
    keys = (latent @ w_uk.permute(1, 0, 2).flatten(1)).unflatten(1, (heads, -1))
    values = (latent @ w_uv.flatten(0, 1).T).unflatten(1, (heads, -1))
    return keys, rows_SW[:, rank:], values


# ------------------------------------------------------------------------------------------------------------ cases


def random_weights(
    g: torch.Generator, d: int, rq: int, heads: int, nope: int, rope: int, rank: int, value: int
) -> MlaWeights[Plain]:
    """Weights of these sizes: normal numbers over sqrt(inputs) in bf16; norms of 0.5 to 1.5; eps 1e-5."""

    def weight(*shape: int) -> Plain:
        return Plain((torch.randn(*shape, generator=g) * shape[-1] ** -0.5).to(torch.bfloat16))

    norms = torch.rand(rq, generator=g) + 0.5, torch.rand(rank, generator=g) + 0.5
    w_q, w_uk, w_uv = weight(heads * (nope + rope), rq), weight(heads, rank, nope), weight(heads, value, rank)
    return MlaWeights(weight(rq + rank + rope, d), *norms, w_q, w_uk, w_uv, 1e-5)


# D, Rq, H, N, P, R, V
NANO = (320, 128, 4, 128, 64, 512, 128)
TINY = (64, 32, 2, 32, 32, 64, 32)


def _qkv_cases() -> Iterator[Case]:
    def make(tokens: int, sizes: tuple[int, ...], dtype: torch.dtype):
        def inputs(g: torch.Generator) -> MlaQkvArgs[Weight]:
            w = random_weights(g, *sizes)
            angle = torch.rand(tokens, w.rope // 2, generator=g) * 6.28
            slots = torch.randperm(3 * PAGE_TOKENS, generator=g)[:tokens]
            plane = torch.full((3, PAGE_TOKENS, w.rank + w.rope), 7.0, dtype=dtype)
            return MlaQkvArgs(torch.randn(tokens, sizes[0], generator=g), w, angle.cos(), angle.sin(), slots, plane)

        return inputs

    yield Case("T=1 nano bf16 pages", make(1, NANO, torch.bfloat16), rtol=ROUNDED)
    yield Case("T=13 nano float32 pages", make(13, NANO, torch.float32))
    yield Case("T=100 tiny bf16 pages", make(100, TINY, torch.bfloat16), rtol=ROUNDED)
    yield Case("T=70 nano fp8 pages", make(70, NANO, FP8), rtol=FP8_STEPS)


def _pages(
    g: torch.Generator, w: MlaWeights[Weight], slots: int, tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Tables of distinct random pages, and a plane of random rows."""
    per_slot = (tokens + PAGE_TOKENS - 1) // PAGE_TOKENS
    tables = torch.randperm(slots * per_slot, generator=g).to(torch.int32).view(slots, per_slot)
    return tables, torch.randn(slots * per_slot, PAGE_TOKENS, w.rank + w.rope, generator=g).to(dtype)


def _decode_cases() -> Iterator[Case]:
    def make(lengths: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype, skip: int = 0):
        def inputs(
            g: torch.Generator,
        ) -> MlaDecodeArgs[Weight]:
            w = random_weights(g, *sizes)
            tables, plane = _pages(g, w, len(lengths), max(lengths), dtype)
            plane[tables[:, 0].long(), :skip] = torch.nan
            q = torch.randn(len(lengths) + 1, w.heads, w.nope + w.rope, generator=g)
            tokens = torch.arange(1, len(lengths) + 1, dtype=torch.int32)  # token 0 is a prompt's
            slots = torch.arange(len(lengths), dtype=torch.int32)
            out = torch.zeros(len(lengths) + 1, w.heads, w.value)
            return MlaDecodeArgs(
                q, w, 0.1, tokens, slots, torch.tensor(lengths, dtype=torch.int32), tables, plane, out, skip
            )

        return inputs

    bf16 = 1e-2  # queries, probabilities and latents are rounded, one after another
    yield Case("1 token of context, nano", make((1,), NANO, torch.bfloat16), rtol=bf16)
    # The mean of 200 latents is small compared with each: in 300 draws the largest error was 0.0093, of all 0.0043.
    yield Case("200, nano", make((200,), NANO, torch.bfloat16), rtol=2 * bf16)
    yield Case("64, 65, 1000, 257, nano float32 pages", make((64, 65, 1000, 257), NANO, torch.float32))
    yield Case("17 rows, tiny", make(tuple(range(1, 800, 47)), TINY, torch.bfloat16), rtol=bf16)
    yield Case("1, 64, 65, 1000, 257, nano fp8 pages", make((1, 64, 65, 1000, 257), NANO, FP8), rtol=bf16)
    yield Case("17 rows, tiny fp8 pages", make(tuple(range(1, 800, 47)), TINY, FP8), rtol=bf16)
    skipping = (2, 3, 64, 65, 257, 700)
    yield Case("the first row not read, nano", make(skipping, NANO, torch.bfloat16, skip=1), rtol=bf16)
    yield Case("the first row not read, tiny float32 pages", make(skipping, TINY, torch.float32, skip=1))
    yield Case("the first row not read, nano fp8 pages", make(skipping, NANO, FP8, skip=1), rtol=bf16)
    kimi = (7168, 1536, 64, 128, 64, 512, 128)
    yield Case("8k, Kimi's heads", make((8192,), kimi, torch.bfloat16), small=False, rtol=bf16)


def _prefill_cases() -> Iterator[Case]:
    def make(start: int, count: int, sizes: tuple[int, ...], dtype: torch.dtype, skip: int = 0):
        def inputs(g: torch.Generator) -> MlaPrefillArgs[Weight]:
            w = random_weights(g, *sizes)
            tables, plane = _pages(g, w, 1, start + count, dtype)
            plane[tables[0, 0], :skip] = torch.nan
            q = torch.randn(count, w.heads, w.nope + w.rope, generator=g)
            return MlaPrefillArgs(q, w, 0.1, start, tables[0], plane, torch.zeros(count, w.heads, w.value), skip)

        return inputs

    bf16 = 1e-2  # queries, keys, probabilities and values are rounded
    yield Case("1 row, nano", make(0, 1, NANO, torch.bfloat16), rtol=bf16)
    yield Case("[0, 63) nano", make(0, 63, NANO, torch.bfloat16), rtol=bf16)
    yield Case("[64, 165) nano float32 pages", make(64, 101, NANO, torch.float32))
    yield Case("[301, 302) tiny", make(301, 1, TINY, torch.bfloat16), rtol=bf16)
    yield Case("[0, 512) nano", make(0, 512, NANO, torch.bfloat16), rtol=bf16)
    yield Case("[64, 165) nano fp8 pages", make(64, 101, NANO, FP8), rtol=bf16)
    yield Case("[70, 90) the first row not read, tiny fp8 pages", make(70, 20, TINY, FP8, skip=1), rtol=bf16)
    yield Case("[1, 2) the first row not read, nano", make(1, 1, NANO, torch.bfloat16, skip=1), rtol=bf16)
    yield Case("[1, 130) the first row not read, nano", make(1, 129, NANO, torch.bfloat16, skip=1), rtol=bf16)
    yield Case("[70, 90) the first row not read, tiny float32 pages", make(70, 20, TINY, torch.float32, skip=1))


mla_qkv = Op("mla_qkv", MlaQkvArgs[Weight], _qkv_reference, _qkv_cost, _qkv_cases, writes=("plane",))
mla_decode = Op(
    "mla_decode", MlaDecodeArgs[Weight], _decode_reference, _decode_cost, _decode_cases, writes=("out_THV",)
)
mla_prefill = Op(
    "mla_prefill", MlaPrefillArgs[Weight], _prefill_reference, _prefill_cost, _prefill_cases, writes=("out_CHV",)
)
