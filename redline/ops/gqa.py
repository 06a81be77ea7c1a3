"""Grouped-query attention over pages, for a drafter with Llama-style layers.   H heads, G key heads, X head width.

Plain torch: none of our target models has such layers; only third-party drafters do. The GPU version is
`kernels/cuda/decode/gqa.py`. A page row is [rotated keys (G X) | values (G X)]; head h reads key head
h // (H / G). Arguments are those of `ops.mla`; its records document their shapes.
"""

from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from redline.ops.formats import W
from redline.ops.mla import context_rows


@dataclass(frozen=True)
class GqaWeights(Generic[W]):
    """qkv [(H + 2 G) X, D]: queries, keys and values stacked."""

    qkv: W
    heads: int
    key_heads: int
    width: int  # X


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + X / 2) of the last axis by their angles, cos and sin [..., X / 2]: Llama's order."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def heads_and_row(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Projected heads q [..., H, X], k and v [..., G, X]; cos, sin float32 [..., X / 2] -> rotated query heads, and
    the page row, float32 [..., 2 G X]."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    row = torch.cat([rotate_halves(k.float(), cos, sin), v.float()], -2).flatten(-2)
    return rotate_halves(q.float(), cos, sin).to(q.dtype), row


def unfold(rows: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Page rows [..., 2 G X] -> keys and values [..., H, X]; each key head is repeated for all heads that read it."""
    keys, values = rows.unflatten(-1, (2, -1, width)).unbind(-3)
    times = heads // keys.shape[-2]
    return keys.repeat_interleave(times, -2), values.repeat_interleave(times, -2)


def gqa_decode(
    q_THX: Tensor,
    scale: float,
    tokens_Q: Tensor,
    slots_Q: Tensor,
    lengths_Q: Tensor,
    tables: Tensor,
    plane: Tensor,
    out_THX: Tensor,
    skip: int = 0,
) -> None:
    """Query i, token tokens_Q[i] of q [T, H, X], attends to rows [skip, lengths_Q[i]) of slot slots_Q[i], its own last.

    plane [pages, 64, 2 G X]. Writes out_THX at the query tokens.
    """
    for token, slot, length in zip(tokens_Q.tolist(), slots_Q.tolist(), lengths_Q.tolist(), strict=True):
        gqa_prefill(q_THX[token : token + 1], scale, length - 1, tables[slot], plane, out_THX[token : token + 1], skip)


def gqa_prefill(
    q_CHX: Tensor, scale: float, start: int, table: Tensor, plane: Tensor, out_CHX: Tensor, skip: int = 0
) -> None:
    """q_CHX [C, H, X]: a slot's tokens at positions [start, start + C); their rows are in the pages. Writes out_CHX."""
    count, heads, width = q_CHX.shape
    keys_SHX, values_SHX = unfold(context_rows(plane, table, start + count)[skip:], heads, width)
    scores = torch.einsum("chx,shx->hcs", q_CHX.float(), keys_SHX) * scale
    position = torch.arange(start, start + count, device=q_CHX.device)
    scores = scores.masked_fill(torch.arange(skip, start + count, device=q_CHX.device) > position[:, None], -torch.inf)
    out_CHX.copy_(torch.einsum("hcs,shx->chx", scores.softmax(-1), values_SHX))
