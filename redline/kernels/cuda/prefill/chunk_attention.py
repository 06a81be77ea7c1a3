"""Expanded latent attention of prompt chunks on a GPU, with the library's fused attention.        H heads, V value.

A chunk attends causally to itself and the up to FILL - 1 tokens before it, and to its prefix before those in up to four
pieces: calls merged by their log-sum-exps, for all chunks of a step that have as many tokens before them. Chunks at the
start of their prompts are batched by similar lengths (`mla.prefill_whole`).

Sizes are few: cuDNN makes a plan for each shape, and PyTorch keeps all of them. A plan takes some 40 ms of the host
(pytorch/pytorch#191576), so that otherwise each new length of a cached prefix would delay its prompt, and memory grow.

On an NVIDIA H200 cuDNN's attention reaches 624 TFLOP/s at 8,192 tokens, 64 heads of 192 and 128, where flash attention
with padded values reaches 255 and the memory-efficient one 148 (benchmarks/results, docs/log.md).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.kernels.cuda.layouts.tiled import padded
from redline.kernels.inputs import Chunk
from redline.messages.job import PAGE_TOKENS
from redline.ops.mla import Unfolding, prefill_whole, unfolded
from redline.ops.staged import staged

FILL = 256  # lengths of a call's queries and keys are multiples of this
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
    with sdpa_kernel(_ORDER, set_priority=True):
        whole = [(chunk.first, chunk.count) for chunk in chunks if chunk.start == 0]
        if whole:
            prefill_whole(q_THX, w, scale, whole, rows_T, plane, out_THV)
        later = tuple(chunk for chunk in chunks if chunk.start)
        if not q_THX.is_cuda:
            for chunk in later:
                rows = slice(chunk.first, chunk.first + chunk.count)
                out_THV[rows] = _masked(q_THX[rows], w, scale, chunk, tables, plane)
        elif later:
            most = min(TOGETHER, tables.shape[1] * PAGE_TOKENS)  # the memory plan has room for a longest context
            for group in _alike(later, most, q_THX.device):
                o_CSHV = _behind(q_THX[group.place_CS], w, scale, group, rows_T, tables, plane)
                out_THV[group.token_R] = o_CSHV.flatten(0, 1)[group.real_R]


class _Group(NamedTuple):
    """C chunks with as many tokens before them, padded to S tokens each; R of these tokens are real, not padding."""

    start: int  # tokens before each chunk
    slots_C: Tensor  # int64
    place_CS: Tensor  # int64: indices of the tokens in the step
    real_R: Tensor  # int64: indices of the real tokens in the flattened [C * S]
    token_R: Tensor  # int64: their indices in the step


@functools.lru_cache(maxsize=2)  # all layers of a step make the same call
def _alike(chunks: tuple[Chunk, ...], together: int, device: torch.device) -> list[_Group]:
    """The groups of these chunks. If a group has several, their contexts have at most `together` tokens in sum.

    Requests that share a prefix from the cache begin behind the same number of tokens: one call for 64 of them instead
    of 64 calls, whose launches the host takes longer for than the GPU.
    """
    by_size: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        inside = chunk.start % FILL
        by_size.setdefault((chunk.start, padded(inside + chunk.count, FILL) - inside), []).append(chunk)
    groups: list[_Group] = []
    for (start, size), alike in by_size.items():
        most = 1 << (max(1, together // (start + size)).bit_length() - 1)
        while alike:  # powers of two: few shapes
            count = min(most, 1 << (len(alike).bit_length() - 1))
            some, alike = alike[:count], alike[count:]
            place_CS = np.stack([chunk.first + np.minimum(np.arange(size), chunk.count - 1) for chunk in some])
            real_R = np.concatenate([line * size + np.arange(chunk.count) for line, chunk in enumerate(some)])
            slots_C, token_R = np.array([chunk.slot for chunk in some]), place_CS.flatten()[real_R]
            groups.append(_Group(start, *(staged(x, device) for x in (slots_C, place_CS, real_R, token_R))))
    return groups


def _behind(
    q_CSHX: Tensor, w: Unfolding, scale: float, group: _Group, rows_T: Tensor, tables: Tensor, plane: Tensor
) -> Tensor:
    """-> o [C, S, H, V] of a group of chunks, by the library's attention."""
    count, width = len(group.slots_C), plane.shape[-1]
    pages = -(-group.start // PAGE_TOKENS)
    before_W = plane[tables[group.slots_C, :pages].long()].view(count, -1, width)[:, : group.start]
    inside = rows_T[group.place_CS]
    inside_W = plane[inside // PAGE_TOKENS, inside % PAGE_TOKENS]
    rows_W = torch.cat([before_W, inside_W], 1).to(q_CSHX.dtype)

    def attended(first: int, last: int, *, causal: bool) -> tuple[Tensor, Tensor]:
        """To rows [first, last). Their keys are a tensor of their own, since cuDNN plans for strides too."""
        given = unfolded(rows_W[:, first:last].flatten(0, 1), w)
        keys, values = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in given)
        return _attention(q, keys, values, scale, causal=causal)

    unaligned = group.start % FILL  # tokens of the prefix that attend too, with queries of zeros; nothing reads them
    begin = group.start - unaligned
    q = (torch.nn.functional.pad(q_CSHX, (0, 0, 0, 0, unaligned, 0)) if unaligned else q_CSHX).transpose(1, 2)
    o, lse = attended(begin, rows_W.shape[1], causal=True)
    for first, last in _pieces(begin):
        o, lse = _joined((o, lse), attended(first, last, causal=False))
    return o[:, :, unaligned:].transpose(1, 2).to(q_CSHX.dtype)


def _pieces(length: int) -> Iterator[tuple[int, int]]:
    """Divides [0, length), a multiple of FILL, into pieces of FILL x (1 to 7) x a power of two: 36 sizes up to 262,144
    tokens, and at most four pieces."""
    first = 0
    while first < length:
        units = (length - first) // FILL
        power = max(0, units.bit_length() - 3)
        last = first + (units >> power << power) * FILL
        yield first, last
        first = last


def _masked(q_CHX: Tensor, w: Unfolding, scale: float, chunk: Chunk, tables: Tensor, plane: Tensor) -> Tensor:
    """-> o [C, H, V] of a chunk with a prefix, on a CPU."""
    end = chunk.start + chunk.count
    pages = -(-end // PAGE_TOKENS)
    rows_SW = plane[tables[chunk.slot, :pages].long()].flatten(0, 1)[:end].to(q_CHX.dtype)
    keys, values = (x.transpose(0, 1)[None] for x in unfolded(rows_SW, w))
    seen = torch.arange(end) <= torch.arange(chunk.start, end)[:, None]
    q = q_CHX.transpose(0, 1)[None]
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, seen, scale=scale)[0].transpose(0, 1)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """q [C, H, S, X], keys [C, H, K, X] -> (o [C, H, S, V], log-sum-exp float32 [C, H, S, 1])."""
    given = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    o, lse = given[0], given[1]
    return o, lse.reshape(*o.shape[:3], 1).float()


def _joined(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    (a_o, a_lse), (b_o, b_lse) = a, b
    share = torch.sigmoid(a_lse - b_lse)
    return a_o * share + b_o * (1 - share), torch.logaddexp(a_lse, b_lse)
