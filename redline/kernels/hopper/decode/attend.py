"""Attention of absorbed queries over cached latents.        T tokens, Q queries, H heads, R rank, P rope, S splits.

A page holds 64 rows [latent R | rotated key P]: all heads score the same rows, and the latents are the values too. A
block takes 16, 32 or 64 heads of a query and a run of its pages, one split; `unabsorb` combines the splits. With small
blocks a page is read more often, and answers come sooner where the GPU has room.

A rank of several has few heads, and a row that verifies drafts several queries of one context. Then a block may take
heads of neighbouring queries together: (query, head) pairs are rows of q one behind the other, so it is as if one query
had so many times the heads, of which each sees as many tokens as its own query does. The context is read once, and
shared out by the longest of the queries'. So a query's bits depend on how many tokens its row verifies, never on what
these are.

Products of 16 or 32 heads are of warps (attend.cu), those of 64 of warpgroups (attend_warpgroups.cu), which read a page
from shared memory a quarter as often.

Heads of a block and splits of a query depend on the shape of a step alone, as a captured graph demands. A query's pages
are shared out evenly over the splits by its own length, so a grid made for 32k tokens keeps its blocks busy at 2k.
Partial latents are bf16, like the product they go into, so one split loses nothing: at 32k tokens and 64 heads 128
splits write 8.4 MB (float32: 16.8) beside 37.7 MB of pages.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.hopper.kernel import CudaKernel, launch_record
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op
from redline.wire.job import PAGE_TOKENS

SMS = 132  # NVIDIA H100 and H200
MAX_WAVES = 4  # of blocks, where pages are split: 35 MB of partial latents at R = 512
LATENT, ROPE = 512, 64  # R of the models that the times below were measured with, and P of every model here
WARPGROUP_ROWS = {64}  # heads of the blocks that take attend_warpgroups.cu, which could do 16 and 32 too
_VALUE_BYTES = {torch.bfloat16: 2, torch.float8_e4m3fn: 1}

_Launch = launch_record("blocks/attention.cuh", "AttendLaunch")


class Plan(NamedTuple):
    """How a step's queries are divided over blocks."""

    rows: int  # of a block: heads of a query, or of several
    splits: int  # of a query
    together: int = 1  # queries whose heads blocks take as if they were one query's


@functools.cache
def plan(queries: int, heads: int, max_length: int, positions: int = 1) -> Plan:
    """The way that a model fitted to an NVIDIA H200 finds the quickest, `unabsorb`'s combining of splits included.

    max_length: tokens, at least those of any query's context. positions: queries of one slot that are side by side.
    """
    pages = max(1, -(-max_length // PAGE_TOKENS))
    apart = min(_ways(queries, heads, pages), key=lambda way: modelled(way, queries, heads, pages))
    shared = [*_ways_together(queries, heads, pages, positions)]
    if not shared:
        return apart
    together = min(shared, key=lambda way: modelled(way, queries, heads, pages))
    saved = _alone(apart, queries, heads, pages) - _alone(together, queries, heads, pages)
    return together if saved > _TOGETHER_SAVES else apart


def _alone(way: Plan, queries: int, heads: int, pages: int) -> float:
    """Microseconds of a way where heads are so few that each is combined by its own block, as fast as one reads."""
    return microseconds(way, queries, heads, pages) + queries * way.splits * _LATENT_BYTES / _BLOCK_SPEED


def predicted(queries: int, heads: int, max_length: int, positions: int = 1) -> float:
    """Microseconds that the quickest way takes by the model, combining included."""
    pages = max(1, -(-max_length // PAGE_TOKENS))
    return modelled(plan(queries, heads, max_length, positions), queries, heads, pages)


def modelled(way: Plan, queries: int, heads: int, pages: int) -> float:
    """Microseconds that a way takes by the model, `unabsorb`'s combining included."""
    return microseconds(way, queries, heads, pages) + _combining(queries * heads * way.splits)


def _ways(queries: int, heads: int, pages: int) -> Iterator[Plan]:
    """Every size of block that is not half empty, with every number of splits of which none is empty."""
    for rows in _TIMES:
        if rows < heads + 16:  # no block is half empty
            for splits in splits_of(queries * -(-heads // rows), pages):
                yield Plan(rows, splits)


def _ways_together(queries: int, heads: int, pages: int, positions: int) -> Iterator[Plan]:
    """Every size of block of which a slot's queries take fewer together than apart. The last may be half empty, for
    with a page a block of 64 rows is done sooner than one of 32."""
    for rows in _TIMES:
        blocks = -(-positions * heads // rows)
        if blocks < positions * -(-heads // rows):
            for splits in splits_of(queries // positions * blocks, pages):
                yield Plan(rows, splits, positions)


def splits_of(blocks: int, pages: int) -> Iterator[int]:
    """Numbers of splits of which none is empty, where each split is of so many blocks."""
    most = min(pages, SMS, max(1, MAX_WAVES * SMS // max(1, blocks)))
    for share in sorted({-(-pages // splits) for splits in range(1, most + 1)}):
        yield -(-pages // share)


def microseconds(way: Plan, queries: int, heads: int, pages: int) -> float:
    """How long `attend` takes by the model: in each wave a block begins, and multiplies a page while the next comes."""
    queries, heads = queries // way.together, heads * way.together
    parts, share = -(-heads // way.rows), -(-pages // way.splits)
    blocks = queries * parts * -(-pages // share)
    waves = -(-blocks // SMS)
    if share == 1 and waves > 1:  # blocks of one page end one by one; of the smallest, two lie on a multiprocessor
        waves = blocks / SMS if way.rows == min(_TIMES) else waves - _ONE_BY_ONE
    busy = min(blocks, SMS)
    memory_speed = _MEMORY_SPEED * (0.35 + 0.65 * busy / SMS)
    load = _PAGE_BYTES * max(1 / _SM_SPEED, busy / _L2_SPEED, busy / parts / memory_speed)
    begin, page = _TIMES[way.rows]
    return _LAUNCH + max(1, waves) * (begin + share * max(page, load))


def _combining(latents: int) -> float:
    """Microseconds that `unabsorb` takes to read and combine so many partial latents."""
    size = latents * _LATENT_BYTES
    return size / _PARTIAL_SPEED + max(0, size - _PARTIAL_ROOM) / _SPILLED_SPEED


# An NVIDIA H200: microseconds, and bytes. 16 and 32 rows as measured; 64 by counted cycles of their products.
_TIMES = {64: (4.0, 1.6), 32: (3.6, 3.5), 16: (3.0, 2.2)}  # of a block of so many rows: to begin, and each page
_LAUNCH = 0.4
_ONE_BY_ONE = 0.45  # of a wave
_PAGE_BYTES, _LATENT_BYTES = 73728, 1024
_SM_SPEED, _L2_SPEED, _MEMORY_SPEED = 118e3, 5.5e6, 4.4e6  # bytes per microsecond: of a block, and of all
# An NVIDIA H100 (`attend-rows-h100.json`): at which a block combines, and what the model has to promise so that taking
# a row's queries together is nowhere slower; its memory is slower than the H200's of the model.
_BLOCK_SPEED, _TOGETHER_SAVES = 33e3, 4.0
_PARTIAL_SPEED, _PARTIAL_ROOM, _SPILLED_SPEED = 2.7e6, 16e6, 1.6e6  # partial latents, and those beyond the L2 cache


class AttendArgs(NamedTuple):
    """Attends with each absorbed query to its slot's latents, split over the chip; Q queries, S splits."""

    q_THW: Tensor  # bf16 [T, H, R + P], as `absorb` returns it
    tokens_Q: Tensor  # int32 [Q]: the query's row of q
    slots_Q: Tensor  # int32 [Q]: its row of tables; queries of one slot, each one longer, are side by side
    lengths_Q: Tensor  # int32 [Q]: rows of its context, its own row the last
    tables: Tensor  # int32 [slots, pages per slot]: the pages of each slot, in order
    plane: Tensor  # bf16 or float8_e4m3fn [pages, 64, R + P], P = 64; pages are contiguous, and may lie apart
    scale: float  # what the scores are multiplied by before the softmax
    max_length: int  # at least the greatest of lengths_Q: S follows from it, not from the lengths
    skip: int = 0  # leading rows of every slot that hold nothing and are not read, as in `mla_decode`
    rank: int = 0  # reads the rank's part of every context, of
    ranks: int = 1  # parts that are alike, in pages
    positions: int = 1  # of a row of the step: so many queries side by side are of one slot


def _reference(args: AttendArgs) -> tuple[Tensor, Tensor]:
    """-> (latents bf16 [Q, H, S, R], natural log-sum-exps float32 [Q, H, S]), one of each for a query's every split.

    A split without rows has -inf; its latents are zeros here and never written by the kernel.
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
            if not len(rows_SW):  # what the split has is a neighbour's
                continue
            scores_HS = q_THW[token].float() @ rows_SW.T * args.scale
            out[i, :, split] = (scores_HS.softmax(-1) @ rows_SW[:, :rank]).to(out.dtype)
            lse[i, :, split] = scores_HS.logsumexp(-1)
    return out, lse


def _plan(args: AttendArgs) -> Plan:
    queries, heads = args.tokens_Q.shape[0], args.q_THW.shape[1]
    assert queries % args.positions == 0, f"{queries} queries are no whole rows of {args.positions} positions"
    return plan(queries, heads, part_length(args.max_length, args.ranks), args.positions)


def part_length(length: int, ranks: int) -> int:
    """Tokens of a context of so many that one of so many ranks reads at most: whole pages."""
    return -(-length // (PAGE_TOKENS * ranks)) * PAGE_TOKENS


def has_warpgroups(rows: int, rank: int) -> bool:
    """Whether blocks of this many heads take attend_warpgroups.cu rather than attend.cu."""
    return rows in WARPGROUP_ROWS and (rank <= 256 or rank % 128 == 0)


@functools.cache
def _kernel(rows: int, together: int, rank: int, value_bytes: int, buffers: int, warpgroups: bool) -> CudaKernel:
    """buffers: 1 where no split has two pages, so that a block leaves room on its SM for other kernels; else 2."""
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


def attend_as(args: AttendArgs, way: Plan) -> tuple[Tensor, Tensor]:
    """As `attend` on a GPU, divided over blocks as it is told to: for measurements."""
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
        plane=plane[0],  # and so on, each page a stride further
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
    """Whether q is bf16, pages are bf16 or e4m3, and R is a multiple of 64 up to 512: rows of whole 128 bytes."""
    rank = args.plane.shape[-1] - ROPE
    return (
        args.q_THW.dtype == torch.bfloat16 and args.plane.dtype in _VALUE_BYTES and rank % 64 == 0 and 64 <= rank <= 512
    )


def _cost(args: AttendArgs) -> Cost:
    """Each slot's context once, however many of its tokens ask; one latent per head and query."""
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
    """A slot for each length, whose last `verify` tokens are queries. Rows that no query sees are NaN."""
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
    q = torch.randn(queries + 1, heads, rank + ROPE, generator=g).to(torch.bfloat16)  # token 0 is a prompt's
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
    for heads, verify in ((8, 4), (16, 2), (16, 3), (32, 3), (32, 4)):  # of one of several ranks
        for length in (1025, 10240):
            name = f"{verify} tokens of 2 rows of {length}, {heads} heads"
            yield Case(name, make(length, heads, torch.bfloat16, verify, 2), small=False)
            yield Case(f"{name}, fp8 pages", make(length, heads, fp8, verify, 2), small=False)


# Queries are bf16, as they come; probabilities are rounded to bf16 on their way to the latents.
attend = Kernel(Op("attend", AttendArgs, _reference, _cost, _cases, roundings=1), _cuda, "hopper", _cuda_fits)
