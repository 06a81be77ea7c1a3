"""Quantization that minimizes the error of a layer's outputs: GPTQ (arXiv 2210.17323) on the grid of NVFP4.

The squared output error of a weight with rounding error D is tr(D M D^T), M the second moments of its inputs. Input
columns are rounded one after another, and the remaining columns compensate the output error of each, as far as their
correlations in M allow. A block's scales are chosen when its columns are reached, for the weights including the
compensation so far; each column's error is weighted by the output error left after compensation.

N outputs, K inputs, n input rows.
"""

import torch
from torch import Tensor

from redline.ops.formats import NVFP4_GROUP, NVFP4_MOST, Nvfp4
from redline.quant.nvfp4 import WIDELY_SEARCHED, Nvfp4Workspace, packed, unit_of

LEAST_DAMPING, MOST_DAMPING, DAMPING = 0.01, 3.0, 0.4  # DAMPING is multiplied by inputs / rows


def damping_of(rows: int, inputs: int) -> float:
    """The multiple of M's mean diagonal that is added to its diagonal, for a mean over `rows` rows.

    Few rows miss directions that other inputs will have, and show spurious correlations: the fewer rows, the more
    damping. Measured (`quantizers-cpu.json`) from 32 rows of 512 inputs to 8,192.
    """
    return min(max(LEAST_DAMPING, DAMPING * inputs / rows), MOST_DAMPING)


def second_moments(x_nK: Tensor) -> Tensor:
    """float32 [K, K]: the mean of x^T x over the rows."""
    x = x_nK.float()
    return x.T @ x / len(x)


def output_error(difference_NK: Tensor, moments_KK: Tensor) -> float:
    """The squared error of the outputs, mean per row, for this difference of the weights."""
    return float(((difference_NK.float() @ moments_KK) * difference_NK.float()).sum(dtype=torch.float64))


def round_gptq(weight_NK: Tensor, moments_KK: Tensor, scale: float, damping: float) -> Nvfp4:
    """Quantize a weight [N, K], K divisible by 16, under a tensor scale, for inputs with these second moments.

    damping: a result of `damping_of`.

    A column with inputs that are always zero is rounded to nearest, at no cost.
    """
    N, K = weight_NK.shape
    left = weight_NK.float().clone()  # the columns still to be rounded, including the compensation so far
    rounded = torch.empty_like(left)
    bytes_ = torch.empty(N, K // NVFP4_GROUP, dtype=torch.int32, device=left.device)
    upper = _inverse_root(moments_KK, damping)
    cost = upper.diagonal().square().reciprocal()
    part = Nvfp4Workspace(N, left.device)
    for first in range(0, K, NVFP4_GROUP):
        stop = first + NVFP4_GROUP
        block, errors = left[:, first:stop], torch.empty(N, NVFP4_GROUP, device=left.device)
        part.take(block, scale, cost[first:stop].expand(N, -1))
        byte, _, _ = part.search(WIDELY_SEARCHED)
        bytes_[:, first // NVFP4_GROUP] = byte
        unit = unit_of(byte) * scale
        for place in range(NVFP4_GROUP):
            column = first + place
            w = block[:, place]
            value = nearest(w.abs() / unit) * unit * w.sign()
            rounded[:, column] = value
            error = (w - value) / upper[column, column]
            errors[:, place] = error
            block[:, place + 1 :] -= error[:, None] * upper[column, column + 1 : stop]
        left[:, stop:] -= errors @ upper[first:stop, stop:]
    return packed(rounded, scale, bytes_)


def nearest(y: Tensor) -> Tensor:
    """The nearest e2m1 number of non-negative values; ties to even."""
    step = (y.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(1, 4).mul_(0.75 * 2**23)
    return (y + step).sub_(step).clamp_(max=NVFP4_MOST)


def _inverse_root(moments: Tensor, damping: float) -> Tensor:
    """Upper triangular U with U^T U = the inverse of the damped moments, float32 [K, K].

    Row k divided by its diagonal gives the compensation of an error in column k by the columns after k; the diagonal
    gives the error that is left.
    """
    damped = moments.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += damping * diagonal.mean()
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
