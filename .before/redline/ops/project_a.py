"""The first products of attention for T <= 64 tokens.        D hidden, Rq query rank, R latent rank, P rope.

W_a [Rq + R + P, D] times the normed residual: the query's low-rank form, ready but for 1 / rms of its own norm
(`ops.dense`), and the raw latent and key, which `project_q` writes into their page.
"""

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from redline.ops import dense
from redline.ops.cuda.kernel import address
from redline.ops.op import Case, Cost, Op
from redline.ops.tiled import PAD_K, Tiled, padded

Arguments = dense.arguments("ProjectA", "gamma q squares_out kv")


def reference(x: Tensor, squares: Tensor, w: Tiled, gamma_Q: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x bf16 [T, D padded], squares float32 [parts, T padded to 8]; w [Rq + R + P, D];
    gamma_Q float32 [Rq], of the query's norm.

    -> (q_a bf16 [T, Rq padded], its squares float32 [parts, T padded to 8], kv float32 [T, R + P])
    """
    tokens, rank_q = x.shape[0], gamma_Q.shape[0]
    y = dense.product(x, w) * dense.rstd_of(squares, tokens, w.inputs, eps)
    q, kv = y[:, :rank_q], y[:, rank_q:].contiguous()
    squares_out = dense.part_squares(torch.cat([q, torch.zeros_like(kv)], 1), dense.blocks_of(w))
    return dense.pad_columns((q * gamma_Q).to(torch.bfloat16)), squares_out, kv


def cuda(x: Tensor, squares: Tensor, w: Tiled, gamma_Q: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    tokens, rank_q = x.shape[0], gamma_Q.shape[0]
    if tokens > dense.MOST_TOKENS:
        from redline.ops.triton_kernels import dense as streamed

        return streamed.project_a(x, squares, w, gamma_Q, eps)
    rank_q_padded = padded(rank_q, PAD_K)
    kernel, blocks = dense.kernel_of("PROJECT_A", w, tokens, RANK_Q=rank_q, RANK_Q_PADDED=rank_q_padded)
    q_a = torch.empty(tokens, rank_q_padded, dtype=torch.bfloat16, device=x.device)
    squares_out = torch.empty(blocks, dense.MOST_TOKENS, device=x.device)
    kv = torch.empty(tokens, w.outputs - rank_q, device=x.device)
    given: ctypes.Structure = Arguments(
        *(address(w.data), address(x), address(squares), address(gamma_Q)),
        *(address(q_a), address(squares_out), address(kv), tokens, squares.shape[0], eps),
    )
    kernel.launch(given, blocks)
    return q_a, squares_out, kv


def fits(x: Tensor, squares: Tensor, w: Tiled, gamma_Q: Tensor, eps: float) -> bool:
    if squares.shape[0] > dense.MOST_PARTS:
        return False
    return dense.streams(x, w) or (dense.fits(x, w) and gamma_Q.shape[0] % 2 == 0)


def cost(x: Tensor, squares: Tensor, w: Tiled, gamma_Q: Tensor, eps: float) -> Cost:
    tokens, rank_q = x.shape[0], gamma_Q.shape[0]
    written = Cost(tokens * (2 * rank_q + 4 * (w.outputs - rank_q)))
    return dense.cost_of(w, tokens, x, squares, gamma_Q) + written


def cases() -> Iterator[Case]:
    def make(tokens: int, d: int, rank_q: int, kv: int):
        def inputs(g: torch.Generator) -> tuple[Tensor, Tensor, Tiled, Tensor, float]:
            x, squares = dense.random_x(g, tokens, d)
            return x, squares, dense.random_tiled(g, rank_q + kv, d), torch.rand(rank_q, generator=g) + 0.5, 1e-5

        return inputs

    yield Case("T=1 nano", make(1, 320, 128, 576))
    for tokens in (8, 9, 32, 64):
        yield Case(f"T={tokens} nano", make(tokens, 320, 128, 576))
    for tokens in (1, 3, 8, 9, 32, 64):
        yield Case(f"T={tokens} Kimi", make(tokens, 7168, 1536, 576), small=False)
    for tokens in (3, 11):
        yield Case(f"T={tokens} odd sizes", make(tokens, 96, 72, 54))
    yield Case("T=8 Kimi's width", make(8, 7168, 24, 24))


project_a = Op("project_a", reference, None, cost, cases, rtol=dense.RTOL, cuda=cuda, cuda_fits=fits)
