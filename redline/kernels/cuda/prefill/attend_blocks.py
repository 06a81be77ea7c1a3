"""Causal attention of blocks of prompt tokens to unfolded contexts.    T tokens, H heads, N + P key, V value, R rows.

In Triton on a GPU (`triton/chunks.py`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.layouts.tiled import padded
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

BLOCK = 128  # tokens of a block, at most
# Contexts begin at multiples of this number of rows, and are filled up to it: a kernel multiplies the rows behind a
# context by zero, which an infinity of another request would survive.
ROWS = 64


class AttendBlocksArgs(NamedTuple):
    """A block is `count` neighbouring tokens, of which each sees one context row more than the one before it."""

    q_THX: Tensor  # bf16 [T, H, N + P], the last P of each head rotated
    keys_RHN: Tensor  # bf16 [R, H, N]: of the contexts' rows
    ropes_RP: Tensor  # bf16 [R, P], rows of any stride: the part of the keys that all heads share
    values_RHV: Tensor  # bf16 [R, H, V]
    blocks_B4: Tensor  # int32 [B, 4]: first token, count, first row of its context, rows that its first token sees
    scale: float
    out_THV: Tensor  # bf16 [T, H, V]: written at the blocks' tokens


def _reference(args: AttendBlocksArgs) -> None:
    """Float32 inside."""
    for first, count, row, seen in args.blocks_B4.tolist():
        tokens, rows = slice(first, first + count), slice(row, row + seen + count - 1)
        keys, ropes, values = (x[rows].float() for x in (args.keys_RHN, args.ropes_RP, args.values_RHV))
        q, nope = args.q_THX[tokens].float().transpose(0, 1), keys.shape[2]
        scores = q[..., :nope] @ keys.permute(1, 2, 0) + q[..., nope:] @ ropes.T
        place = torch.arange(seen + count - 1, device=q.device)
        hidden = place >= seen + torch.arange(count, device=q.device)[:, None]
        weights = (scores * args.scale).masked_fill(hidden, -torch.inf).softmax(-1)
        args.out_THV[tokens] = (weights @ values.transpose(0, 1)).transpose(0, 1).to(args.out_THV.dtype)


def _cuda(args: AttendBlocksArgs) -> None:
    from redline.kernels.cuda.triton import chunks

    chunks.attend_blocks(*args, block=BLOCK)


def _fits(args: AttendBlocksArgs) -> bool:
    """Whether all tensors are bf16, and their widths powers of two from 16 on."""
    widths = args.keys_RHN.shape[2], args.ropes_RP.shape[1], args.values_RHV.shape[2]
    dtypes = {x.dtype for x in (args.q_THX, args.keys_RHN, args.ropes_RP, args.values_RHV, args.out_THV)}
    return dtypes == {torch.bfloat16} and all(width >= 16 and width.bit_count() == 1 for width in widths)


def _cost(args: AttendBlocksArgs) -> Cost:
    heads, width = args.q_THX.shape[1], args.q_THX.shape[2] + args.values_RHV.shape[2]
    pairs = sum(count * seen + count * (count - 1) // 2 for _, count, _, seen in args.blocks_B4.tolist())
    read = sum(x.nbytes for x in (args.q_THX, args.keys_RHN, args.values_RHV, args.out_THV))
    return Cost(read + args.ropes_RP.numel() * 2, 2 * heads * pairs * width)


def _cases() -> Iterator[Case]:
    def make(spans: tuple[tuple[int, int], ...], heads: int, nope: int, rope: int, value: int):
        """spans: tokens before a chunk, and its tokens."""

        def inputs(g: torch.Generator) -> AttendBlocksArgs:
            rows, tokens, blocks = 0, 0, list[tuple[int, int, int, int]]()
            for start, count in spans:
                for place in range(0, count, BLOCK):
                    blocks.append((tokens + place, min(BLOCK, count - place), rows, start + place + 1))
                rows, tokens = rows + padded(start + count, ROWS), tokens + count
            q, keys, values, cache = (
                torch.randn(*of, generator=g).bfloat16()
                for of in ((tokens, heads, nope + rope), (rows, heads, nope), (rows, heads, value), (rows, 64 + rope))
            )
            out = torch.full((tokens, heads, value), 7.0).bfloat16()
            scale = (nope + rope) ** -0.5
            ropes = cache[:, 64:]
            return AttendBlocksArgs(q, keys, ropes, values, torch.tensor(blocks, dtype=torch.int32), scale, out)

        return inputs

    yield Case("one token alone", make(((0, 1),), 2, 32, 32, 32))
    yield Case("two prompts, one behind a prefix", make(((0, 130), (67, 3)), 2, 16, 16, 32))
    yield Case("nano, behind a prefix", make(((200, 150),), 4, 128, 64, 128))
    yield Case("Kimi, four chunks", make(((0, 700), (5000, 300), (64, 64), (1, 1)), 64, 128, 64, 128), small=False)


attend_blocks = Kernel(
    Op("attend_blocks", AttendBlocksArgs, _reference, _cost, _cases, roundings=1, writes=("out_THV",)),
    _cuda,
    "cuda",
    _fits,
)
