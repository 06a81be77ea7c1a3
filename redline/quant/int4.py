"""Weights to INT4: 15 steps and a bf16 scale for each group of 32 (`ops.formats.Int4`).

The minmax rule, as compressed-tensors has it, maps the largest weight to 7.5 steps. Searching also tries smaller
scales, which cut the largest weights off and round all others finer, and keeps what has the least squared error.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.ops.formats import INT4_GROUP, Int4, int4_scale
from redline.quant.nvfp4 import Error

MINMAX = (1.0,)
SEARCHED = (1.0, 15 / 16, 0.975, 0.95, 0.925, 0.9, 0.875, 0.85, 0.825, 0.8)  # 15 / 16: the largest is code 8 or -8
ROWS = 256  # worked on together


def round_int4(weight_NK: Tensor, factors: Sequence[float]) -> tuple[Int4, Error]:
    """A weight [N, K] of any float dtype, K divisible by 32. factors: of the minmax scale, which are tried.

    The first factor must be 1.
    """
    parts = [_rows(rows, factors) for rows in weight_NK.split(ROWS)]
    packed, scale = (torch.cat([part[0][at] for part in parts]) for at in (0, 1))
    sums = [part[1] for part in parts]
    error = Error(
        squared=sum(one.squared for one in sums),
        weight_squared=sum(one.weight_squared for one in sums),
        largest=max(one.largest for one in sums),
        max_scaling=sum(one.max_scaling for one in sums),
    )
    return Int4(packed, scale), error


def _rows(weight: Tensor, factors: Sequence[float]) -> tuple[tuple[Tensor, Tensor], Error]:
    groups = weight.float().unflatten(-1, (-1, INT4_GROUP))
    minmax = int4_scale(weight)
    best_scale, best, plain = minmax, torch.empty(0), 0.0
    for number, factor in enumerate(factors):
        scale = (minmax.float() * factor).to(torch.bfloat16)
        unit = scale.float()[..., None]
        squared = ((groups / unit).round_().clamp_(-8, 7).mul_(unit).sub_(groups)).square_().sum(-1)
        if not number:
            best, plain = squared, float(squared.sum(dtype=torch.float64))
            continue
        better = squared < best
        best_scale, best = torch.where(better, scale, best_scale), torch.where(better, squared, best)
    unit = best_scale.float()[..., None]
    q = (groups / unit).round_().clamp_(-8, 7)
    u = (q.flatten(-2).to(torch.int32) + 8).unflatten(-1, (-1, 8))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
    packed = (u << shifts).sum(-1, dtype=torch.int32)
    error = Error(
        squared=float(best.sum(dtype=torch.float64)),
        weight_squared=float(groups.square().sum(dtype=torch.float64)),
        largest=float((q * unit - groups).abs().max()),
        max_scaling=plain,
    )
    return (packed, best_scale), error
