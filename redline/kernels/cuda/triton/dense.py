# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Triton is typed by what it compiles, not by annotations.
"""Dense matmuls of a decode step of 9 to 256 tokens, each with its epilogue: one launch per op (`decode.dense`).

A program computes some outputs of up to 128 tokens, float32 [BLOCK_N, BLOCK_T], and their epilogue: division by the
rms, rotation, SwiGLU or the addition of the residual. The epilogue's inputs are requested before the weights stream,
and the first weights before the preceding kernel has ended (`linear.begin`).

Arguments that depend on the number of tokens are not specialised: Triton would compile a kernel again for one token and
for multiples of 16, and the first prompt of such a length would wait for seconds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.cuda.layouts.records import Slabs
from redline.kernels.cuda.layouts.tiled import PAD_K, TILE_N, Tiled, padded
from redline.kernels.cuda.triton.linear import begin, block_rows, follow, launch, multiply
from redline.messages.job import PAGE_TOKENS

_AT_ONCE = tl.constexpr(32)  # parts of squares that a program loads at a time


@triton.jit
def _rstd(squares, t, tokens, parts, stride, inputs, eps, PARTS: tl.constexpr, BLOCK_T: tl.constexpr):
    """1 / rms of each token. squares float32 [parts, stride]; PARTS is at least `parts`."""
    sum_PT, stride = tl.zeros((_AT_ONCE, BLOCK_T), tl.float32), tl.multiple_of(stride, 8)
    for first in tl.static_range(0, PARTS, _AT_ONCE):
        part = first + tl.arange(0, _AT_ONCE)
        inside = (part < parts)[:, None] & (t < tokens)[None, :]
        sum_PT += tl.load(squares + part[:, None] * stride + t[None, :], mask=inside, other=0.0)
    return tl.rsqrt(tl.sum(sum_PT, 0) / inputs + eps)


@triton.jit(do_not_specialize=["tokens", "parts", "stride"])
def _project_a(
    x, weight, squares, gamma, q, squares_out, kv, tokens, rows, last, x_stride,
    parts, stride, inputs, eps, outputs, rank_q, q_stride,
    K: tl.constexpr, LINES: tl.constexpr, SLABS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr, SPLIT: tl.constexpr, DEPENDENT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_N
    n, t = first + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    begin(weight, first, last, K, LINES, SLABS, BLOCK_N, DEPENDENT)
    gamma_N = tl.load(gamma + n, mask=n < rank_q, other=0.0)
    rstd_T = _rstd(squares, t, tokens, parts, stride, inputs, eps, PARTS, BLOCK_T)
    y_NT = (
        multiply(x, weight, n, t, tokens, rows, x_stride, K, SLABS, BLOCK_N, BLOCK_K, BLOCK_T, SPLIT) * rstd_T[None, :]
    )
    real = (t < tokens)[None, :]
    query = (n < rank_q)[:, None]
    q_NT = tl.where(query, y_NT * gamma_N[:, None], 0.0).to(tl.bfloat16)
    tl.store(q + t[None, :] * q_stride + n[:, None], q_NT, mask=real & (n < q_stride)[:, None])
    kv_at = kv + t[None, :] * (outputs - rank_q) + (n - rank_q)[:, None]
    tl.store(kv_at, y_NT, mask=real & (n >= rank_q)[:, None] & (n < outputs)[:, None])
    sum_T = tl.sum(tl.where(query, y_NT * y_NT, 0.0), 0)
    tl.store(squares_out + tl.program_id(1) * tl.cdiv(tokens, 8) * 8 + t, sum_T, mask=t < tokens)


def project_a(x: Tensor, squares: Tensor, w: Tiled, gamma_Q: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`decode.project_a` of 9 to 256 tokens; squares have one part per program."""
    tokens, rank_q, device = x.shape[0], gamma_Q.shape[0], x.device
    q = torch.empty(tokens, padded(rank_q, PAD_K), dtype=torch.bfloat16, device=device)
    outputs = max(w.outputs, q.shape[1])
    squares_out = _squares(outputs, tokens, device)
    kv = torch.empty(tokens, w.outputs - rank_q, device=device)
    numbers = *_norm(squares, w, eps), w.outputs, rank_q, q.shape[1]
    parts = padded(squares.shape[0], _AT_ONCE.value)
    launch(_project_a, w, x, outputs, (squares, gamma_Q, q, squares_out, kv), numbers, PARTS=parts)
    return q, squares_out, kv


@triton.jit
def _turned(even, odd, c, s):
    return even * c - odd * s, even * s + odd * c


@triton.jit
def _page_row(kv, gamma, cos, sin, rows_T, plane, token, eps, page_stride, PAGE: tl.constexpr, RANK: tl.constexpr,
              ROPE: tl.constexpr, BLOCK_R: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Writes [normed latent | rotated key] of a token to its page."""
    saturates: tl.constexpr = plane.dtype.element_ty == tl.float8e4nv
    at = kv + token * (RANK + ROPE)
    row = tl.load(rows_T + token)
    place = plane + row // PAGE * page_stride + row % PAGE * (RANK + ROPE)
    r, p = tl.arange(0, BLOCK_R), tl.arange(0, HALF)
    latent = tl.load(at + r, mask=r < RANK, other=0.0)
    gamma_R = tl.load(gamma + r, mask=r < RANK, other=0.0)
    pair = p < ROPE // 2
    even = tl.load(at + RANK + 2 * p, mask=pair, other=0.0)
    odd = tl.load(at + RANK + 2 * p + 1, mask=pair, other=0.0)
    c = tl.load(cos + token * (ROPE // 2) + p, mask=pair, other=0.0)
    s = tl.load(sin + token * (ROPE // 2) + p, mask=pair, other=0.0)
    latent *= tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps) * gamma_R
    even, odd = _turned(even, odd, c, s)
    if saturates:
        latent = tl.minimum(tl.maximum(latent, -448.0), 448.0)
        even, odd = tl.minimum(tl.maximum(even, -448.0), 448.0), tl.minimum(tl.maximum(odd, -448.0), 448.0)
    tl.store(place + r, latent.to(plane.dtype.element_ty), mask=r < RANK)
    tl.store(place + RANK + 2 * p, even.to(plane.dtype.element_ty), mask=pair)
    tl.store(place + RANK + 2 * p + 1, odd.to(plane.dtype.element_ty), mask=pair)


@triton.jit(do_not_specialize=["tokens", "parts", "stride", "blocks"])
def _project_q(
    x, weight, squares, kv, gamma, cos, sin, rows_T, plane, q, tokens, rows, last, x_stride,
    parts, stride, inputs, eps, outputs, blocks, page_stride,
    K: tl.constexpr, LINES: tl.constexpr, SLABS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr, SPLIT: tl.constexpr, DEPENDENT: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr,
    NOPE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The first `blocks` programs multiply; each of the others writes a token's row to its page."""
    block = tl.program_id(1)
    if block >= blocks:
        follow(DEPENDENT)
        token = (block - blocks).to(tl.int64)
        if tl.program_id(0) == 0:
            _page_row(kv, gamma, cos, sin, rows_T, plane, token, eps, page_stride, PAGE, RANK, ROPE, BLOCK_R, HALF)
    else:
        first = block * BLOCK_N
        n, t = first + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
        begin(weight, first, last, K, LINES, SLABS, BLOCK_N, DEPENDENT)
        rstd_T = _rstd(squares, t, tokens, parts, stride, inputs, eps, PARTS, BLOCK_T)
        pair = first // 2 + tl.arange(0, BLOCK_N // 2)
        turn = pair % ((NOPE + ROPE) // 2) - NOPE // 2  # index in the rope part, if it is not negative
        turned = (turn >= 0)[:, None] & (t < tokens)[None, :]
        angle_at = t[None, :] * (ROPE // 2) + turn[:, None]
        c = tl.load(cos + angle_at, mask=turned, other=1.0)
        s = tl.load(sin + angle_at, mask=turned, other=0.0)
        y_NT = (
            multiply(x, weight, n, t, tokens, rows, x_stride, K, SLABS, BLOCK_N, BLOCK_K, BLOCK_T, SPLIT)
            * rstd_T[None, :]
        )
        even, odd = tl.split(tl.permute(tl.reshape(y_NT, (BLOCK_N // 2, 2, BLOCK_T)), (0, 2, 1)))
        even, odd = _turned(even, odd, c, s)
        y_NT = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), (BLOCK_N, BLOCK_T))
        real = (t < tokens)[None, :] & (n < outputs)[:, None]
        tl.store(q + t[None, :].to(tl.int64) * outputs + n[:, None], y_NT.to(tl.bfloat16), mask=real)


def project_q(
    q_a: Tensor,
    squares: Tensor,
    w: Tiled,
    heads: int,
    kv: Tensor,
    gamma_R: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows_T: Tensor,
    plane: Tensor,
    eps: float,
) -> Tensor:
    """`decode.project_q` of 9 to 256 tokens; also writes the pages' rows."""
    tokens, rank, rope, width = q_a.shape[0], gamma_R.shape[0], 2 * cos.shape[1], w.outputs // heads
    q = torch.empty(tokens, heads, width, dtype=torch.bfloat16, device=q_a.device)
    blocks = triton.cdiv(w.outputs, block_rows(w.outputs, tokens))
    numbers = *_norm(squares, w, eps), w.outputs, blocks, plane.stride(0)
    sizes = {"PARTS": padded(squares.shape[0], _AT_ONCE.value), "NOPE": width - rope, "RANK": rank, "ROPE": rope}
    sizes |= {"PAGE": PAGE_TOKENS, "BLOCK_R": triton.next_power_of_2(rank), "HALF": triton.next_power_of_2(rope // 2)}
    tensors = squares, kv, gamma_R, cos, sin, rows_T, plane, q
    launch(_project_q, w, q_a, w.outputs, tensors, numbers, beside=tokens, **sizes)
    return q


@triton.jit(do_not_specialize=["tokens"])
def _project_out(
    x, weight, residual, routed, gamma, residual_out, x_out, squares_out, tokens, rows, last, x_stride,
    outputs, out_stride,
    K: tl.constexpr, LINES: tl.constexpr, SLABS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr, SPLIT: tl.constexpr, DEPENDENT: tl.constexpr, ROUTED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_N
    n, t = first + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    begin(weight, first, last, K, LINES, SLABS, BLOCK_N, DEPENDENT)
    t_64 = t[None, :].to(tl.int64)
    real_t = (t < tokens)[None, :]
    real = real_t & (n < outputs)[:, None]
    at = t_64 * outputs + n[:, None]
    before_NT = tl.load(residual + at, mask=real, other=0.0)
    if ROUTED:
        before_NT += tl.load(routed + at, mask=real, other=0.0)
    gamma_N = tl.load(gamma + n, mask=n < outputs, other=0.0)
    y_NT = multiply(x, weight, n, t, tokens, rows, x_stride, K, SLABS, BLOCK_N, BLOCK_K, BLOCK_T, SPLIT) + before_NT
    tl.store(residual_out + at, y_NT, mask=real)
    x_NT = (y_NT * gamma_N[:, None]).to(tl.bfloat16)
    tl.store(x_out + t_64 * out_stride + n[:, None], x_NT, mask=real_t & (n < out_stride)[:, None])
    sum_T = tl.sum(y_NT * y_NT, 0)
    tl.store(squares_out + tl.program_id(1) * tl.cdiv(tokens, 8) * 8 + t, sum_T, mask=t < tokens)


def project_out(
    y: Tensor, w: Tiled | Slabs, residual_TD: Tensor, gamma_D: Tensor, routed_TD: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`decode.project_out` of 9 to 256 tokens; squares have one part per program."""
    tokens, device = y.shape[0], y.device
    residual = torch.empty(tokens, w.outputs, device=device)
    x = torch.empty(tokens, padded(w.outputs, PAD_K), dtype=torch.bfloat16, device=device)
    squares = _squares(x.shape[1], tokens, device)
    routed = residual_TD if routed_TD is None else routed_TD
    tensors = residual_TD, routed, gamma_D, residual, x, squares
    launch(_project_out, w, y, x.shape[1], tensors, (w.outputs, x.shape[1]), ROUTED=routed_TD is not None)
    return residual, x, squares


@triton.jit(do_not_specialize=["tokens"])
def _partial_out(
    x, weight, out, tokens, rows, last, x_stride, outputs,
    K: tl.constexpr, LINES: tl.constexpr, SLABS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr, SPLIT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_N
    n, t = first + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    begin(weight, first, last, K, LINES, SLABS, BLOCK_N, DEPENDENT)
    y_NT = multiply(x, weight, n, t, tokens, rows, x_stride, K, SLABS, BLOCK_N, BLOCK_K, BLOCK_T, SPLIT)
    real = (t < tokens)[None, :] & (n < outputs)[:, None]
    tl.store(out + t[None, :].to(tl.int64) * outputs + n[:, None], y_NT, mask=real)


def partial_out(y: Tensor, w: Tiled | Slabs) -> Tensor:
    """W y of 9 to 256 tokens, float32 [T, D]: one rank's partial sums of `decode.project_out`."""
    out = torch.empty(y.shape[0], w.outputs, device=y.device)
    launch(_partial_out, w, y, w.outputs, (out,), (w.outputs,))
    return out


@triton.jit(do_not_specialize=["tokens", "parts", "stride"])
def _gates(
    x, weight, squares, logits, h, rstd, tokens, rows, last, x_stride,
    parts, stride, inputs, eps, experts, router_rows, h_stride,
    K: tl.constexpr, LINES: tl.constexpr, SLABS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr, SPLIT: tl.constexpr, DEPENDENT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_N
    n, t = first + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    begin(weight, first, last, K, LINES, SLABS, BLOCK_N, DEPENDENT)
    rstd_T = _rstd(squares, t, tokens, parts, stride, inputs, eps, PARTS, BLOCK_T)
    y_NT = (
        multiply(x, weight, n, t, tokens, rows, x_stride, K, SLABS, BLOCK_N, BLOCK_K, BLOCK_T, SPLIT) * rstd_T[None, :]
    )
    real_t = (t < tokens)[None, :]
    if first == 0:
        tl.store(rstd + t, tl.where(t < tokens, rstd_T, 0.0), mask=t < tl.cdiv(tokens, 8) * 8)
    if first < experts:
        tl.store(logits + t[None, :] * experts + n[:, None], y_NT, mask=real_t & (n < experts)[:, None])
    if first + BLOCK_N > router_rows:
        tiles = tl.permute(tl.reshape(y_NT, (BLOCK_N // 16, 2, 8, BLOCK_T)), (0, 2, 3, 1))
        gate, up = tl.split(tiles)
        h_MT = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (BLOCK_N // 2, BLOCK_T))
        m = (first - router_rows) // 2 + tl.arange(0, BLOCK_N // 2)
        real = real_t & (first + 2 * tl.arange(0, BLOCK_N // 2) >= router_rows)[:, None] & (m < h_stride)[:, None]
        tl.store(h + t[None, :].to(tl.int64) * h_stride + m[:, None], h_MT.to(tl.bfloat16), mask=real)


def gates(x: Tensor, squares: Tensor, w: Tiled, experts: int, width: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`decode.gates` of 9 to 256 tokens without the choice of experts -> (logits, h, rstd)."""
    tokens, device, router_rows = x.shape[0], x.device, padded(experts, TILE_N)
    logits = torch.empty(tokens, experts, device=device)
    h = torch.empty(tokens, padded(width, PAD_K), dtype=torch.bfloat16, device=device)
    rstd = torch.empty(padded(tokens, 8), device=device)
    numbers = *_norm(squares, w, eps), experts, router_rows, h.shape[1]
    outputs, parts = router_rows + 2 * h.shape[1], padded(squares.shape[0], _AT_ONCE.value)
    launch(_gates, w, x, outputs, (squares, logits, h, rstd), numbers, PARTS=parts)
    return logits, h, rstd


def _squares(outputs: int, tokens: int, device: torch.device) -> Tensor:
    """Uninitialised memory for the sums of squares, float32 [programs, T padded to 8]."""
    return torch.empty(triton.cdiv(outputs, block_rows(outputs, tokens)), padded(tokens, 8), device=device)


def _norm(squares: Tensor, w: Tiled, eps: float) -> tuple[int, int, int, float]:
    return squares.shape[0], squares.shape[1], w.inputs, eps
