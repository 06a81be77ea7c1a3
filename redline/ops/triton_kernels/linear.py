# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Triton is typed by what it compiles, not by annotations.
"""y = x W^T for 9 to some hundred tokens: W streams once, in its tiles.        T tokens, K inputs, N outputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops.tiled import Tiled


@triton.jit
def _linear(
    x,
    weight,
    y,
    tokens,
    x_stride,
    outputs,
    y_stride,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A program: BLOCK_N outputs of BLOCK_T tokens. x bf16 [T, x_stride >= K]; K as stored, a multiple of BLOCK_K."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    rows = (n // 16).to(tl.int64) * (16 * K) + (n % 16) * 32
    w_at = weight + rows[:, None] + (k // 32 * 512 + k % 32)[None, :]
    x_at = x + t[None, :].to(tl.int64) * x_stride + k[:, None]
    real_t = (t < tokens)[None, :]
    real_n = (n < (outputs + 15) // 16 * 16)[:, None]
    sum_NT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for _ in range(0, K, BLOCK_K):
        w_NK = tl.load(w_at, mask=real_n, other=0.0, eviction_policy="evict_first")
        x_KT = tl.load(x_at, mask=real_t, other=0.0)
        sum_NT = tl.dot(w_NK, x_KT, sum_NT)
        w_at += BLOCK_K * 16
        x_at += BLOCK_K
    y_at = y + t[None, :].to(tl.int64) * y_stride + n[:, None]
    tl.store(y_at, sum_NT.to(y.dtype.element_ty), mask=real_t & (n < outputs)[:, None])


def linear(x_TK: Tensor, weight: Tiled, dtype: torch.dtype) -> Tensor:
    """x bf16 [T, at least K as stored], zero beyond K -> [T, N]."""
    tokens, k = x_TK.shape[0], weight.data.shape[-3] * 32
    y = torch.empty(tokens, weight.outputs, dtype=dtype, device=x_TK.device)
    block_n, block_t = blocks(tokens, weight.outputs)
    grid = (triton.cdiv(weight.outputs, block_n), triton.cdiv(tokens, block_t))
    _linear[grid](
        *(x_TK, weight.data, y, tokens, x_TK.stride(0), weight.outputs, y.stride(0)),
        K=k,
        BLOCK_N=block_n,
        BLOCK_K=128,
        BLOCK_T=block_t,
        num_warps=4,
        num_stages=5,
    )
    return y


def blocks(tokens: int, outputs: int) -> tuple[int, int]:
    """Outputs and tokens of a program: the fastest of 16 to 128 outputs on an NVIDIA H200 at Kimi's sizes; for W_a, one
    row of tiles fills the chip's 132 multiprocessors just so."""
    return 64 if outputs >= 4096 else 16, 16 if tokens <= 16 else 32 if tokens <= 32 else 64
