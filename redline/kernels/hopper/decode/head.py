"""Logits of T <= 8 tokens over the vocabulary.        D hidden, V vocabulary."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.hopper.decode import dense
from redline.kernels.hopper.kernel import launch_record
from redline.kernels.hopper.layouts.tiled import PAD_K, Tiled
from redline.kernels.hopper.linear import product
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

_Launch = launch_record("decode/dense.cu", "HeadLaunch")


class HeadArgs(NamedTuple):
    """Multiplies each token's last state, normed as it is read, with the head."""

    x: Tensor  # bf16 [T, D padded]: as `dense` has it, or normed already with `squares` and eps that give an rms of 1
    squares: Tensor  # float32 [parts, 8]: of x's residual
    w: Tiled  # [V, D]
    eps: float  # of the last norm


def reference(args: HeadArgs) -> Tensor:
    """-> logits float32 [T, V]."""
    return dense.product(args.x, args.w) * dense.rstd_of(args.squares, args.x.shape[0], args.w.inputs, args.eps)


def cuda(args: HeadArgs) -> Tensor:
    """The reference's result by dense.cu."""
    x, w = args.x, args.w
    kernel, blocks = dense.kernel_of(_Launch, "HEAD", w, x.shape[0])
    logits = torch.empty(x.shape[0], w.outputs, device=x.device)
    given = _Launch(
        weights=w.data,
        x=x,
        squares=args.squares,
        logits=logits,
        tokens=x.shape[0],
        parts=args.squares.shape[0],
        eps=args.eps,
    )
    kernel.launch(given, blocks)
    return logits


def fits(args: HeadArgs) -> bool:
    """Whether dense.cu takes it: 1 to 8 tokens, bf16, an even V, and at most 256 parts of squares."""
    return dense.fits(args.x, args.w) and args.squares.shape[0] <= dense.MOST_PARTS


def cost(args: HeadArgs) -> Cost:
    """The head, x and the squares once, and the logits."""
    x = args.x
    return dense.cost_of(args.w, x.shape[0], x, args.squares) + Cost(4 * x.shape[0] * args.w.outputs)


def cases() -> Iterator[Case]:
    """1 to 8 tokens at sizes of nano and of Kimi and at odd ones."""

    def make(tokens: int, v: int, d: int):
        def inputs(g: torch.Generator) -> HeadArgs:
            return HeadArgs(*dense.random_x(g, tokens, d), dense.random_tiled(g, v, d), 1e-5)

        return inputs

    yield Case("T=1 nano", make(1, 4096, 320))
    yield Case("T=8 nano's width", make(8, 512, 320))
    yield Case("T=3 odd sizes", make(3, 90, 100))
    for tokens in (1, 8):
        yield Case(f"T={tokens} Kimi", make(tokens, 163840, 7168), small=False)


head = Kernel(Op("head", HeadArgs, reference, cost, cases, rtol=dense.RTOL), cuda, "hopper", fits)


def logits_of(normed_RD: Tensor, w: Tiled, squares: Tensor) -> Tensor:
    """Logits float32 [R, V] of any number of rows whose norm is divided out, bf16 [R, D]; w [V, D].

    squares: float32 [1, 8], D in each: the sums of squares of such rows, made once by the caller, since a graph that is
    recorded would otherwise fill them anew in every step.
    """
    if normed_RD.shape[0] > dense.MOST_TOKENS:
        return product(normed_RD, w, torch.float32)
    fill = -normed_RD.shape[1] % PAD_K
    x = torch.nn.functional.pad(normed_RD, (0, fill)) if fill else normed_RD.contiguous()
    return head(x, squares, w, 0.0)
