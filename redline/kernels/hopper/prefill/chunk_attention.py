"""Expanded latent attention of prompt chunks on a GPU, with the library's fused attention.        H heads, V value.

A chunk attends to its whole prefix and causally to itself: two calls, merged by their log-sum-exps. Chunks at the start
of their prompts are batched by similar lengths (`mla.prefill_whole`).

On an NVIDIA H200 cuDNN's attention reaches 624 TFLOP/s at 8,192 tokens, 64 heads of 192 and 128, where flash attention
with padded values reaches 255 and the memory-efficient one 148 (benchmarks/results, docs/log.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.kernels.hopper.layouts.tiled import padded
from redline.kernels.inputs import Chunk
from redline.messages.job import PAGE_TOKENS
from redline.ops.mla import Unfolding, prefill_whole

FILL = 256  # lengths are padded to multiples of this, since cuDNN makes a new plan for each shape
_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend_chunks(
    q_THX: Tensor,
    w: Unfolding,
    scale: float,
    chunks: Sequence[Chunk],
    rows_T: Tensor,
    tables: Tensor,
    plane: Tensor,
    out_THV: Tensor,
) -> None:
    """Attention of each chunk's tokens over their slot's context; the chunks' own rows are already in their pages.

    q_THX bf16 [T, H, N + P], the last P of each head rotated. rows_T int64 [T]: page * 64 + place. tables int32 [slots,
    pages per slot]. plane [pages, 64, R + P], any format: converted to q's dtype. Writes out_THV [T, H, V] at the
    chunks' tokens.
    """
    with sdpa_kernel(_ORDER, set_priority=True):
        whole = [(chunk.first, chunk.count) for chunk in chunks if chunk.start == 0]
        if whole:
            prefill_whole(q_THX, w, scale, whole, rows_T, plane, out_THV)
        for chunk in chunks:
            if chunk.start:
                rows = slice(chunk.first, chunk.first + chunk.count)
                out_THV[rows] = _later(q_THX[rows], w, scale, chunk.start, tables[chunk.slot], plane)


def _later(q_CHX: Tensor, w: Unfolding, scale: float, start: int, table: Tensor, plane: Tensor) -> Tensor:
    """-> o [C, H, V] of a chunk with a prefix."""
    count = q_CHX.shape[0]
    end = start + count
    pages = -(-end // PAGE_TOKENS)
    rows_SW = plane[table[:pages].long()].flatten(0, 1)[:end].to(q_CHX.dtype)
    keys, values = unfold(rows_SW, w)
    q = q_CHX.transpose(0, 1)[None]
    if not q.is_cuda:
        position = torch.arange(start, end)
        seen = torch.arange(end) <= position[:, None]
        o = torch.nn.functional.scaled_dot_product_attention(q, _heads(keys), _heads(values), seen, scale=scale)
        return o[0].transpose(0, 1)
    before = _attention(q, _heads(keys[:start]), _heads(values[:start]), scale, causal=False)
    inside = _attention(q, _heads(keys[start:]), _heads(values[start:]), scale, causal=True)
    return _joined(before, inside)[0].transpose(0, 1).to(q_CHX.dtype)


def unfold(rows_SW: Tensor, w: Unfolding) -> tuple[Tensor, Tensor]:
    """Cache rows [S, R + P] -> keys [S, H, N + P] and values [S, H, V], in the rows' dtype."""
    w_uk, w_uv = w.w_uk.dense().to(rows_SW.dtype), w.w_uv.dense().to(rows_SW.dtype)
    heads, rank, _ = w_uk.shape
    latent, rope = rows_SW[:, :rank], rows_SW[:, rank:]
    keys = (latent @ w_uk.permute(1, 0, 2).flatten(1)).unflatten(1, (heads, -1))
    values = (latent @ w_uv.flatten(0, 1).T).unflatten(1, (heads, -1))
    return torch.cat([keys, rope[:, None].expand(-1, heads, -1)], -1), values


def _heads(x_SHX: Tensor) -> Tensor:
    return x_SHX.transpose(0, 1)[None]


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """-> (o [1, H, C, V], log-sum-exp float32 [1, H, C, 1]); keys [1, H, S, X]."""
    heads, count = q.shape[1:3]
    fill = 0, 0, 0, padded(count, FILL) - count
    q = torch.nn.functional.pad(q, fill)
    if causal:  # only padding queries see the padding keys, which come after the last key
        k, v = (torch.nn.functional.pad(x, fill) for x in (k, v))
    given = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    o, lse = given[0], given[1]
    return o[:, :, :count], lse.reshape(1, heads, -1, 1)[:, :, :count].float()


def _joined(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    (a_o, a_lse), (b_o, b_lse) = a, b
    share = torch.sigmoid(a_lse - b_lse)
    return a_o * share + b_o * (1 - share)
