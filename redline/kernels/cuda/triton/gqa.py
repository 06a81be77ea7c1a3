# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Triton is typed by what it compiles, not by annotations.
"""Grouped-query attention with paged KV, for a drafter's Llama-style layer (`decode/gqa.py`), on tensor cores.

A program computes the heads of one key head of one query over a range of the query's pages, one split; a second launch
combines the splits. Grids depend only on the shape of a step; a query's pages are divided by its own length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.cuda.layouts.tiled import PAD_K, padded
from redline.kernels.cuda.triton.rows import as_stored
from redline.messages.job import PAGE_TOKENS


@triton.jit
def _keep_rows(kv, cos, sin, rows, plane, page_stride, row_stride, PAGE: tl.constexpr, KEY_HEADS: tl.constexpr,
               X: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """A program stores one head of one token: keys are rotated, values are not."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HALF)
    inside = i < X // 2
    at = kv + token * (2 * KEY_HEADS * X) + head * X + i
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + X // 2, mask=inside, other=0.0).to(tl.float32)
    if head < KEY_HEADS:
        c = tl.load(cos + token * (X // 2) + i, mask=inside, other=0.0)
        s = tl.load(sin + token * (X // 2) + i, mask=inside, other=0.0)
        turned = a * c - b * s
        b = a * s + b * c
        a = turned
    row = tl.load(rows + token)
    place = plane + row // PAGE * page_stride + row % PAGE * row_stride + head * X + i
    tl.store(place, as_stored(a, plane), mask=inside)
    tl.store(place + X // 2, as_stored(b, plane), mask=inside)


def keep_rows(kv_TR: Tensor, cos: Tensor, sin: Tensor, rows_T: Tensor, plane: Tensor, key_heads: int) -> None:
    """kv float32 [T, 2 G X], as projected -> rows of the plane [pages, 64, 2 G X], keys rotated."""
    x = kv_TR.shape[1] // (2 * key_heads)
    sizes = {"KEY_HEADS": key_heads, "X": x, "HALF": triton.next_power_of_2(x // 2)}
    _keep_rows[(kv_TR.shape[0], 2 * key_heads)](
        kv_TR, cos, sin, rows_T, plane, *plane.stride()[:2], PAGE=PAGE_TOKENS, **sizes, num_warps=1
    )


@triton.jit(do_not_specialize=["skip", "splits", "first_key"])
def _attend(q, cos, sin, tokens, slots, lengths, tables, plane, out, lse, table_width, page_stride, row_stride, scale,
            skip, splits, first_key, PAGE: tl.constexpr, ROW_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
            GROUP: tl.constexpr, ROWS: tl.constexpr, X: tl.constexpr, BLOCK_X: tl.constexpr):  # fmt: skip
    """A row has ROW_HEADS key heads, of which these heads read KEY_HEADS, beginning with `first_key`."""
    query, key_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    token = tl.load(tokens + query).to(tl.int64)
    table = tables + tl.load(slots + query).to(tl.int64) * table_width
    length = tl.load(lengths + query)
    pages = tl.cdiv(length, PAGE)
    share = tl.cdiv(pages, splits)
    first = split * share
    end = tl.minimum(first + share, pages)

    m, x, r = tl.arange(0, ROWS), tl.arange(0, BLOCK_X), tl.arange(0, PAGE)
    real_q = (m < GROUP)[:, None] & (x < X)[None, :]
    head = query * (KEY_HEADS * GROUP) + key_head * GROUP + m
    q_at = q + head[:, None] * X
    c = tl.load(cos + token * (X // 2) + x % (X // 2), mask=x < X, other=0.0)
    s = tl.load(sin + token * (X // 2) + x % (X // 2), mask=x < X, other=0.0)
    s = tl.where(x < X // 2, -s, s)
    q_MX = tl.load(q_at + x[None, :], mask=real_q, other=0.0) * c[None, :]
    q_MX += tl.load(q_at + ((x + X // 2) % X)[None, :], mask=real_q, other=0.0) * s[None, :]
    q_MX = q_MX.to(tl.bfloat16)

    most = tl.full((ROWS,), -float("inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    sum_MX = tl.zeros((ROWS, BLOCK_X), tl.float32)
    for page in range(first, end):
        place = page * PAGE + r
        real = (place >= skip) & (place < length)
        row = plane + tl.load(table + page).to(tl.int64) * page_stride + r * row_stride
        row += (first_key + key_head) * X
        k_XP = tl.load(row[None, :] + x[:, None], mask=real[None, :] & (x < X)[:, None], other=0.0)
        v_at = row[:, None] + ROW_HEADS * X + x[None, :]
        v_PX = tl.load(v_at, mask=real[:, None] & (x < X)[None, :], other=0.0)
        scores_MP = tl.dot(q_MX, k_XP.to(tl.bfloat16)) * scale
        scores_MP = tl.where(real[None, :], scores_MP, -float("inf"))
        higher = tl.maximum(most, tl.max(scores_MP, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        p_MP = tl.exp(scores_MP - safe[:, None])
        fade = tl.exp(most - safe)
        mass = mass * fade + tl.sum(p_MP, 1)
        sum_MX = tl.dot(p_MP.to(tl.bfloat16), v_PX.to(tl.bfloat16), sum_MX * fade[:, None])
        most = higher

    part = head * splits + split
    none = mass == 0.0
    mean_MX = sum_MX / tl.where(none, 1.0, mass)[:, None]
    tl.store(out + part[:, None] * X + x[None, :], mean_MX, mask=real_q)
    tl.store(lse + part, tl.where(none, -float("inf"), most + tl.log(tl.where(none, 1.0, mass))), mask=m < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _combine(out, lse, y, splits, heads, y_stride, X: tl.constexpr, BLOCK_X: tl.constexpr, SPLITS: tl.constexpr):
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, x = tl.arange(0, SPLITS), tl.arange(0, BLOCK_X)
    first = (query * heads + head) * splits
    lse_S = tl.load(lse + first + i, mask=i < splits, other=-float("inf"))
    part_SX = tl.load(
        out + (first + i)[:, None] * X + x[None, :], mask=(i < splits)[:, None] & (x < X)[None, :], other=0.0
    )
    most = tl.max(lse_S, 0)
    share_S = tl.exp(lse_S - tl.where(most == -float("inf"), 0.0, most))
    y_X = tl.sum(part_SX * share_S[:, None], 0) / tl.sum(share_S, 0)
    tl.store(y + query * y_stride + head * X + x, y_X.to(y.dtype.element_ty), mask=x < X)


def attend(
    q_QHX: Tensor,
    cos: Tensor,
    sin: Tensor,
    tokens_Q: Tensor,
    slots_Q: Tensor,
    lengths_Q: Tensor,
    tables: Tensor,
    plane: Tensor,
    key_heads: int,
    scale: float,
    splits: int,
    skip: int,
    first: int,
) -> Tensor:
    """q float32 [Q, H, X], not rotated -> bf16 [Q, H X padded to 128 with zeros]."""
    (queries, heads, x), device = q_QHX.shape, q_QHX.device
    out = torch.empty(queries, heads, splits, x, device=device)
    lse = torch.empty(queries, heads, splits, device=device)
    width = padded(heads * x, PAD_K)
    y = (torch.empty if width == heads * x else torch.zeros)(queries, width, dtype=torch.bfloat16, device=device)
    group, block_x = heads // key_heads, max(16, triton.next_power_of_2(x))
    _attend[(queries, key_heads, splits)](
        *(q_QHX, cos, sin, tokens_Q, slots_Q, lengths_Q, tables, plane, out, lse),
        *(tables.shape[1], *plane.stride()[:2], scale, skip, splits, first),
        PAGE=PAGE_TOKENS,
        ROW_HEADS=plane.shape[-1] // (2 * x),
        KEY_HEADS=key_heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        X=x,
        BLOCK_X=block_x,
        num_warps=4,
        num_stages=3,
    )
    _combine[(queries, heads)](
        *(out, lse, y, splits, heads, width),
        X=x,
        BLOCK_X=block_x,
        SPLITS=triton.next_power_of_2(splits),
        num_warps=1,
    )
    return y
