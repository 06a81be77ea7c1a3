# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Triton is typed by what it compiles, not by annotations.
"""Logits of more than 8 rows with an 8-bit head (`decode.head`): integers are converted to bf16, exactly, on load."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.cuda.layouts.tiled import TILE_K_8, TILE_N, Tiled8

BLOCK_K = 128


@triton.jit(do_not_specialize=["tokens"])
def _head_8(x, weight, scales, y, tokens, outputs, K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """A program computes BLOCK_N outputs of BLOCK_T tokens. x bf16 [T, K], K as stored."""
    n, t = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    real_n, real_t = n < outputs, t < tokens
    row = (n // TILE_N).to(tl.int64) * (TILE_N * K) + n % TILE_N * TILE_K
    w_at = weight + row[:, None] + (k // TILE_K * (TILE_N * TILE_K) + k % TILE_K)[None, :]
    x_at = x + t[None, :].to(tl.int64) * K + k[:, None]
    sum_NT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for _ in range(0, K, BLOCK_K):
        w_NK = tl.load(w_at, mask=real_n[:, None], other=0, eviction_policy="evict_first")
        x_KT = tl.load(x_at, mask=real_t[None, :], other=0.0)
        sum_NT = tl.dot(w_NK.to(tl.bfloat16), x_KT, sum_NT)
        w_at += BLOCK_K * TILE_N
        x_at += BLOCK_K
    sum_NT *= tl.load(scales + n, mask=real_n, other=0.0)[:, None]
    y_at = y + t[None, :].to(tl.int64) * outputs + n[:, None]
    tl.store(y_at, sum_NT, mask=real_t[None, :] & real_n[:, None])


def head_8(x_TK: Tensor, w: Tiled8) -> Tensor:
    """x bf16 [T, K as stored] -> logits float32 [T, N]; any number of tokens."""
    tokens, k = x_TK.shape
    y = torch.empty(tokens, w.outputs, device=x_TK.device)
    block_n, block_t = block_rows(w.outputs), 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    _head_8[(triton.cdiv(tokens, block_t), triton.cdiv(w.outputs, block_n))](
        *(x_TK, w.data, w.scales, y, tokens, w.outputs),
        K=k,
        TILE_N=TILE_N,
        TILE_K=TILE_K_8,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K,
        BLOCK_T=block_t,
        num_warps=4,
        num_stages=6,
    )
    return y


def block_rows(outputs: int) -> int:
    """Outputs per program."""
    return 64 if outputs >= 4096 else TILE_N
