"""Grouped-query attention of a drafter's Llama-style layer, in Triton (`triton/gqa.py`).

`keep_rows`        writes rotated keys, and values, of each token to its page
`attend_grouped`   attends with queries, rotated as they are read, to the pages of their slots

T tokens, Q queries, H heads, G key heads, X width of a head. A page's row is [rotated keys (G X) | values (G X)], and
head h reads key head h // (H / G). With tensor parallelism the heads of one rank read some of a row's key heads.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.decode.dense import pad_columns
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.ops.gqa import gqa_decode, rotate_halves
from redline.ops.mla import stored
from redline.ops.op import Case, Cost, Op

MOST_GROUP, MOST_WIDTH = 64, 256  # maximum heads per key head, and maximum width of a head
_PROGRAMS = 528  # programs of a grid, if there are enough pages: four per multiprocessor of an NVIDIA H200
_PAGES = torch.bfloat16, torch.float8_e4m3fn


class KeepRowsArgs(NamedTuple):
    """Rotates each token's keys, and writes keys and values to its page."""

    kv_TR: Tensor  # float32 [T, 2 G X], as projected
    cos: Tensor  # float32 [T, X / 2]: of the angles of each token's position
    sin: Tensor  # float32 [T, X / 2]
    rows_T: Tensor  # int64 [T]: page * 64 + place
    plane: Tensor  # bf16 or float8_e4m3fn [pages, 64, 2 G X], written; pages and rows may be strided
    key_heads: int  # G


def _keep_reference(args: KeepRowsArgs) -> None:
    """Rows are rounded to the pages' dtype; e4m3 saturates."""
    keys, values = args.kv_TR.unflatten(1, (2, args.key_heads, -1)).unbind(1)
    keys = rotate_halves(keys, args.cos[:, None], args.sin[:, None])
    row_TR = torch.cat([keys, values], 1).flatten(1)
    pages, places = args.rows_T // PAGE_TOKENS, args.rows_T % PAGE_TOKENS
    args.plane[pages, places] = stored(row_TR, args.plane.dtype)


def _keep_triton(args: KeepRowsArgs) -> None:
    from redline.kernels.cuda.triton import gqa  # Triton is imported only on use

    gqa.keep_rows(*args)


def _keep_fits(args: KeepRowsArgs) -> bool:
    """Whether rows are contiguous and `attend_grouped` supports the pages' dtype."""
    return args.kv_TR.is_contiguous() and args.plane.dtype in _PAGES and args.plane.stride(2) == 1


def _keep_cost(args: KeepRowsArgs) -> Cost:
    kv_TR = args.kv_TR
    return Cost(kv_TR.nbytes + kv_TR.numel() * args.plane.element_size() + args.cos.nbytes + args.sin.nbytes)


def _keep_cases() -> Iterator[Case]:
    def make(tokens: int, key_heads: int, x: int, dtype: torch.dtype = torch.bfloat16, layers: int = 1):
        def inputs(g: torch.Generator) -> KeepRowsArgs:
            kv = torch.randn(tokens, 2 * key_heads * x, generator=g) * 2
            angle = torch.rand(tokens, x // 2, generator=g) * 6
            rows = torch.randperm(3 * PAGE_TOKENS, generator=g)[:tokens]
            plane = torch.zeros(3, PAGE_TOKENS, layers * 2 * key_heads * x).to(dtype)
            return KeepRowsArgs(kv, angle.cos(), angle.sin(), rows, plane[..., -kv.shape[1] :], key_heads)

        return inputs

    yield Case("T=1 nano", make(1, 4, 64))
    yield Case("T=9 odd width", make(9, 2, 24))
    yield Case("T=4 fp8 pages", make(4, 2, 32, torch.float8_e4m3fn))
    yield Case("T=3, the last of three layers' rows", make(3, 2, 32, layers=3))
    for tokens in (1, 64):
        yield Case(f"T={tokens} Kimi", make(tokens, 64, 128), small=False)


keep_rows = Kernel(
    Op("keep_rows", KeepRowsArgs, _keep_reference, _keep_cost, _keep_cases, writes=("plane",)),
    _keep_triton,
    "cuda",
    _keep_fits,
)


class AttendGroupedArgs(NamedTuple):
    """Rotates each query, and attends with it to its slot's rows."""

    q_QHX: Tensor  # float32 [Q, H, X], as projected
    cos: Tensor  # float32 [T, X / 2]: of the angles of each token's position
    sin: Tensor  # float32 [T, X / 2]
    tokens_Q: Tensor  # int32 [Q]: the query's row of cos and sin
    slots_Q: Tensor  # int32 [Q]: its row of tables
    lengths_Q: Tensor  # int32 [Q]: rows of its context, of which its own is the last
    tables: Tensor  # int32 [slots, pages per slot]
    plane: Tensor  # bf16 or float8_e4m3fn [pages, 64, 2 G X]; pages and rows may be strided
    key_heads: int  # number of key heads that these heads read: all G, or those of a rank
    scale: float  # factor of the scores before the softmax
    max_length: int  # an upper bound of lengths_Q, from which the grid is derived, independent of the actual lengths
    skip: int  # leading rows of every slot that are unused and not read; less than any of lengths_Q
    first: int = 0  # index of the first of the row's G key heads that these heads read


def splits_of(queries: int, key_heads: int, max_length: int) -> int:
    """Number of parts into which a query's pages are divided, so that the grid fills the GPU."""
    pages = -(-max_length // PAGE_TOKENS)
    return max(1, min(pages, 64, -(-_PROGRAMS // max(1, queries * key_heads))))


def _attend_reference(args: AttendGroupedArgs) -> Tensor:
    """-> bf16 [Q, H X padded to 128 with zeros]."""
    rows_Q = args.tokens_Q.long()
    q = rotate_halves(args.q_QHX, args.cos[rows_Q, None], args.sin[rows_Q, None]).to(torch.bfloat16).float()
    out = torch.empty_like(q)
    each = torch.arange(rows_Q.shape[0])
    shared = args.plane.unflatten(-1, (2, -1, q.shape[-1])).narrow(-2, args.first, args.key_heads).flatten(-3)
    gqa_decode(q, args.scale, each, args.slots_Q, args.lengths_Q, args.tables, shared, out, args.skip)
    return pad_columns(out.flatten(1).to(torch.bfloat16))


def _attend_triton(args: AttendGroupedArgs) -> Tensor:
    from redline.kernels.cuda.triton import gqa

    splits = splits_of(args.q_QHX.shape[0], args.key_heads, args.max_length)
    return gqa.attend(
        *(args.q_QHX, args.cos, args.sin, args.tokens_Q, args.slots_Q, args.lengths_Q, args.tables, args.plane),
        *(args.key_heads, args.scale, splits, args.skip, args.first),
    )


def _attend_fits(args: AttendGroupedArgs) -> bool:
    """Whether the pages are bf16 or e4m3, at most 64 heads share a key head, and a head has at most 256 values."""
    heads, x = args.q_QHX.shape[1:]
    return (
        args.q_QHX.is_contiguous()
        and args.plane.dtype in _PAGES
        and args.plane.stride(2) == 1
        and heads <= MOST_GROUP * args.key_heads
        and x <= MOST_WIDTH
    )


def _attend_cost(args: AttendGroupedArgs) -> Cost:
    """Each slot's context once, independent of the number of queries."""
    (queries, heads, x), width = args.q_QHX.shape, 2 * args.key_heads * args.q_QHX.shape[-1]
    longest: dict[int, int] = {}
    for slot, length in zip(args.slots_Q.tolist(), args.lengths_Q.tolist(), strict=True):
        longest[slot] = max(length, longest.get(slot, 0))
    moved = (sum(longest.values()) - args.skip * len(longest)) * width * args.plane.element_size()
    seen = int(args.lengths_Q.sum()) - args.skip * queries
    return Cost(moved + args.q_QHX.numel() * (4 + 2), 4 * heads * x * seen)


def random_rows(
    g: torch.Generator, lengths: tuple[int, ...], heads: int, key_heads: int, x: int, dtype: torch.dtype
) -> AttendGroupedArgs:
    """A slot with one query for each length. Rows that no query reads are NaN, including place 0."""
    queries, width = len(lengths), 2 * key_heads * x
    per_slot = -(-max(lengths) // PAGE_TOKENS)
    tables = torch.randperm(queries * per_slot, generator=g).to(torch.int32).view(queries, per_slot)
    plane = torch.randn(queries * per_slot, PAGE_TOKENS, width, generator=g)
    for slot, length in enumerate(lengths):
        rows = plane[tables[slot].long()].flatten(0, 1)
        rows[:1], rows[length:] = torch.nan, torch.nan
        plane[tables[slot].long()] = rows.unflatten(0, (per_slot, PAGE_TOKENS))
    angle = torch.rand(queries + 1, x // 2, generator=g) * 6
    tokens = torch.randperm(queries + 1, generator=g)[:queries].to(torch.int32)
    q = torch.randn(queries, heads, x, generator=g)
    slots, contexts = torch.arange(queries, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    given = q, angle.cos(), angle.sin(), tokens, slots, contexts, tables, plane.to(dtype)
    return AttendGroupedArgs(*given, key_heads, 2 * x**-0.5, max(lengths), 1)


def _attend_cases() -> Iterator[Case]:
    """Contexts of one row to many pages, with and without grouped heads, at nano's sizes and at Kimi's."""
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn

    def make(lengths: tuple[int, ...], heads: int, key_heads: int, x: int, dtype: torch.dtype = bf16):
        def inputs(g: torch.Generator) -> AttendGroupedArgs:
            return random_rows(g, lengths, heads, key_heads, x, dtype)

        return inputs

    def part(lengths: tuple[int, ...], heads: int, ranks: int, x: int, rank: int):
        def inputs(g: torch.Generator) -> AttendGroupedArgs:
            whole = random_rows(g, lengths, heads, heads, x, bf16)
            each = heads // ranks
            own = whole.q_QHX[:, rank * each :][:, :each].contiguous()
            return whole._replace(q_QHX=own, key_heads=each, first=rank * each)

        return inputs

    def of_layer(lengths: tuple[int, ...], heads: int, key_heads: int, x: int):
        def inputs(g: torch.Generator) -> AttendGroupedArgs:
            given = random_rows(g, lengths, heads, key_heads, x, bf16)
            rows = torch.full((*given.plane.shape[:2], 3 * given.plane.shape[2]), torch.nan, dtype=bf16)
            middle = rows[..., given.plane.shape[2] : 2 * given.plane.shape[2]]
            middle.copy_(given.plane)
            return given._replace(plane=middle)

        return inputs

    yield Case("3, nano", make((3,), 4, 4, 64))
    yield Case("130 and 3, the second of three layers' rows", of_layer((130, 3), 4, 2, 32))
    yield Case("64, 65 and 200, nano", make((64, 65, 200), 4, 4, 64))
    yield Case("200, nano, fp8 pages", make((200,), 4, 2, 64, fp8))
    yield Case("130 and 3, groups of 3, odd width", make((130, 3), 6, 2, 24))
    yield Case("70, groups of 20", make((70,), 20, 1, 32))
    yield Case("130 and 3, the second rank's of three", part((130, 3), 6, 3, 32, 1))
    for length in (2, 64, 1000, 8192):
        yield Case(f"{length}, Kimi", make((length,), 64, 64, 128), small=False)
    yield Case("8 of 1,000, Kimi", make((1000,) * 8, 64, 64, 128), small=False)
    yield Case("64 of 200, Kimi, 8 key heads", make((200,) * 64, 56, 8, 128), small=False)
    yield Case("1000, Kimi, fp8 pages", make((1000,), 64, 64, 128, fp8), small=False)


# Probabilities are rounded to bf16 before they multiply the values.
attend_grouped = Kernel(
    Op("attend_grouped", AttendGroupedArgs, _attend_reference, _attend_cost, _attend_cases, roundings=1),
    _attend_triton,
    "cuda",
    _attend_fits,
)
