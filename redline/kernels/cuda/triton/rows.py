# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Triton is typed by what it compiles, not by annotations.
"""Row-wise ops between two matmuls: norms, rotations, SwiGLU, and writing a row to its page.

One program per token (or per head of a token), float32 inside.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.cuda.layouts.tiled import PAD_K, padded
from redline.messages.job import PAGE_TOKENS


@triton.jit
def _add_norm(residual, partial, gamma, y, D, y_stride, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    r = tl.load(residual + token * D + d, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        r += tl.load(partial + token * D + d, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + token * D + d, r.to(residual.dtype.element_ty), mask=inside)
    root = tl.rsqrt(tl.sum(r * r, 0) / D + eps)
    g = tl.load(gamma + d, mask=inside, other=0.0)
    tl.store(y + token * y_stride + d, (r * root * g).to(y.dtype.element_ty), mask=d < y_stride)


def add_norm(residual_TD: Tensor, partial_TD: Tensor | None, gamma_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`norm_rows`: -> (the residual, changed in place; normed bf16 [T, D padded to 128 with zeros])."""
    tokens, d = residual_TD.shape
    y = torch.empty(tokens, padded(d, PAD_K), dtype=torch.bfloat16, device=residual_TD.device)
    given = residual_TD if partial_TD is None else partial_TD
    _add_norm[(tokens,)](
        *(residual_TD, given, gamma_D, y, d, y.shape[1], eps),
        ADD=partial_TD is not None,
        BLOCK=triton.next_power_of_2(y.shape[1]),
        num_warps=8,
    )
    return residual_TD, y


@triton.jit
def as_stored(x, plane):
    """x in the dtype of a page; e4m3 saturates, and NaN stays NaN."""
    if plane.dtype.element_ty == tl.float8e4nv:
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    return x.to(plane.dtype.element_ty)


@triton.jit
def _split_a(
    a, q_gamma, kv_gamma, cos, sin, rows, q, plane, RQ, Q_STRIDE, eps, A_STRIDE, page_stride,
    PAGE: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BLOCK_Q: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = a + token * A_STRIDE
    i = tl.arange(0, BLOCK_Q)
    value = tl.load(at + i, mask=i < RQ, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / RQ + eps)
    gamma = tl.load(q_gamma + i, mask=i < RQ, other=0.0)
    tl.store(q + token * Q_STRIDE + i, (value * gamma).to(q.dtype.element_ty), mask=i < Q_STRIDE)
    row = tl.load(rows + token)
    place = plane + row // PAGE * page_stride + row % PAGE * (R + P)
    r = tl.arange(0, R)
    latent = tl.load(at + RQ + r).to(tl.float32)
    latent *= tl.rsqrt(tl.sum(latent * latent, 0) / R + eps) * tl.load(kv_gamma + r)
    tl.store(place + r, as_stored(latent, plane))
    p = tl.arange(0, HALF)
    even = tl.load(at + RQ + R + 2 * p, mask=2 * p < P, other=0.0).to(tl.float32)
    odd = tl.load(at + RQ + R + 2 * p + 1, mask=2 * p < P, other=0.0).to(tl.float32)
    c = tl.load(cos + token * (P // 2) + p, mask=2 * p < P, other=0.0)
    s = tl.load(sin + token * (P // 2) + p, mask=2 * p < P, other=0.0)
    tl.store(place + R + 2 * p, as_stored(even * c - odd * s, plane), mask=2 * p < P)
    tl.store(place + R + 2 * p + 1, as_stored(even * s + odd * c, plane), mask=2 * p < P)


def split_a(
    a_TA: Tensor, q_gamma: Tensor, kv_gamma: Tensor, cos: Tensor, sin: Tensor, rows_T: Tensor, plane: Tensor, eps: float
) -> Tensor:
    """a [T, Rq + R + P], the product with W_a -> q_a bf16 [T, Rq padded to 128], normed; also writes the page rows.

    R a power of two.
    """
    tokens, rq, r = a_TA.shape[0], q_gamma.shape[0], kv_gamma.shape[0]
    p = plane.shape[-1] - r
    q = torch.empty(tokens, padded(rq, PAD_K), dtype=torch.bfloat16, device=a_TA.device)
    _split_a[(tokens,)](
        *(a_TA, q_gamma, kv_gamma, cos, sin, rows_T, q, plane, rq, q.shape[1], eps, a_TA.stride(0), plane.stride(0)),
        PAGE=PAGE_TOKENS,
        R=r,
        P=p,
        BLOCK_Q=triton.next_power_of_2(q.shape[1]),
        HALF=triton.next_power_of_2(p // 2),
    )
    return q


@triton.jit
def _rotate(q, cos, sin, heads, N, P, HALF: tl.constexpr, HEADS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    p = tl.arange(0, HALF)[None, :]
    inside = (h < heads) & (2 * p < P)
    at = q + token * heads * (N + P) + h * (N + P) + N + 2 * p
    even = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * (P // 2) + p, mask=2 * p < P, other=0.0)
    s = tl.load(sin + token * (P // 2) + p, mask=2 * p < P, other=0.0)
    tl.store(at, (even * c - odd * s).to(q.dtype.element_ty), mask=inside)
    tl.store(at + 1, (even * s + odd * c).to(q.dtype.element_ty), mask=inside)


def rotate_heads(q_THX: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the last P of each head by its token's angles, in place. q bf16 [T, H, N + P]; cos, sin [T, P / 2]."""
    tokens, heads, width = q_THX.shape
    p = 2 * cos.shape[1]
    sizes = {"HALF": triton.next_power_of_2(p // 2), "HEADS": triton.next_power_of_2(heads)}
    _rotate[(tokens,)](q_THX, cos, sin, heads, width - p, p, **sizes)
    return q_THX


@triton.jit
def _swiglu(gates, h, width, G_STRIDE, FIRST, H_STRIDE, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = gates + token * G_STRIDE + FIRST + i // 8 * 16 + i % 8
    gate = tl.load(at, mask=i < width, other=0.0).to(tl.float32)
    up = tl.load(at + 8, mask=i < width, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(h + token * H_STRIDE + i, y.to(h.dtype.element_ty), mask=i < H_STRIDE)


def swiglu(gates_TG: Tensor, first: int, width: int) -> Tensor:
    """silu(gate) * up of the product with a `gates` weight: from column `first` on, 8 gates, their 8 ups, and so on.

    -> bf16 [T, width padded to 128 with zeros]
    """
    tokens = gates_TG.shape[0]
    h = torch.empty(tokens, padded(width, PAD_K), dtype=torch.bfloat16, device=gates_TG.device)
    block = min(1024, triton.next_power_of_2(h.shape[1]))
    _swiglu[(tokens, triton.cdiv(h.shape[1], block))](
        gates_TG, h, width, gates_TG.stride(0), first, h.shape[1], BLOCK=block
    )
    return h
