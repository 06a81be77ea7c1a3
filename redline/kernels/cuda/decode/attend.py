"""Attention of absorbed queries over cached latents.        T tokens, Q queries, H heads, R rank, P rope, S splits.

A page has 64 rows [latent R | rotated key P]: all heads score the same rows, and the latents are also the values. A
block computes 16, 32 or 64 heads of a query over a range of its pages, one split; `unabsorb` combines the splits. With
small blocks a page is read more often, but latency is lower if the GPU has free SMs.

With tensor parallelism a rank has few heads, and a row that verifies drafts has several queries of one context. Then a
block may compute heads of consecutive queries together: (query, head) pairs are consecutive rows of q, so this looks
like one query with several times the heads, in which every head sees as many tokens as its own query. The context is
read once, and is split by the length of the longest query. So a query's bits depend on the number of tokens that its
row verifies, but not on which tokens these are.

Blocks of 16 or 32 heads use warp-level matmuls (attend.cu), blocks of 64 heads use warpgroup matmuls
(attend_warpgroups.cu), which read a page from shared memory a quarter as often.

The heads per block and the splits per query depend only on the shape of a step, as CUDA graphs require. A query's pages
are divided evenly over the splits by its own length, so a grid made for 32k tokens keeps its blocks busy at 2k. Partial
latents are bf16, like the matmul that reads them, so a single split loses nothing: at 32k tokens and 64 heads 128
splits write 8.4 MB (float32: 16.8), compared with 37.7 MB of pages.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.chips import chip
from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.ops.op import Case, Cost, Op

SMS = 132  # multiprocessors of NVIDIA H100 and H200
MAX_WAVES = 4  # maximum waves of blocks, if pages are split: 35 MB of partial latents at R = 512
LATENT, ROPE = 512, 64  # R of the models used for the measurements below, and P of every model here
WARPGROUP_ROWS = {64}  # block sizes, in heads, that use attend_warpgroups.cu, which supports 16 and 32 too
_VALUE_BYTES = {torch.bfloat16: 2, torch.float8_e4m3fn: 1}

_Launch = launch_record("blocks/attention.cuh", "AttendLaunch")


class AttentionPlan(NamedTuple):
    """How the queries of a step are divided over blocks."""

    rows: int  # of a block: heads of one query, or of several
    splits: int  # number per query
    together: int = 1  # number of queries that blocks process as if they were one query


@functools.cache
def plan(queries: int, heads: int, max_length: int, positions: int = 1) -> AttentionPlan:
    """The fastest plan according to a cost model fitted to an NVIDIA H200; it includes the combining in `unabsorb`.

    max_length: tokens, an upper bound of every query's context. positions: consecutive queries that belong to one slot.
    """
    pages = max(1, -(-max_length // PAGE_TOKENS))
    apart = min(_ways(queries, heads, pages), key=lambda way: modelled(way, queries, heads, pages))
    shared = [*_ways_together(queries, heads, pages, positions)]
    if not shared:
        return apart
    together = min(shared, key=lambda way: modelled(way, queries, heads, pages))
    saved = _alone(apart, queries, heads, pages) - _alone(together, queries, heads, pages)
    return together if saved > _TOGETHER_SAVES else apart


def _alone(way: AttentionPlan, queries: int, heads: int, pages: int) -> float:
    """Microseconds of a plan for few heads: each head is combined by its own block, at the read rate of one block."""
    return microseconds(way, queries, heads, pages) + queries * way.splits * _LATENT_BYTES / _BLOCK_SPEED


def predicted(queries: int, heads: int, max_length: int, positions: int = 1) -> float:
    """Microseconds of the fastest plan according to the model, combining included."""
    pages = max(1, -(-max_length // PAGE_TOKENS))
    return modelled(plan(queries, heads, max_length, positions), queries, heads, pages)


def modelled(way: AttentionPlan, queries: int, heads: int, pages: int) -> float:
    """Microseconds of a plan according to the model, including the combining in `unabsorb`."""
    return microseconds(way, queries, heads, pages) + _combining(queries * heads * way.splits)


def _ways(queries: int, heads: int, pages: int) -> Iterator[AttentionPlan]:
    """All block sizes that are at least half full, with all numbers of splits without an empty split."""
    for rows in _TIMES:
        if rows < heads + 16:  # blocks are at least half full
            for splits in splits_of(queries * -(-heads // rows), pages):
                yield AttentionPlan(rows, splits)


def _ways_together(queries: int, heads: int, pages: int, positions: int) -> Iterator[AttentionPlan]:
    """All block sizes for which a slot's queries need fewer blocks together than separately. The last block may be less
    than half full, since a block of 64 rows processes a page faster than one of 32."""
    for rows in _TIMES:
        blocks = -(-positions * heads // rows)
        if blocks < positions * -(-heads // rows):
            for splits in splits_of(queries // positions * blocks, pages):
                yield AttentionPlan(rows, splits, positions)


def splits_of(blocks: int, pages: int) -> Iterator[int]:
    """All numbers of splits without an empty split, if each split consists of `blocks` blocks."""
    most = min(pages, SMS, max(1, MAX_WAVES * SMS // max(1, blocks)))
    for share in sorted({-(-pages // splits) for splits in range(1, most + 1)}):
        yield -(-pages // share)


def microseconds(way: AttentionPlan, queries: int, heads: int, pages: int) -> float:
    """Modelled time of `attend`: in each wave a block starts, and multiplies a page while the next one is loaded."""
    queries, heads = queries // way.together, heads * way.together
    parts, share = -(-heads // way.rows), -(-pages // way.splits)
    blocks = queries * parts * -(-pages // share)
    waves = -(-blocks // SMS)
    if share == 1 and waves > 1:  # one-page blocks end one by one; two of the smallest fit on an SM
        waves = blocks / SMS if way.rows == min(_TIMES) else waves - _ONE_BY_ONE
    busy = min(blocks, SMS)
    memory_speed = _MEMORY_SPEED * (0.35 + 0.65 * busy / SMS)
    load = _PAGE_BYTES * max(1 / _SM_SPEED, busy / _L2_SPEED, busy / parts / memory_speed)
    begin, page = _TIMES[way.rows]
    return _LAUNCH + max(1, waves) * (begin + share * max(page, load))


def _combining(latents: int) -> float:
    """Microseconds in which `unabsorb` reads and combines `latents` partial latents."""
    size = latents * _LATENT_BYTES
    return size / _PARTIAL_SPEED + max(0, size - _PARTIAL_ROOM) / _SPILLED_SPEED


# An NVIDIA H200: microseconds, and bytes. 16 and 32 rows are measured; 64 is from cycle counts of its matmuls.
_TIMES = {64: (4.0, 1.6), 32: (3.6, 3.5), 16: (3.0, 2.2)}  # rows of a block -> time to start, time per page
_LAUNCH = 0.4
_ONE_BY_ONE = 0.45  # share of a wave
_PAGE_BYTES, _LATENT_BYTES = 73728, 1024
_SM_SPEED, _L2_SPEED, _MEMORY_SPEED = 118e3, 5.5e6, 4.4e6  # bytes per microsecond: one block, and all together
# An NVIDIA H100 (`attend-rows-h100.json`): combining rate of a block, and the modelled saving in microseconds above
# which computing a row's queries together is never slower; its memory is slower than the H200's in the model.
_BLOCK_SPEED, _TOGETHER_SAVES = 33e3, 4.0
_PARTIAL_SPEED, _PARTIAL_ROOM, _SPILLED_SPEED = 2.7e6, 16e6, 1.6e6  # partial latents, in and beyond the L2 cache


class AttendArgs(NamedTuple):
    """Attends with each absorbed query to its slot's latents, split over the SMs; Q queries, S splits."""

    q_THW: Tensor  # bf16 [T, H, R + P], as `absorb` returns it
    tokens_Q: Tensor  # int32 [Q]: the query's row of q
    slots_Q: Tensor  # int32 [Q]: its row of tables; queries of one slot are consecutive, each one token longer
    lengths_Q: Tensor  # int32 [Q]: rows of its context, of which its own row is the last
    tables: Tensor  # int32 [slots, pages per slot]: the pages of each slot, in order
    plane: Tensor  # bf16 or float8_e4m3fn [pages, 64, R + P], P = 64; each page is contiguous, pages may be strided
    scale: float  # factor of the scores before the softmax
    max_length: int  # an upper bound of lengths_Q, from which S is derived, independent of the actual lengths
    skip: int = 0  # leading rows of every slot that are unused and not read, as in `mla_decode`
    rank: int = 0  # with context parallelism: this rank's index ...
    ranks: int = 1  # ... and the number of ranks that each read an equal part of every context, in pages
    positions: int = 1  # of a row of the step: this number of consecutive queries belong to one slot


def _reference(args: AttendArgs) -> tuple[Tensor, Tensor]:
    """-> (latents bf16 [Q, H, S, R], natural log-sum-exps float32 [Q, H, S]), one for each split of each query.

    An empty split has -inf; its latents are zeros here and are not written by the kernel.
    """
    q_THW = args.q_THW
    queries, heads = args.tokens_Q.shape[0], q_THW.shape[1]
    way, rank = _plan(args), args.plane.shape[-1] - ROPE
    splits = way.splits
    longest = args.lengths_Q.view(-1, way.together).amax(1).repeat_interleave(way.together)
    out = q_THW.new_zeros(queries, heads, splits, rank)
    lse = torch.full((queries, heads, splits), -torch.inf, device=q_THW.device)
    for i, (token, slot, length, most) in enumerate(
        zip(args.tokens_Q.tolist(), args.slots_Q.tolist(), args.lengths_Q.tolist(), longest.tolist(), strict=True)
    ):
        pages = -(-most // PAGE_TOKENS) if most > args.skip else 0
        share = max(1, -(-pages // (splits * args.ranks)))
        starts = [min((args.rank * splits + split) * share, pages) for split in range(splits)]
        for split, first in enumerate(starts):
            if first == pages:
                break
            numbers = args.tables[slot, first : min(first + share, pages)].long()
            rows_SW = args.plane[numbers].flatten(0, 1).float()
            rows_SW = rows_SW[max(args.skip - first * PAGE_TOKENS, 0) : max(length - first * PAGE_TOKENS, 0)]
            if not len(rows_SW):  # the split is empty
                continue
            scores_HS = q_THW[token].float() @ rows_SW.T * args.scale
            out[i, :, split] = (scores_HS.softmax(-1) @ rows_SW[:, :rank]).to(out.dtype)
            lse[i, :, split] = scores_HS.logsumexp(-1)
    return out, lse


def _plan(args: AttendArgs) -> AttentionPlan:
    queries, heads = args.tokens_Q.shape[0], args.q_THW.shape[1]
    assert queries % args.positions == 0, f"{queries} queries are no whole rows of {args.positions} positions"
    return plan(queries, heads, part_length(args.max_length, args.ranks), args.positions)


def part_length(length: int, ranks: int) -> int:
    """Maximum number of tokens that one of `ranks` ranks reads of a context of `length` tokens: whole pages."""
    return -(-length // (PAGE_TOKENS * ranks)) * PAGE_TOKENS


def has_warpgroups(rows: int, rank: int) -> bool:
    """Whether blocks of this many heads use attend_warpgroups.cu rather than attend.cu."""
    return chip().warpgroup_mma and rows in WARPGROUP_ROWS and (rank <= 256 or rank % 128 == 0)


@functools.cache
def _kernel(rows: int, together: int, rank: int, value_bytes: int, buffers: int, warpgroups: bool) -> CudaKernel:
    """buffers: 1 if no split has two pages, which leaves space on the SM for other kernels' blocks; else 2."""
    row_bytes, page_values = 2 * (rank + ROPE), PAGE_TOKENS * (rank + ROPE)
    sizes = {"ROWS": rows, "TOGETHER": together, "R": rank, "P": ROPE}
    defines = {**sizes, "VALUE_BYTES": value_bytes, "BUFFERS": buffers}
    lengths = 4 * rows if together > 1 else 0
    if warpgroups:
        shared = rows * row_bytes + page_values * 2 * buffers + rows * (2 * PAGE_TOKENS + 16 + 16 + 4 + 4) + lengths
        return CudaKernel("decode/attend_warpgroups.cu", "attend", _Launch, defines, shared)
    pages = page_values * 2 * buffers if value_bytes == 2 else page_values * (2 + buffers)
    shared = rows * row_bytes + pages + rows * (2 * PAGE_TOKENS + 16 + 8 + 16) + lengths
    return CudaKernel("decode/attend.cu", "attend", _Launch, defines, shared)


def _cuda(args: AttendArgs) -> tuple[Tensor, Tensor]:
    return attend_as(args, _plan(args))


def attend_as(args: AttendArgs, way: AttentionPlan) -> tuple[Tensor, Tensor]:
    """As `attend` on a GPU, with the given division over blocks: for measurements."""
    q_THW, plane = args.q_THW, args.plane
    queries, heads = args.tokens_Q.shape[0], q_THW.shape[1]
    rank, longest = plane.shape[-1] - ROPE, part_length(args.max_length, args.ranks)
    rows, splits, together = way
    out = torch.empty(queries, heads, splits, rank, dtype=torch.bfloat16, device=q_THW.device)
    lse = torch.empty(queries, heads, splits, device=q_THW.device)
    arguments = _Launch(
        q=q_THW,
        tokens=args.tokens_Q,
        slots=args.slots_Q,
        lengths=args.lengths_Q,
        tables=args.tables,
        plane=plane[0],  # page p is p strides further
        out=out,
        lse=lse,
        heads=heads,
        table_width=args.tables.shape[1],
        splits=splits,
        skip=args.skip,
        first_split=args.rank * splits,
        all_splits=args.ranks * splits,
        page_stride=plane.stride(0) * plane.element_size(),
        scale=args.scale * math.log2(math.e),
    )
    buffers = 1 if splits * PAGE_TOKENS >= longest else 2
    kernel = _kernel(rows, together, rank, _VALUE_BYTES[plane.dtype], buffers, has_warpgroups(rows, rank))
    kernel.launch(arguments, splits if queries else 0, queries // together * -(-together * heads // rows))
    return out, lse


def _cuda_fits(args: AttendArgs) -> bool:
    """Whether q is bf16, pages are bf16 or e4m3, and R is a multiple of 64 up to 512: rows are whole 128 bytes."""
    rank = args.plane.shape[-1] - ROPE
    return (
        args.q_THW.dtype == torch.bfloat16 and args.plane.dtype in _VALUE_BYTES and rank % 64 == 0 and 64 <= rank <= 512
    )


def _cost(args: AttendArgs) -> Cost:
    """Each slot's context once, independent of its number of queries; one latent per head and query."""
    heads, width = args.q_THW.shape[1], args.plane.shape[-1]
    rank = width - ROPE
    longest: dict[int, int] = {}
    for slot, length in zip(args.slots_Q.tolist(), args.lengths_Q.tolist(), strict=True):
        longest[slot] = max(length, longest.get(slot, 0))
    moved = (sum(longest.values()) - args.skip * len(longest)) * width * args.plane.element_size()
    queries = args.tokens_Q.shape[0]
    seen = int(args.lengths_Q.sum()) - args.skip * queries
    parts = moved // args.ranks + queries * heads * (width + rank) * 2
    return Cost(parts, 2 * heads * (width + rank) * seen // args.ranks)


def random_context(
    g: torch.Generator,
    lengths: tuple[int, ...],
    heads: int,
    rank: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    verify: int = 1,
    skip: int = 0,
) -> AttendArgs:
    """A slot for each length; its last `verify` tokens are queries. Rows that no query reads are NaN."""
    slots = len(lengths)
    per_slot = -(-max(lengths) // PAGE_TOKENS)
    tables = torch.randperm(slots * per_slot, generator=g).to(torch.int32).view(slots, per_slot)
    plane = torch.randn(slots * per_slot, PAGE_TOKENS, rank + ROPE, generator=g)
    for slot, length in enumerate(lengths):
        rows = plane[tables[slot].long()].flatten(0, 1)
        rows[:skip], rows[length:] = torch.nan, torch.nan
        plane[tables[slot].long()] = rows.unflatten(0, (per_slot, PAGE_TOKENS))
    seen = [length - verify + 1 + i for length in lengths for i in range(verify)]
    queries = len(seen)
    q = torch.randn(queries + 1, heads, rank + ROPE, generator=g).to(torch.bfloat16)  # token 0 belongs to a prompt
    tokens = torch.arange(1, queries + 1, dtype=torch.int32)
    slots_Q = torch.arange(slots, dtype=torch.int32).repeat_interleave(verify)
    lengths_Q = torch.tensor(seen, dtype=torch.int32)
    args = AttendArgs(q, tokens, slots_Q, lengths_Q, tables, plane.to(dtype), 0.1, max(lengths), skip)
    return args._replace(positions=verify)


def _cases() -> Iterator[Case]:
    def make(length: int, heads: int, dtype: torch.dtype = torch.bfloat16, verify: int = 1, rows: int = 1):
        def inputs(g: torch.Generator) -> AttendArgs:
            return random_context(g, (length,) * rows, heads, dtype=dtype, verify=verify)

        return inputs

    fp8 = torch.float8_e4m3fn
    for length in (1, 64, 65, 200):
        yield Case(f"{length}, nano", make(length, 4))
    yield Case("64, Kimi", make(64, 64))
    for length in (1, 64, 65, 200, 1000, 8192, 32768):
        yield Case(f"{length}, Kimi", make(length, 64), small=False)
        yield Case(f"{length}, Kimi fp8 pages", make(length, 64, fp8), small=False)
    for heads, verify in ((8, 4), (16, 2), (16, 3), (32, 3), (32, 4)):  # heads of one of several ranks
        for length in (1025, 10240):
            name = f"{verify} tokens of 2 rows of {length}, {heads} heads"
            yield Case(name, make(length, heads, torch.bfloat16, verify, 2), small=False)
            yield Case(f"{name}, fp8 pages", make(length, heads, fp8, verify, 2), small=False)


# Queries are given in bf16; probabilities are rounded to bf16 before they multiply the latents.
attend = Kernel(Op("attend", AttendArgs, _reference, _cost, _cases, roundings=1), _cuda, "cuda", _cuda_fits)
