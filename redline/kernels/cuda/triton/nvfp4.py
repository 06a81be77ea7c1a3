# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Triton is typed by what it compiles, not by annotations.
"""Quantises weights to NVFP4 on a GPU, and dequantises INT4; each weight is read once and kept in registers.

`quant.nvfp4.Nvfp4Workspace` defines a block's scale and codes; the results are equal except for the order of sums.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops.formats import INT4_GROUP, NVFP4_GROUP, Int4

BLOCKS, TURNS, WARPS = 64, 4, 4  # blocks of 16 weights that a program processes at once, and number of iterations
WORDS = 1024  # words of 8 codes that a program unpacks


@triton.jit
def _unit(byte):
    # The e4m3 value of a positive byte: its bits are used as float32 bits; the factor corrects the exponent's bias.
    return (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def _byte(x):
    # The nearest e4m3 of 0 <= x <= 448, ties to even. Below 2^-6 the spacing is 2^-9.
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = ((x * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    return tl.where(x < 0.015625, small, normal)


@triton.jit
def _nearest(y):
    # The nearest e2m1 of y >= 0: steps of 1/2 up to 2, of 1 to 4, of 2 to 6. `Nvfp4Workspace._nearest` explains it.
    step = (y.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.minimum(tl.maximum(step, 1.0), 4.0) * 6291456.0
    return tl.minimum((y + step) - step, 6.0)


@triton.jit(do_not_specialize=["scale", "tried"])
def _round(
    weights,
    scale,
    codes,
    scales,
    sums,
    count,
    tried,
    TRIED: tl.constexpr,
    EXACT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    TURNS: tl.constexpr,
):
    # EXACT: scale is a power of two, so that multiplying by 1 / scale equals dividing by scale.
    tried = tried.to(tl.int64)
    nothing = tl.zeros([BLOCKS], tl.float32)
    sum_best, sum_plain, sum_squares, farthest = nothing, nothing, nothing, nothing
    for turn in range(TURNS):
        block = (tl.program_id(0).to(tl.int64) * TURNS + turn) * BLOCKS + tl.arange(0, BLOCKS)
        there = block < count
        place = block[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        weight = tl.load(weights + place, mask=there[:, None], other=0.0).to(tl.float32)
        w = tl.abs(weight) * (1.0 / scale) if EXACT else tl.div_rn(tl.abs(weight), tl.zeros_like(weight) + scale)
        middle = _byte(tl.minimum(tl.div_rn(tl.max(w, 1), nothing + 6.0), 448.0))
        best_byte = tl.maximum(middle, 1)
        best = nothing + float("inf")
        plain = best
        for number in tl.static_range(TRIED):
            distance = ((tried >> (4 * number)) & 15).to(tl.int32) - 8
            byte = tl.minimum(tl.maximum(middle + distance, 1), 126)
            unit = _unit(byte)
            y = w * tl.div_rn(nothing + 1.0, unit)[:, None]
            error = _nearest(y) - y
            squared = tl.sum(error * error, 1) * unit * unit
            if number == 0:
                plain = squared
            better = squared < best
            best_byte = tl.where(better, byte, best_byte)
            best = tl.where(better, squared, best)
        unit = _unit(best_byte)
        y = tl.div_rn(w, tl.zeros_like(w) + unit[:, None])
        value = _nearest(y)
        # From 1 on a code counts exponent and first fraction bit; below 1, halves.
        code = tl.maximum((value.to(tl.int32, bitcast=True) >> 22) - 252, tl.minimum(value * 2.0, 1.0).to(tl.int32))
        code = code | ((weight.to(tl.int32, bitcast=True) >> 28) & 8)
        low, high = tl.split(tl.reshape(code, [BLOCKS, GROUP // 2, 2]))
        at = block[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        tl.store(codes + at, (low | (high << 4)).to(tl.uint8), mask=there[:, None])
        tl.store(scales + block, best_byte.to(tl.uint8), mask=there)
        sum_best += tl.where(there, best, 0.0)
        sum_plain += tl.where(there, plain, 0.0)
        sum_squares += tl.sum(w * w, 1)
        farthest = tl.maximum(farthest, tl.max(tl.abs(y - value), 1) * unit)
    own, all = sums + tl.program_id(0), tl.num_programs(0)
    tl.store(own, tl.sum(sum_best, 0))
    tl.store(own + all, tl.sum(sum_squares, 0))
    tl.store(own + 2 * all, tl.sum(sum_plain, 0))
    tl.store(own + 3 * all, tl.max(farthest, 0))


def round_nvfp4(weight_NK: Tensor, scale: float, offsets: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises a weight [N, K] of any float dtype under a tensor scale, trying the given offsets of the scale bytes.

    As `quant.nvfp4.round_nvfp4`. -> (codes uint8 [N, K / 2], e4m3 bytes uint8 [N, K / 16], input of `totals`). Does not
    wait for the GPU.
    """
    N, K = weight_NK.shape
    weight = weight_NK.contiguous()
    count, device = weight.numel() // NVFP4_GROUP, weight.device
    codes = torch.empty(N, K // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(N, K // NVFP4_GROUP, dtype=torch.uint8, device=device)
    programs = triton.cdiv(count, BLOCKS * TURNS)
    sums = torch.empty(4, programs, device=device)
    distances = (0, *(one for one in offsets if one))
    tried = sum(one + 8 << 4 * at for at, one in enumerate(distances))  # 4 bits each, -8 to 7
    with torch.cuda.device_of(weight):
        _round[(programs,)](
            weight,
            scale,
            codes,
            scales,
            sums,
            count,
            tried,
            TRIED=len(distances),
            EXACT=math.frexp(scale)[0] == 0.5,
            GROUP=NVFP4_GROUP,
            BLOCKS=BLOCKS,
            TURNS=TURNS,
            num_warps=WARPS,
            enable_fp_fusion=False,  # a product is rounded before the addition, as in the reference
        )
    return codes, scales, sums


def totals(sums: Tensor) -> list[float]:
    """Totals over the whole weight of each program's sums: [the squared error, the weights' squares, max scaling's
    squared error, the largest error], all divided by the tensor scale. Waits for the GPU."""
    told = sums.cpu().numpy()
    return [*told[:3].sum(1, dtype=np.float64).tolist(), float(told[3].max())]


@triton.jit
def _unpack(packed, scale, out, count, WORDS: tl.constexpr, GROUP: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    there = word < count
    codes = tl.load(packed + word, mask=there, other=0)
    unit = tl.load(scale + word // (GROUP // 8), mask=there, other=0.0).to(tl.float32)
    at = tl.arange(0, 8)
    value = (((codes[:, None] >> (4 * at)[None, :]) & 15) - 8).to(tl.float32) * unit[:, None]
    tl.store(out + word[:, None] * 8 + at[None, :], value, mask=there[:, None])


def dequantize_int4(weight: Int4) -> Tensor:
    """`Int4.dequantize`: float32 [..., N, K], bit for bit."""
    out = torch.empty(weight.shape, device=weight.packed.device)
    packed, scale = weight.packed.contiguous(), weight.scale.contiguous()
    with torch.cuda.device_of(packed):
        _unpack[(triton.cdiv(packed.numel(), WORDS),)](
            packed, scale, out, packed.numel(), WORDS=WORDS, GROUP=INT4_GROUP, num_warps=4
        )
    return out
