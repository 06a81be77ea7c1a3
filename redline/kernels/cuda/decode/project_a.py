"""The first matmuls of attention for T <= 256 tokens.        D hidden, Rq query rank, R latent rank, P rope.

W_a [Rq + R + P, D] times the normed residual: the low-rank query, complete except for 1 / rms of its own norm
(`dense`), and the raw latent and key, which `project_q` writes to their page.

Every tensor parallel rank needs the whole result and has all of W_a. Up to 8 tokens the ranks divide the inputs, if
that saves more than an all-reduce costs: each multiplies its part of D, and the partial sums are all-reduced.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.collectives.rank_links import NO_LINKS, RankLinks
from redline.kernels.cuda.decode import dense
from redline.kernels.cuda.kernel import launch_record
from redline.kernels.cuda.layouts.tiled import PAD_K, TILE_K, Tiled, padded
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

_Launch = launch_record("decode/dense.cu", "ProjectALaunch")

# Microseconds of an all-reduce over two ranks, and per further rank; bytes per microsecond of an NVIDIA H200's memory.
_SUM, _FURTHER, _SPEED = 2.0, 0.3, 4.5e6


class ProjectAArgs(NamedTuple):
    """Multiplies the normed residual by W_a: low-rank queries, and raw latents and keys."""

    x: Tensor  # bf16 [T, D padded], as in `dense`
    squares: Tensor  # float32 [parts, T padded to 8]: of x's residual
    w: Tiled  # [Rq + R + P, D]
    gamma_Q: Tensor  # float32 [Rq]: weight of the queries' norm
    eps: float  # of the norm that is still to be applied to x
    links: RankLinks | None = None  # to the ranks that may divide the inputs; None: one rank


def shares(w: Tiled, links: RankLinks | None, tokens: int) -> bool:
    """Whether each rank multiplies only a part of the inputs. w: the whole W_a."""
    if links is None or links.projection == "whole" or tokens > dense.MOST_TOKENS:
        return False
    ranks = links.ranks
    if padded(w.inputs, PAD_K) % (ranks * PAD_K) or dense.MOST_TOKENS * w.outputs > links.rooms.projected:
        return False
    saved = w.nbytes * (1 - 1 / ranks) / _SPEED - _SUM - _FURTHER * (ranks - 2)
    return links.projection == "divided" or saved > 0


def reference(args: ProjectAArgs) -> tuple[Tensor, Tensor, Tensor]:
    """-> (q_a bf16 [T, Rq padded], its squares float32 [parts, T padded to 8], kv float32 [T, R + P])."""
    assert args.links is None, "a reference supports one rank"
    w = args.w
    tokens, rank_q = args.x.shape[0], args.gamma_Q.shape[0]
    y = dense.product(args.x, w) * dense.rstd_of(args.squares, tokens, w.inputs, args.eps)
    q, kv = y[:, :rank_q], y[:, rank_q:].contiguous()
    squares_out = dense.part_squares(torch.cat([q, torch.zeros_like(kv)], 1), dense.blocks_of(w))
    return dense.pad_columns((q * args.gamma_Q).to(torch.bfloat16)), squares_out, kv


def cuda(args: ProjectAArgs) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's result: dense.cu up to 8 tokens, Triton up to 256; squares have a different number of parts."""
    x, squares, w, gamma_Q = args.x, args.squares, args.w, args.gamma_Q
    tokens, rank_q = x.shape[0], gamma_Q.shape[0]
    if tokens > dense.MOST_TOKENS:
        from redline.kernels.cuda.triton import dense as streamed

        return streamed.project_a(x, squares, w, gamma_Q, args.eps)
    rank_q_padded = padded(rank_q, PAD_K)
    links = args.links if shares(w, args.links, tokens) else None
    rank, ranks = (0, 1) if links is None else (links.rank, links.ranks)
    first = rank * (x.shape[1] // ranks)
    sizes = {"RANK_Q": rank_q, "RANK_Q_PADDED": rank_q_padded, "RANKS": ranks}
    kernel, blocks = dense.kernel_of(_Launch, "PROJECT_A", w, tokens, share=ranks, **sizes)
    q_a = torch.empty(tokens, rank_q_padded, dtype=torch.bfloat16, device=x.device)
    squares_out = torch.empty(blocks, dense.MOST_TOKENS, device=x.device)
    kv = torch.empty(tokens, w.outputs - rank_q, device=x.device)
    given = _Launch(
        weights=w.data[0, first // TILE_K :],  # start of this rank's part; rows of tiles keep their stride
        x=x[0, first:],  # start of this rank's part of the first row
        squares=squares,
        gamma=gamma_Q,
        q=q_a,
        squares_out=squares_out,
        kv=kv,
        tokens=tokens,
        parts=squares.shape[0],
        eps=args.eps,
        **(NO_LINKS if links is None else links.projection_fields()),
    )
    kernel.launch(given, blocks)
    return q_a, squares_out, kv


def fits(args: ProjectAArgs) -> bool:
    """Whether there are 1 to 256 tokens as in `dense`; up to 8 also an even Rq: a thread stores two outputs."""
    if args.squares.shape[0] > dense.MOST_PARTS:
        return False
    return dense.streams(args.x, args.w) or (dense.fits(args.x, args.w) and args.gamma_Q.shape[0] % 2 == 0)


def cost(args: ProjectAArgs) -> Cost:
    """The weight, or this rank's part of it, the other inputs once, q_a and kv."""
    tokens, rank_q = args.x.shape[0], args.gamma_Q.shape[0]
    written = Cost(tokens * (2 * rank_q + 4 * (args.w.outputs - rank_q)))
    return dense.cost_of(args.w, tokens, args.x, args.squares, args.gamma_Q) + written


def cases() -> Iterator[Case]:
    """1 to 256 tokens at sizes of nano and of Kimi and at odd ones."""

    def make(tokens: int, d: int, rank_q: int, kv: int):
        def inputs(g: torch.Generator) -> ProjectAArgs:
            x, squares = dense.random_x(g, tokens, d)
            return ProjectAArgs(
                x, squares, dense.random_tiled(g, rank_q + kv, d), torch.rand(rank_q, generator=g) + 0.5, 1e-5
            )

        return inputs

    yield Case("T=1 nano", make(1, 320, 128, 576))
    for tokens in (8, 9, 32, 64, 100, 200):
        yield Case(f"T={tokens} nano", make(tokens, 320, 128, 576))
    for tokens in (1, 3, 8, 9, 32, 64, 128, 256):
        yield Case(f"T={tokens} Kimi", make(tokens, 7168, 1536, 576), small=False)
    for tokens in (3, 11):
        yield Case(f"T={tokens} odd sizes", make(tokens, 96, 72, 54))
    yield Case("T=8 Kimi's width", make(8, 7168, 24, 24))


project_a = Kernel(Op("project_a", ProjectAArgs, reference, cost, cases, rtol=dense.RTOL), cuda, "cuda", fits)
