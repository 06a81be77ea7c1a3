"""residual += W y for T <= 256 tokens, and x of the next norm.        D hidden, K inputs.

For attention's output projection [D, H V], the down projection of a dense MLP [D, I], and that of a shared expert in a
layer that runs `grouped_experts`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.collectives.all_reduce import all_reduce
from redline.kernels.cuda.collectives.rank_links import (
    ATTENTION,
    MOST_TOKENS,
    RankLinks,
    Site,
    all_reduce_fields,
    ranks_of,
)
from redline.kernels.cuda.decode import dense
from redline.kernels.cuda.kernel import launch_record
from redline.kernels.cuda.layouts.records import Slabs
from redline.kernels.cuda.layouts.tiled import PAD_K, Tiled, padded
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

_Launch = launch_record("decode/dense.cu", "ProjectOutLaunch")


class ProjectOutArgs(NamedTuple):
    """Adds W y to the residual, and computes x of the next norm."""

    y: Tensor  # bf16 [T, K padded to 128]; not normed
    w: Tiled | Slabs  # [D, K]; slabs only with more than 8 tokens
    residual_TD: Tensor  # float32 [T, D]; read
    gamma_D: Tensor  # float32 [D]: weight of the next norm
    routed_TD: Tensor | None = None  # float32 [T, D]: added too; only with more than 8 tokens
    links: RankLinks | None = None  # W y and routed_TD are partial sums, all-reduced over the ranks; None: one rank
    site: Site = ATTENTION  # of the all-reduce


def reference(args: ProjectOutArgs) -> tuple[Tensor, Tensor, Tensor]:
    """-> (residual float32 [T, D], x bf16 [T, D padded], squares float32 [parts, T padded to 8]), of one rank."""
    assert args.links is None, "a reference supports one rank"
    residual = args.residual_TD + dense.product(args.y, args.w)
    if args.routed_TD is not None:
        residual += args.routed_TD
    x = dense.pad_columns((residual * args.gamma_D).to(torch.bfloat16))
    return residual, x, dense.part_squares(residual, dense.blocks_of(args.w))


def cuda(args: ProjectOutArgs) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's result: dense.cu up to 8 tokens, Triton up to 256; squares have a different number of parts.

    Over several ranks dense.cu includes the all-reduce; Triton's matmul is followed by a launch for it (`all_reduce`).
    """
    y, w = args.y, args.w
    tokens, d_padded = y.shape[0], padded(w.outputs, PAD_K)
    if tokens > dense.MOST_TOKENS:
        from redline.kernels.cuda.triton import dense as streamed

        if args.links is None:
            return streamed.project_out(y, w, args.residual_TD, args.gamma_D, args.routed_TD)
        partial = streamed.partial_out(y, w)
        return all_reduce(partial, args.residual_TD, args.gamma_D, args.routed_TD, args.links, args.site)
    assert isinstance(w, Tiled)
    sizes = {"OUTPUTS_PADDED": d_padded, "RANKS": ranks_of(args.links)}
    kernel, blocks = dense.kernel_of(_Launch, "PROJECT_OUT", w, tokens, **sizes)
    residual = torch.empty(tokens, w.outputs, device=y.device)
    x = torch.empty(tokens, d_padded, dtype=torch.bfloat16, device=y.device)
    squares = torch.empty(blocks, dense.MOST_TOKENS, device=y.device)
    given = _Launch(
        weights=w.data,
        x=y,
        squares=None,
        residual=args.residual_TD,
        gamma=args.gamma_D,
        residual_out=residual,
        x_out=x,
        squares_out=squares,
        tokens=tokens,
        parts=0,
        eps=0.0,
        **all_reduce_fields(args.links, args.site),
    )
    kernel.launch(given, blocks)
    return residual, x, squares


def fits(args: ProjectOutArgs) -> bool:
    """Whether there are 9 to 256 tokens (64 over several ranks), or up to 8 with tiles and without routed_TD."""
    w = args.w
    if args.links is not None and args.y.shape[0] > MOST_TOKENS:
        return False
    return dense.streams(args.y, w) or (isinstance(w, Tiled) and args.routed_TD is None and dense.fits(args.y, w))


def cost(args: ProjectOutArgs) -> Cost:
    """The weight and y once, the residual read and written, x, and routed_TD."""
    y = args.y
    read = [y, args.residual_TD, args.residual_TD, args.gamma_D, *([] if args.routed_TD is None else [args.routed_TD])]
    return dense.cost_of(args.w, y.shape[0], *read) + Cost(2 * y.shape[0] * args.w.outputs)


def cases() -> Iterator[Case]:
    """Attention, a dense MLP and a shared expert at sizes of nano and of Kimi, up to 256 tokens, and odd sizes."""

    def make(tokens: int, d: int, k: int, *, shared: bool = False):
        def inputs(g: torch.Generator) -> ProjectOutArgs:
            y, _ = dense.random_x(g, tokens, k)
            weight = (torch.randn(d, k, generator=g) * k**-0.5).to(torch.bfloat16)
            residual, gamma = torch.randn(tokens, d, generator=g), torch.rand(d, generator=g) + 0.5
            if not shared:
                return ProjectOutArgs(y, Tiled.prepare(weight), residual, gamma, None)
            return ProjectOutArgs(y, Slabs.prepare(weight), residual, gamma, torch.randn(tokens, d, generator=g))

        return inputs

    yield Case("T=1 nano attention", make(1, 320, 512))
    for tokens in (8, 9, 32, 64, 100, 200):
        yield Case(f"T={tokens} nano attention", make(tokens, 320, 512))
    for tokens in (1, 3, 8, 9, 32, 64, 128, 256):
        yield Case(f"T={tokens} Kimi attention", make(tokens, 7168, 8192), small=False)
        yield Case(f"T={tokens} Kimi dense MLP", make(tokens, 7168, 18432), small=False)
    for tokens in (64, 128, 256):
        yield Case(f"T={tokens} Kimi shared expert", make(tokens, 7168, 2048, shared=True), small=False)
    yield Case("T=2 nano dense MLP", make(2, 320, 768))
    yield Case("T=33 nano shared expert", make(33, 320, 128, shared=True))
    for tokens in (100, 200):
        yield Case(f"T={tokens} nano shared expert", make(tokens, 320, 128, shared=True))
    yield Case("T=64 shared expert, odd sizes", make(64, 58, 300, shared=True))
    yield Case("T=9 shared expert, wide", make(9, 4100, 128, shared=True))
    for tokens in (3, 11):
        yield Case(f"T={tokens} odd sizes", make(tokens, 58, 1300))
    yield Case("T=9 wide", make(9, 4100, 128))
    yield Case("T=8 Kimi's heads", make(8, 48, 8192))
    yield Case("T=8 Kimi's dense MLP", make(8, 48, 18432))
    yield Case("T=1 Kimi's dense MLP", make(1, 32, 18432))


project_out = Kernel(Op("project_out", ProjectOutArgs, reference, cost, cases, rtol=dense.RTOL), cuda, "cuda", fits)
