"""Quantization to INT4: 15 steps and a bf16 scale for each group of 32 (`ops.formats.Int4`).

The minmax rule, from compressed-tensors, maps the largest weight to 7.5 steps. The search also tries 7 and 8, one of
which is exact if the weight was INT4 before, and larger numbers, which clip the largest weights and round all others
more finely. The scale with the least squared error wins, and is then fitted to its codes by least squares: without
that, the scale of a weight that was INT4 and then bf16 is often off by one bf16 number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.ops.formats import INT4_GROUP, Int4, int4_scale
from redline.quant.nvfp4 import Error

MINMAX = ()
SEARCHED = (7.0, 8.0, 7.7, 7.9, 8.1, 8.3, 8.6, 8.8, 9.1, 9.4)
ROWS = 256  # processed together


def round_int4(weight_NK: Tensor, steps: Sequence[float]) -> tuple[Int4, Error]:
    """Quantize a weight [N, K] of any float dtype, K divisible by 32.

    steps: numbers of steps to which a group's largest weight is mapped, each tried after the minmax rule's 7.5.
    """
    parts = [_rows(rows, steps) for rows in weight_NK.split(ROWS)]
    packed, scale = (torch.cat([part[0][at] for part in parts]) for at in (0, 1))
    sums = [part[1] for part in parts]
    error = Error(
        squared=sum(one.squared for one in sums),
        weight_squared=sum(one.weight_squared for one in sums),
        largest=max(one.largest for one in sums),
        max_scaling=sum(one.max_scaling for one in sums),
    )
    return Int4(packed, scale), error


def _rows(weight: Tensor, steps: Sequence[float]) -> tuple[tuple[Tensor, Tensor], Error]:
    weight = weight.float()
    groups = weight.unflatten(-1, (-1, INT4_GROUP))
    best_scale = int4_scale(weight)
    best = _squared(groups, best_scale)
    plain = float(best.sum(dtype=torch.float64))
    for count in steps:
        best_scale, best = _better(groups, int4_scale(weight, count), best_scale, best)
    if steps:
        q = _codes(groups, best_scale)
        fitted = ((q * groups).sum(-1) / q.square().sum(-1)).to(torch.bfloat16)
        best_scale, best = _better(groups, fitted, best_scale, best)
    q = _codes(groups, best_scale)
    u = (q.flatten(-2).to(torch.int32) + 8).unflatten(-1, (-1, 8))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
    packed = (u << shifts).sum(-1, dtype=torch.int32)
    error = Error(
        squared=float(best.sum(dtype=torch.float64)),
        weight_squared=float(groups.square().sum(dtype=torch.float64)),
        largest=float((q * best_scale.float()[..., None] - groups).abs().max()),
        max_scaling=plain,
    )
    return (packed, best_scale), error


def _codes(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale.float()[..., None]).round_().clamp_(-8, 7)


def _squared(groups: Tensor, scale: Tensor) -> Tensor:
    """The squared error of each group; NaN if the scale is NaN."""
    return _codes(groups, scale).mul_(scale.float()[..., None]).sub_(groups).square_().sum(-1)


def _better(groups: Tensor, scale: Tensor, best_scale: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    squared = _squared(groups, scale)
    better = squared < best
    return torch.where(better, scale, best_scale), torch.where(better, squared, best)
