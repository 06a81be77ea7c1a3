# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Triton is typed by what it compiles, not by annotations.
"""The inputs of a drafter's pass (`decode/drafter_rows.py`): one program per row, float32 inside."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.cuda.layouts.tiled import PAD_K, padded


@triton.jit
def _norm_states(features, norms, y, S, D, eps, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(features + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    gamma = tl.load(norms + row % S * D + d, mask=d < D, other=0.0)
    tl.store(y + row * D + d, (x * root * gamma).to(y.dtype.element_ty), mask=d < D)


def norm_states(features_TF: Tensor, norms_SD: Tensor, eps: float) -> Tensor:
    """-> bf16 [T, S D], each state normed."""
    states, d = norms_SD.shape
    y = torch.empty_like(features_TF)
    _norm_states[(features_TF.shape[0] * states,)](
        *(features_TF, norms_SD, y, states, d, eps), BLOCK=triton.next_power_of_2(d), num_warps=8
    )
    return y


@triton.jit(do_not_specialize=["T"])
def _join_rows(ids, table, input_norm, feature, hidden_norm, finished, x, residual, T, D, X, eps,
               NORMED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The first T programs compute rows of x, the others the residual of a finished row."""
    program, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = d < D
    if program < T:
        token = tl.load(ids + program)
        e = tl.load(table + token * D + d, mask=inside, other=0.0).to(tl.float32)
        e *= tl.rsqrt(tl.sum(e * e, 0) / D + eps) * tl.load(input_norm + d, mask=inside, other=0.0)
        tl.store(x + program * X + d, e.to(x.dtype.element_ty), mask=inside)
        f = tl.load(feature + program * D + d, mask=inside, other=0.0).to(tl.float32)
        f *= tl.rsqrt(tl.sum(f * f, 0) / D + eps) * tl.load(hidden_norm + d, mask=inside, other=0.0)
        tl.store(x + program * X + D + d, f.to(x.dtype.element_ty), mask=D + d < X)
    else:
        place = program - T
        row = tl.load(finished + place).to(tl.int64)
        f = tl.load(feature + row * D + d, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            f *= tl.rsqrt(tl.sum(f * f, 0) / D + eps) * tl.load(hidden_norm + d, mask=inside, other=0.0)
        tl.store(residual + place * D + d, f, mask=inside)


def join_rows(
    ids_T: Tensor,
    table_VD: Tensor,
    input_norm_D: Tensor,
    feature_TD: Tensor,
    hidden_norm_D: Tensor,
    finished_R: Tensor,
    norm_before_residual: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """-> x bf16 [T, 2 D padded to 128 with zeros], residual float32 [R, D]."""
    (tokens, d), finished = feature_TD.shape, finished_R.shape[0]
    width = padded(2 * d, PAD_K)
    x = torch.empty(tokens, width, dtype=torch.bfloat16, device=feature_TD.device)
    residual = torch.empty(finished, d, device=feature_TD.device)
    _join_rows[(tokens + finished,)](
        *(ids_T, table_VD, input_norm_D, feature_TD, hidden_norm_D, finished_R, x, residual),
        *(tokens, d, width, eps),
        NORMED=norm_before_residual,
        BLOCK=triton.next_power_of_2(width - d),
        num_warps=8,
    )
    return x, residual
