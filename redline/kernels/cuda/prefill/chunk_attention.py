"""Expanded latent attention of prompt chunks on a GPU.        H heads, N + P key, V value, W = R + P cache row.

The rows of the chunks' contexts, from the cache, are unfolded to keys and values of all heads; then all chunks attend
in one launch (`attend_blocks`).

A whole prompt of 4,096 tokens or a larger multiple of 1,024 attends by PyTorch's fastest attention, cuDNN's: 0.92 of
the time for 8,192 tokens on an NVIDIA H200. Other lengths must not: cuDNN makes a plan for each shape, which takes 43
ms and 1.4 MiB of the host, and PyTorch keeps all plans (measured 2026-11-30; pytorch/pytorch#191576).
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from redline.kernels.cuda.layouts.tiled import padded
from redline.kernels.cuda.prefill.attend_blocks import BLOCK, ROWS, attend_blocks
from redline.kernels.inputs import Chunk
from redline.messages.job import PAGE_TOKENS
from redline.ops.mla import Unfolding, unfolded, unfolded_apart
from redline.ops.staged import staged

LIBRARY_LEAST, LIBRARY_UNIT = 4096, 1024  # tokens
TOGETHER = 1 << 14  # tokens of the contexts that one call unfolds: at Kimi's sizes 0.7 GB of keys and values
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
    others = list[Chunk]()
    for chunk in chunks:
        if chunk.start or chunk.count < LIBRARY_LEAST or chunk.count % LIBRARY_UNIT or not q_THX.is_cuda:
            others.append(chunk)
            continue
        here = slice(chunk.first, chunk.first + chunk.count)
        rows_CW = plane[rows_T[here] // PAGE_TOKENS, rows_T[here] % PAGE_TOKENS].to(q_THX.dtype)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THX[here], *unfolded(rows_CW, w)))
        with sdpa_kernel(_ORDER, set_priority=True):
            o = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        out_THV[here] = o[0].transpose(0, 1)
    for group in _groups(tuple(others), min(TOGETHER, tables.shape[1] * PAGE_TOKENS), q_THX.device):
        slot_R, first_R, last_R = group.info_C3.repeat_interleave(group.rows_C, 0, output_size=group.rows).unbind(1)
        place_R = torch.minimum(torch.arange(group.rows, device=q_THX.device) - first_R, last_R)
        page_R = tables[slot_R, place_R // PAGE_TOKENS].long()
        rows_RW = plane[page_R, place_R % PAGE_TOKENS].to(q_THX.dtype)
        keys, ropes, values = unfolded_apart(rows_RW, w)
        attend_blocks(q_THX, keys, ropes, values, group.blocks_B4, scale, out_THV)


class _Group(NamedTuple):
    """C chunks whose contexts, of R rows in all, are unfolded together; and the blocks of their tokens. A context is
    filled up with its last row."""

    info_C3: Tensor  # int64: the slot, the context's first row among R, the place of its last row in the slot
    rows_C: Tensor  # int64: rows of the context, filled up
    rows: int  # R
    blocks_B4: Tensor  # int32, as in `attend_blocks`


@functools.lru_cache(maxsize=2)  # all layers of a step make the same call
def _groups(chunks: tuple[Chunk, ...], together: int, device: torch.device) -> list[_Group]:
    """If a group has several chunks, their contexts have at most `together` rows."""
    return [_group(some, device) for some in _parted(chunks, together)]


def _parted(chunks: Sequence[Chunk], together: int) -> Iterator[list[Chunk]]:
    some, rows = list[Chunk](), 0
    for chunk in chunks:
        context = padded(chunk.start + chunk.count, ROWS)
        if some and rows + context > together:
            yield some
            some, rows = [], 0
        some.append(chunk)
        rows += context
    if some:
        yield some


def _group(chunks: Sequence[Chunk], device: torch.device) -> _Group:
    contexts = [chunk.start + chunk.count for chunk in chunks]
    rows = [padded(context, ROWS) for context in contexts]
    first = list(accumulate(rows, initial=0))
    blocks = [
        (chunk.first + at, min(BLOCK, chunk.count - at), row, chunk.start + at + 1)
        for chunk, row in zip(chunks, first, strict=False)
        for at in range(0, chunk.count, BLOCK)
    ]
    blocks.sort(key=lambda block: -block[3])  # the longest first, so that the last to end are short
    info = [(chunk.slot, row, context - 1) for chunk, row, context in zip(chunks, first, contexts, strict=False)]
    staged_info, staged_rows = (staged(np.array(x), device) for x in (info, rows))
    return _Group(staged_info, staged_rows, first[-1], staged(np.array(blocks), device, torch.int32))
