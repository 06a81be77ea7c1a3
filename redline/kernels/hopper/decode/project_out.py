"""residual += W y for T <= 64 tokens, and x of the norm that follows.        D hidden, K inputs.

Attention's output projection [D, H V], the down projection of a dense MLP [D, I], and that of a shared expert beside
`grouped_experts`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.hopper.decode import dense
from redline.kernels.hopper.kernel import launch_record
from redline.kernels.hopper.layouts.records import Slabs
from redline.kernels.hopper.layouts.tiled import PAD_K, Tiled, padded
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

_Launch = launch_record("decode/dense.cu", "ProjectOutLaunch")


class ProjectOutArgs(NamedTuple):
    """What `project_out` takes."""

    y: Tensor
    w: Tiled | Slabs
    residual_TD: Tensor
    gamma_D: Tensor
    routed_TD: Tensor | None = None


def reference(args: ProjectOutArgs) -> tuple[Tensor, Tensor, Tensor]:
    """y bf16 [T, K padded]; w [D, K]; residual float32 [T, D]; gamma_D float32 [D], of the norm that follows;
    routed_TD float32: added as well.

    -> (residual float32 [T, D], x bf16 [T, D padded], squares float32 [parts, T padded to 8]); `dense` says what
    they are.
    """
    residual = args.residual_TD + dense.product(args.y, args.w)
    if args.routed_TD is not None:
        residual += args.routed_TD
    x = dense.pad_columns((residual * args.gamma_D).to(torch.bfloat16))
    return residual, x, dense.part_squares(residual, dense.blocks_of(args.w))


def cuda(args: ProjectOutArgs) -> tuple[Tensor, Tensor, Tensor]:
    y, w = args.y, args.w
    tokens, d_padded = y.shape[0], padded(w.outputs, PAD_K)
    if tokens > dense.MOST_TOKENS:
        from redline.kernels.hopper.triton import dense as streamed

        return streamed.project_out(y, w, args.residual_TD, args.gamma_D, args.routed_TD)
    assert isinstance(w, Tiled)
    kernel, blocks = dense.kernel_of(_Launch, "PROJECT_OUT", w, tokens, OUTPUTS_PADDED=d_padded)
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
    )
    kernel.launch(given, blocks)
    return residual, x, squares


def fits(args: ProjectOutArgs) -> bool:
    w = args.w
    return dense.streams(args.y, w) or (isinstance(w, Tiled) and args.routed_TD is None and dense.fits(args.y, w))


def cost(args: ProjectOutArgs) -> Cost:
    y = args.y
    read = [y, args.residual_TD, args.residual_TD, args.gamma_D, *([] if args.routed_TD is None else [args.routed_TD])]
    return dense.cost_of(args.w, y.shape[0], *read) + Cost(2 * y.shape[0] * args.w.outputs)


def cases() -> Iterator[Case]:
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
    for tokens in (8, 9, 32, 64):
        yield Case(f"T={tokens} nano attention", make(tokens, 320, 512))
    for tokens in (1, 3, 8, 9, 32, 64):
        yield Case(f"T={tokens} Kimi attention", make(tokens, 7168, 8192), small=False)
        yield Case(f"T={tokens} Kimi dense MLP", make(tokens, 7168, 18432), small=False)
    yield Case("T=64 Kimi shared expert", make(64, 7168, 2048, shared=True), small=False)
    yield Case("T=2 nano dense MLP", make(2, 320, 768))
    yield Case("T=33 nano shared expert", make(33, 320, 128, shared=True))
    yield Case("T=64 shared expert, odd sizes", make(64, 58, 300, shared=True))
    yield Case("T=9 shared expert, wide", make(9, 4100, 128, shared=True))
    for tokens in (3, 11):
        yield Case(f"T={tokens} odd sizes", make(tokens, 58, 1300))
    yield Case("T=9 wide", make(9, 4100, 128))
    yield Case("T=8 Kimi's heads", make(8, 48, 8192))
    yield Case("T=8 Kimi's dense MLP", make(8, 48, 18432))
    yield Case("T=1 Kimi's dense MLP", make(1, 32, 18432))


project_out = Kernel(Op("project_out", ProjectOutArgs, reference, cost, cases, rtol=dense.RTOL), cuda, "hopper", fits)
