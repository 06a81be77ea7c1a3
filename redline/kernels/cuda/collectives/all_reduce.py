"""residual += the all-reduced partial sums, for T <= 64 tokens, and x of the next norm.      D hidden.

It follows the matmuls that do not include their all-reduce, unlike `dense.cu` and `experts_down`: Triton's, of 9 to 64
tokens.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.collectives.rank_links import (
    ATTENTION,
    MOST_TOKENS,
    RankLinks,
    Site,
    all_reduce_fields,
    ranks_of,
    shots_of,
)
from redline.kernels.cuda.decode import dense
from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.layouts.tiled import PAD_K, padded
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

_THREADS = 128
COLUMNS = 4 * _THREADS  # per block
_Launch = launch_record("collectives/all_reduce.cu", "AllReduceLaunch")


class AllReduceArgs(NamedTuple):
    """All-reduces a matmul's partial sums into the residual, and computes x of the next norm."""

    partial_TD: Tensor  # float32 [T, D]
    residual_TD: Tensor  # float32 [T, D]; read
    gamma_D: Tensor  # float32 [D]: weight of the next norm
    routed_TD: Tensor | None = None  # float32 [T, D]: added to this rank's partial sums
    links: RankLinks | None = None  # None: one rank
    site: Site = ATTENTION


def reference(args: AllReduceArgs) -> tuple[Tensor, Tensor, Tensor]:
    """-> (residual float32 [T, D], x bf16 [T, D padded], squares float32 [parts, T padded to 8]), of one rank."""
    assert args.links is None, "a reference supports one rank"
    sums = args.partial_TD if args.routed_TD is None else args.partial_TD + args.routed_TD
    residual = args.residual_TD + sums
    parts = dense.pad_columns(residual.pow(2), COLUMNS).unflatten(-1, (-1, COLUMNS)).sum(-1).T
    x = dense.pad_columns((residual * args.gamma_D).to(torch.bfloat16))
    return residual, x, dense.pad_columns(parts, dense.MOST_TOKENS)


@functools.cache
def _kernel(d: int, ranks: int, shots: int, *, routed: bool) -> CudaKernel:
    sizes = {"HIDDEN": d, "HIDDEN_PADDED": padded(d, PAD_K), "RANKS": ranks, "SHOTS": shots, "ROUTED": int(routed)}
    return CudaKernel(
        "collectives/all_reduce.cu", "all_reduce", _Launch, sizes, shared=4 * _THREADS // 32, threads=_THREADS
    )


def cuda(args: AllReduceArgs) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's result, over all ranks."""
    (tokens, d), device = args.partial_TD.shape, args.partial_TD.device
    blocks = padded(d, COLUMNS) // COLUMNS
    residual = torch.empty(tokens, d, device=device)
    x = torch.empty(tokens, padded(d, PAD_K), dtype=torch.bfloat16, device=device)
    squares = torch.empty(blocks, padded(tokens, dense.MOST_TOKENS), device=device)
    given = _Launch(
        partial=args.partial_TD,
        routed=args.routed_TD,
        residual=args.residual_TD,
        gamma=args.gamma_D,
        residual_out=residual,
        x=x,
        squares=squares,
        tokens=tokens,
        **all_reduce_fields(args.links, args.site),
    )
    ranks, shots = ranks_of(args.links), shots_of(args.links, tokens)
    _kernel(d, ranks, shots, routed=args.routed_TD is not None).launch(given, blocks, tokens)
    return residual, x, squares


def fits(args: AllReduceArgs) -> bool:
    """Whether there are 1 to 64 tokens, and D is a multiple of 4: a thread has four columns."""
    return 1 <= args.partial_TD.shape[0] <= MOST_TOKENS and args.partial_TD.shape[1] % 4 == 0


def cost(args: AllReduceArgs) -> Cost:
    """The partial sums and the residual read, the residual and x written; traffic between ranks is not counted."""
    tokens, d = args.partial_TD.shape
    return Cost(tokens * d * (4 + 4 + 4 + 2) + args.gamma_D.nbytes)


def cases() -> Iterator[Case]:
    """1 to 64 tokens at nano's and Kimi's widths and at an odd one."""

    def make(tokens: int, d: int, *, routed: bool = False):
        def inputs(g: torch.Generator) -> AllReduceArgs:
            partial, residual, beside = torch.randn(3, tokens, d, generator=g)
            return AllReduceArgs(partial, residual, torch.rand(d, generator=g) + 0.5, beside if routed else None)

        return inputs

    yield Case("T=1 nano", make(1, 320))
    yield Case("T=9 nano, routed beside", make(9, 320, routed=True))
    yield Case("T=3 odd width", make(3, 532))
    for tokens in (1, 32, 64):
        yield Case(f"T={tokens} Kimi", make(tokens, 7168), small=False)


all_reduce = Kernel(Op("all_reduce", AllReduceArgs, reference, cost, cases), cuda, "cuda", fits)
