"""Logits of T <= 8 tokens over the vocabulary.        D hidden, V vocabulary."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.hopper.decode import dense
from redline.kernels.hopper.kernel import launch_record
from redline.kernels.hopper.layouts.tiled import Tiled
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

_Launch = launch_record("decode/dense.cu", "HeadLaunch")


class HeadArgs(NamedTuple):
    """What `head` takes."""

    x: Tensor
    squares: Tensor
    w: Tiled
    eps: float


def reference(args: HeadArgs) -> Tensor:
    """x bf16 [T, D padded], squares float32 [parts, 8] (`dense`); w [V, D]. -> logits float32 [T, V]."""
    return dense.product(args.x, args.w) * dense.rstd_of(args.squares, args.x.shape[0], args.w.inputs, args.eps)


def cuda(args: HeadArgs) -> Tensor:
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
    return dense.fits(args.x, args.w) and args.squares.shape[0] <= dense.MOST_PARTS


def cost(args: HeadArgs) -> Cost:
    x = args.x
    return dense.cost_of(args.w, x.shape[0], x, args.squares) + Cost(4 * x.shape[0] * args.w.outputs)


def cases() -> Iterator[Case]:
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
