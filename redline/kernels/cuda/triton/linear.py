# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Triton is typed by what it compiles, not by annotations.
"""y = x W^T for 9 to some hundred tokens: W is streamed once, in its tiles.        T tokens, K inputs, N outputs.

A kernel lets the next grid start at once, requests its first weights, which no kernel writes, and only then waits for
the preceding grid (`begin`). Matmuls of decode steps with their epilogues are in `dense.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from redline.kernels.cuda.chips import building
from redline.kernels.cuda.layouts.records import Slabs
from redline.kernels.cuda.layouts.tiled import TILE_N, Tiled

BLOCK_K = 128
SMS = 132  # multiprocessors of an NVIDIA H200
MOST_AT_ONCE = 64  # maximum tokens of a program that keeps all tokens of its few outputs
WIDE = 128  # tokens of a program if there are more
_LINE = 128  # bytes of a prefetch
_EARLY = 64 << 10  # bytes of weights that a program requests before the preceding grid has ended


@triton.jit
def follow(DEPENDENT: tl.constexpr):
    """Lets the next grid start, and waits for the preceding grid to end; does nothing if not DEPENDENT."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def begin(weight, first, last, K: tl.constexpr, LINES: tl.constexpr, SLABS: tl.constexpr, BLOCK_N: tl.constexpr,
          DEPENDENT: tl.constexpr):  # fmt: skip
    """As `follow`, but prefetches the program's first weights to the L2 cache before it waits.

    first: the program's first row. last: the first element of the weight's last cache line. LINES: number of 128-byte
    lines to prefetch in each row tile.
    """
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        tile = tl.arange(0, BLOCK_N // 16)[:, None]
        stride: tl.constexpr = LINES * 64 if SLABS else 16 * K  # a program's rows of a slab are contiguous
        at = (first // 16).to(tl.int64) * (16 * K) + tile * stride + tl.arange(0, LINES)[None, :] * 64
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight + tl.minimum(at, last)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        cuda.gdc_wait()


@triton.jit
def multiply(x, weight, n, t, tokens, rows, x_stride, K: tl.constexpr, SLABS: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """-> float32 [BLOCK_N, BLOCK_T]. x bf16 [T, x_stride >= K]; K as stored, a multiple of BLOCK_K; n below `rows`.

    SPLIT: number of accumulators per output, each for a part of the inputs of every iteration. Products of the same
    accumulator wait for one another; a program with few outputs and one accumulator each mostly waits.
    """
    if SLABS:
        row = (n // 64).to(tl.int64) * (64 * K) + n % 64 // 16 * 2048 + (n % 16) * 32
    else:
        row = (n // 16).to(tl.int64) * (16 * K) + (n % 16) * 32
    real_t, real_n = t < tokens, n < rows
    if SPLIT == 1:
        k = tl.arange(0, BLOCK_K)
        w_at = weight + row[:, None] + (k // 32 * 512 + k % 32)[None, :]
        x_at = x + t[None, :].to(tl.int64) * x_stride + k[:, None]
        sum_NT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for _ in range(0, K, BLOCK_K):
            w_NK = tl.load(w_at, mask=real_n[:, None], other=0.0, eviction_policy="evict_first")
            x_KT = tl.load(x_at, mask=real_t[None, :], other=0.0)
            sum_NT = tl.dot(w_NK, x_KT, sum_NT)
            w_at += BLOCK_K * 64 if SLABS else BLOCK_K * 16
            x_at += BLOCK_K
        return sum_NT
    else:
        part: tl.constexpr = BLOCK_K // SPLIT
        k_SK = tl.arange(0, SPLIT)[:, None] * part + tl.arange(0, part)[None, :]
        w_at = weight + row[None, :, None] + (k_SK // 32 * 512 + k_SK % 32)[:, None, :]
        x_at = x + t[None, None, :].to(tl.int64) * x_stride + k_SK[:, :, None]
        sum_SNT = tl.zeros((SPLIT, BLOCK_N, BLOCK_T), tl.float32)
        for _ in range(0, K, BLOCK_K):
            w_SNK = tl.load(w_at, mask=real_n[None, :, None], other=0.0, eviction_policy="evict_first")
            x_SKT = tl.load(x_at, mask=real_t[None, None, :], other=0.0)
            sum_SNT = tl.dot(w_SNK, x_SKT, sum_SNT)
            w_at += BLOCK_K * 64 if SLABS else BLOCK_K * 16
            x_at += BLOCK_K
        return tl.sum(sum_SNT, 0)


@triton.jit(do_not_specialize=["tokens"])
def _linear(x, weight, y, tokens, rows, last, x_stride, outputs, y_stride, K: tl.constexpr, LINES: tl.constexpr,
            SLABS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
            SPLIT: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """A program computes BLOCK_N outputs of BLOCK_T tokens; adjacent programs share the outputs, so also the weight."""
    first = tl.program_id(1) * BLOCK_N
    n, t = first + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    begin(weight, first, last, K, LINES, SLABS, BLOCK_N, DEPENDENT)
    sum_NT = multiply(x, weight, n, t, tokens, rows, x_stride, K, SLABS, BLOCK_N, BLOCK_K, BLOCK_T, SPLIT)
    y_at = y + t[None, :].to(tl.int64) * y_stride + n[:, None]
    tl.store(y_at, sum_NT.to(y.dtype.element_ty), mask=(t < tokens)[None, :] & (n < outputs)[:, None])


def linear(x_TK: Tensor, weight: Tiled, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """x bf16 [T, K as stored or more], zero beyond the weight's K -> y [T, N] of that dtype; any number of tokens.

    out: memory for y, optional.
    """
    y = torch.empty(x_TK.shape[0], weight.outputs, dtype=dtype, device=x_TK.device) if out is None else out
    launch(_linear, weight, x_TK, weight.outputs, (y,), (weight.outputs, y.stride(0)))
    return y


def block_rows(outputs: int, tokens: int) -> int:
    """Outputs per program: up to 64 tokens the least of 16, 32 and 64 with which all programs run at once, else 64.

    Measured on an NVIDIA H200 at Kimi's sizes: if some multiprocessors have two programs, all others wait for them.
    With more tokens programs mostly read x, so they have 128 outputs, if that leaves enough programs.
    """
    if tokens <= MOST_AT_ONCE:
        return next((rows for rows in (TILE_N, 2 * TILE_N) if outputs <= rows * SMS), 4 * TILE_N)
    return 8 * TILE_N if outputs > 4 * TILE_N * SMS // -(-tokens // WIDE) else 4 * TILE_N


class TileConfig(NamedTuple):
    """How a program iterates over its inputs."""

    inputs: int  # per iteration
    split: int = 1  # as in `multiply`
    stages: int = 5
    tokens: int = MOST_AT_ONCE  # per program
    warps: int = 4


def turns_of(inputs: int, outputs: int, tokens: int, *, slabs: bool = False) -> TileConfig:
    """Programs with few rows have little work in flight, so they take more inputs per iteration, if memory allows.

    Measured on an NVIDIA H100 at Kimi's sizes, microseconds by (inputs per iteration, split), with a floor of 6.3 and
    10.9: the gates of a rank of four, 16 rows per program, 16 tokens: 24.2 with (256, 1), 12.6 (512, 1), 10.3 (512, 4);
    32 tokens: 14.1, 13.2, 11.2. Of a rank of two, 32 rows per program, 16 tokens: 24.0, 17.1, 17.8; 32 tokens: 18.3,
    18.4, 19.3.

    More than 64 tokens, measured on an NVIDIA H200, all five matmuls of a layer together: 126 us at 128 tokens (floor
    68) and 199 at 256. At 64 tokens a time, which reads the weights two and four times, they took 190 and 349.
    """
    rows = block_rows(outputs, tokens)
    if tokens > MOST_AT_ONCE:
        if rows > 4 * TILE_N:
            turn = TileConfig(BLOCK_K // 2, stages=4, tokens=WIDE, warps=8)
            return turn._replace(inputs=BLOCK_K, stages=3) if slabs else turn  # 128 inputs of a slab are contiguous
        alone = tokens <= WIDE and 2 * -(-outputs // rows) <= SMS // 2  # few programs: two divide the tokens
        return TileConfig(BLOCK_K, stages=4, tokens=WIDE // 2 if alone else WIDE)
    block_t = 16 if tokens <= 16 else 32 if tokens <= 32 else MOST_AT_ONCE
    few = rows < 4 * TILE_N
    if few and tokens <= 32 and inputs % (4 * BLOCK_K) == 0:
        return TileConfig(4 * BLOCK_K, 4 if rows == TILE_N else 1, stages=4, tokens=block_t)
    return TileConfig(2 * BLOCK_K if few and inputs % (2 * BLOCK_K) == 0 else BLOCK_K, tokens=block_t)


def launch(
    kernel: Any,
    weight: Tiled | Slabs,
    x_TK: Tensor,
    outputs: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    beside: int = 0,
    **sizes: int,
) -> None:
    """Launches a matmul kernel over `outputs` rows, plus `beside` additional programs.

    Its arguments are x, the weight, `tensors`, T, the weight's row count, its last line, x's stride, and `numbers`.
    """
    tokens, data, slabs = x_TK.shape[0], weight.data, isinstance(weight, Slabs)
    k = data.shape[1] * 128 if slabs else data.shape[-3] * 32
    block_n, turns = block_rows(outputs, tokens), turns_of(k, outputs, tokens, slabs=slabs)
    early = min(k * 32, _EARLY * TILE_N // block_n) // _LINE
    dependent = x_TK.is_cuda or building() is not None  # not in Triton's interpreter
    run: Callable[..., object] = kernel[(triton.cdiv(tokens, turns.tokens), triton.cdiv(outputs, block_n) + beside)]
    run(
        *(x_TK, data, *tensors, tokens, data.numel() // k, data.numel() - _LINE // 2, x_TK.stride(0), *numbers),
        K=k,
        LINES=1 << (early.bit_length() - 1),
        SLABS=slabs,
        BLOCK_N=block_n,
        BLOCK_K=turns.inputs,
        BLOCK_T=turns.tokens,
        SPLIT=turns.split,
        DEPENDENT=dependent,
        num_warps=turns.warps,
        num_stages=turns.stages,
        **sizes,
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit
def _lay_out(weight, dense, outputs, inputs, K: tl.constexpr, SLABS: tl.constexpr, BLOCK_K: tl.constexpr):
    """A program copies 16 rows of BLOCK_K inputs."""
    n = tl.program_id(1) * 16 + tl.arange(0, 16)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    if SLABS:
        row = (n // 64).to(tl.int64) * (64 * K) + n % 64 // 16 * 2048 + (n % 16) * 32
        place = k // 128 * 8192 + k % 128 // 32 * 512 + k % 32
    else:
        row = (n // 16).to(tl.int64) * (16 * K) + (n % 16) * 32
        place = k // 32 * 512 + k % 32
    w_NK = tl.load(weight + row[:, None] + place[None, :], mask=(k < K)[None, :], other=0.0)
    at = n[:, None].to(tl.int64) * inputs + k[None, :]
    tl.store(dense + at, w_NK, mask=(n < outputs)[:, None] & (k < inputs)[None, :])


def laid_out(weight: Tiled | Slabs) -> Tensor:
    """[N, K] bf16: as `weight.dense()`, which takes three times as long on an NVIDIA H200."""
    slabs = isinstance(weight, Slabs)
    k = weight.data.shape[1] * 128 if slabs else weight.data.shape[-3] * 32
    dense = torch.empty(weight.outputs, weight.inputs, dtype=torch.bfloat16, device=weight.data.device)
    _lay_out[(triton.cdiv(k, 512), triton.cdiv(weight.outputs, TILE_N))](
        weight.data, dense, weight.outputs, weight.inputs, K=k, SLABS=slabs, BLOCK_K=512, num_warps=4
    )
    return dense
