# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Triton is typed by what it compiles, not by annotations.
"""The checksum of bytes: every program sums a part of the words, and adds that to the total, in any order."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops.checksum import FIRST, GAMMA, SECOND, mix, signed

BLOCK = 1024  # words that a program mixes at once
TURNS = 8  # blocks per program: 64 KiB, so that a chunk of 4.5 MB has enough programs for half of an H200

_GAMMA = tl.constexpr(signed(GAMMA))
_FIRST = tl.constexpr(signed(FIRST))
_SECOND = tl.constexpr(signed(SECOND))


@triton.jit
def _mix(x):
    # A right shift of a signed number copies its sign bit, which the masks remove.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _add_up(data, out, count, key, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    words = data.to(tl.pointer_type(tl.int64))
    whole = count // 8
    total = tl.zeros([BLOCK], tl.int64)
    for turn in range(TURNS):
        i = (tl.program_id(0).to(tl.int64) * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words + i, mask=i < whole, other=0)
        total += tl.where(i < whole, _mix(word ^ (key + (i + 1) * _GAMMA)), 0)
    if tl.program_id(0) == 0:
        b = tl.arange(0, 8).to(tl.int64)
        byte = tl.load(data + whole * 8 + b, mask=b < count % 8, other=0).to(tl.int64)
        rest = tl.sum(byte << (b * 8), 0)
        first = _mix(count ^ key)
        last = tl.where(count % 8 > 0, _mix(rest ^ (key + (whole + 1) * _GAMMA)), 0)
        tl.atomic_add(out, first + last)
    tl.atomic_add(out, tl.sum(total, 0))


@triton.jit(do_not_specialize=["count", "key"])  # avoids a separate specialisation for the value 1
def _checksum(data, out, count, key, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    _add_up(data, out, count.to(tl.int64), key.to(tl.int64), BLOCK, TURNS)


@triton.jit(do_not_specialize=["count"])
def _checksums(data, out, keys, count, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    row, count = tl.program_id(1).to(tl.int64), count.to(tl.int64)
    _add_up(data + row * count, out + row, count, tl.load(keys + row), BLOCK, TURNS)


def checksum(data_N: Tensor, seed: int) -> Tensor:
    """`ops.checksum` -> int64 []. The bytes begin at a word boundary."""
    out = torch.zeros((), dtype=torch.int64, device=data_N.device)
    count = data_N.numel()
    programs = max(1, triton.cdiv(count // 8, BLOCK * TURNS))
    _checksum[(programs,)](data_N, out, count, signed(mix(seed)), BLOCK=BLOCK, TURNS=TURNS, num_warps=8)
    return out


def checksums(data_RN: Tensor, seeds: Sequence[int]) -> Tensor:
    """`ops.checksums` -> int64 [R]. Each row begins and ends at a word boundary."""
    rows, count = data_RN.shape
    keys_R = torch.tensor([signed(mix(seed)) for seed in seeds], dtype=torch.int64)
    if data_RN.is_cuda:  # queued on the stream, without synchronising
        keys_R = keys_R.pin_memory().to(data_RN.device, non_blocking=True)
    out_R = torch.zeros(rows, dtype=torch.int64, device=data_RN.device)
    programs = max(1, triton.cdiv(count // 8, BLOCK * TURNS)), rows
    _checksums[programs](data_RN, out_R, keys_R, count, BLOCK=BLOCK, TURNS=TURNS, num_warps=8)
    return out_R
