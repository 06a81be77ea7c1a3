"""Query heads for T <= 256 tokens, and the tokens' rows of the KV cache.    H heads, N nope, P rope, R latent rank.

W_q [H (N + P), Rq] times the normed low-rank query, with the last P of each head rotated. Each token's row [normed
latent (R) | rotated key (P)] is written to its page, as `mla_qkv` does.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.decode import dense
from redline.kernels.cuda.kernel import launch_record
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.ops.mla import rotate, stored
from redline.ops.op import Case, Cost, Op

_Launch = launch_record("decode/dense.cu", "ProjectQLaunch")
PLANES = {torch.bfloat16: "PLANE_BF16", torch.float32: "PLANE_F32", torch.float8_e4m3fn: "PLANE_E4M3"}
MOST_ROW = 1024  # maximum R + P: two numbers per thread


class ProjectQArgs(NamedTuple):
    """Multiplies the low-rank queries by W_q, rotates them, and writes each token's row to its page."""

    q_a: Tensor  # bf16 [T, Rq padded]: from `project_a`, not yet divided by its rms
    squares: Tensor  # float32 [parts, T padded to 8]: of q_a
    w: Tiled  # [H (N + P), Rq]
    heads: int  # H
    kv: Tensor  # float32 [T, R + P]: from `project_a`
    gamma_R: Tensor  # float32 [R]: weight of the latent's norm
    cos: Tensor  # float32 [T, P / 2]: of the angles of each token's position
    sin: Tensor  # float32 [T, P / 2]
    rows_T: Tensor  # int64 [T]: page * 64 + place, the cache row of each token
    # [pages, 64, R + P] bf16, float32 or float8_e4m3fn (saturating); written at rows_T. Each page is contiguous, pages
    # may be strided.
    plane: Tensor
    eps: float  # of both norms


def reference(args: ProjectQArgs) -> Tensor:
    """-> q bf16 [T, H, N + P], the last P of each head rotated."""
    kv, cos, plane = args.kv, args.cos, args.plane
    tokens, rank, rope = args.q_a.shape[0], args.gamma_R.shape[0], 2 * cos.shape[1]
    q = (dense.product(args.q_a, args.w) * dense.rstd_of(args.squares, tokens, args.w.inputs, args.eps)).unflatten(
        -1, (args.heads, -1)
    )
    q[..., -rope:] = rotate(q[..., -rope:], cos[:, None], args.sin[:, None])
    latent = kv[:, :rank] * torch.rsqrt(kv[:, :rank].pow(2).mean(-1, keepdim=True) + args.eps) * args.gamma_R
    row = torch.cat([latent, rotate(kv[:, rank:], cos, args.sin)], -1)
    plane[args.rows_T // PAGE_TOKENS, args.rows_T % PAGE_TOKENS] = stored(row, plane.dtype)
    return q.to(torch.bfloat16)


def cuda(args: ProjectQArgs) -> Tensor:
    """The reference's result: dense.cu up to 8 tokens, Triton up to 256."""
    q_a, squares, w, heads, gamma_R, cos, plane = (
        args.q_a,
        args.squares,
        args.w,
        args.heads,
        args.gamma_R,
        args.cos,
        args.plane,
    )
    tokens, rope, width = q_a.shape[0], 2 * cos.shape[1], w.outputs // heads
    if tokens > dense.MOST_TOKENS:
        from redline.kernels.cuda.triton import dense as streamed

        return streamed.project_q(q_a, squares, w, heads, args.kv, gamma_R, cos, args.sin, args.rows_T, plane, args.eps)
    kernel, blocks = dense.kernel_of(
        _Launch,
        "PROJECT_Q",
        w,
        tokens,
        NOPE=width - rope,
        ROPE=rope,
        RANK=gamma_R.shape[0],
        PLANE=PLANES[plane.dtype],
    )
    q = torch.empty(tokens, heads, width, dtype=torch.bfloat16, device=q_a.device)
    given = _Launch(
        weights=w.data,
        x=q_a,
        squares=squares,
        kv=args.kv,
        gamma=gamma_R,
        cos=cos,
        sin=args.sin,
        rows=args.rows_T,
        plane=plane[0],  # page p is p strides further
        q=q,
        tokens=tokens,
        parts=squares.shape[0],
        page_stride=plane.stride(0) * plane.element_size(),
        eps=args.eps,
    )
    kernel.launch(given, blocks)
    return q


def fits(args: ProjectQArgs) -> bool:
    """Whether there are 1 to 256 tokens in the layout of `dense`, and a page's rows can be divided over threads.

    Pairs of numbers are rotated and stored together, so R and N + P must be even. A thread of dense.cu has at most one
    pair of a row, and a block at most one token's row.
    """
    q_a, w = args.q_a, args.w
    rank, row = args.gamma_R.shape[0], args.kv.shape[1]
    return (
        (dense.streams(q_a, w) or (dense.fits(q_a, w) and q_a.shape[0] <= dense.blocks_of(w)))
        and args.squares.shape[0] <= dense.MOST_PARTS
        and args.plane.dtype in PLANES
        and rank % 2 == 0
        and row <= MOST_ROW
        and (w.outputs // args.heads) % 2 == 0
    )


def cost(args: ProjectQArgs) -> Cost:
    """The weight and the other inputs once, the queries and the pages' rows."""
    tokens = args.q_a.shape[0]
    written = Cost(tokens * (2 * args.w.outputs + args.kv.shape[1] * args.plane.element_size()))
    return (
        dense.cost_of(args.w, tokens, args.q_a, args.squares, args.kv, args.gamma_R, args.cos, args.sin, args.rows_T)
        + written
    )


def cases() -> Iterator[Case]:
    """Every dtype of pages, 1 to 256 tokens at sizes of nano and of Kimi and at odd ones."""

    def make(tokens: int, sizes: tuple[int, int, int, int, int], dtype: torch.dtype):
        def inputs(g: torch.Generator) -> ProjectQArgs:
            rank_q, heads, nope, rope, rank = sizes
            q_a, squares = dense.random_x(g, tokens, rank_q)
            w = dense.random_tiled(g, heads * (nope + rope), rank_q)
            kv = torch.randn(tokens, rank + rope, generator=g) * 3
            kv[0, -1] = 1000.0  # beyond the range of e4m3
            kv[-1, :rank] *= 1e-3  # as small as eps
            angle = torch.rand(tokens, rope // 2, generator=g) * 6.28
            rows = torch.randperm(5 * PAGE_TOKENS, generator=g)[:tokens]
            plane = torch.full((5, PAGE_TOKENS, rank + rope), 7.0).to(dtype)
            gamma = torch.rand(rank, generator=g) + 0.5
            return ProjectQArgs(q_a, squares, w, heads, kv, gamma, angle.cos(), angle.sin(), rows, plane, 1e-5)

        return inputs

    nano, kimi = (128, 4, 128, 64, 512), (1536, 64, 128, 64, 512)
    yield Case("T=1 nano bf16 pages", make(1, nano, torch.bfloat16))
    yield Case("T=3 nano float32 pages", make(3, nano, torch.float32))
    yield Case("T=8 nano e4m3 pages", make(8, nano, torch.float8_e4m3fn))
    yield Case("T=9 nano e4m3 pages", make(9, nano, torch.float8_e4m3fn))
    yield Case("T=32 nano float32 pages", make(32, nano, torch.float32))
    yield Case("T=64 nano bf16 pages", make(64, nano, torch.bfloat16))
    for tokens in (100, 200):
        yield Case(f"T={tokens} nano bf16 pages", make(tokens, nano, torch.bfloat16))
    yield Case("T=13 odd sizes, bf16 pages", make(13, (200, 10, 22, 10, 30), torch.bfloat16))
    yield Case("T=8 odd sizes, bf16 pages", make(8, (200, 10, 22, 10, 30), torch.bfloat16))
    yield Case("T=8 Kimi's rank", make(8, (1536, 4, 32, 16, 64), torch.bfloat16))
    for tokens in (1, 8, 9, 32, 64, 128, 256):
        yield Case(f"T={tokens} Kimi bf16 pages", make(tokens, kimi, torch.bfloat16), small=False)
    for tokens in (4, 32, 256):
        yield Case(f"T={tokens} Kimi e4m3 pages", make(tokens, kimi, torch.float8_e4m3fn), small=False)


project_q = Kernel(
    Op("project_q", ProjectQArgs, reference, cost, cases, rtol=dense.RTOL, writes=("plane",)), cuda, "cuda", fits
)
