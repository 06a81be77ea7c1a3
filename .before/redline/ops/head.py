"""Logits of T <= 8 tokens over the vocabulary.        D hidden, V vocabulary."""

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from redline.ops import dense
from redline.ops.cuda.kernel import address
from redline.ops.op import Case, Cost, Op
from redline.ops.tiled import Tiled

Arguments = dense.arguments("Head", "logits")


def reference(x: Tensor, squares: Tensor, w: Tiled, eps: float) -> Tensor:
    """x bf16 [T, D padded], squares float32 [parts, 8] (`ops.dense`); w [V, D]. -> logits float32 [T, V]."""
    return dense.product(x, w) * dense.rstd_of(squares, x.shape[0], w.inputs, eps)


def cuda(x: Tensor, squares: Tensor, w: Tiled, eps: float) -> Tensor:
    kernel, blocks = dense.kernel_of("HEAD", w, x.shape[0])
    logits = torch.empty(x.shape[0], w.outputs, device=x.device)
    given: ctypes.Structure = Arguments(
        *(address(w.data), address(x), address(squares), address(logits), x.shape[0], squares.shape[0], eps)
    )
    kernel.launch(given, blocks)
    return logits


def fits(x: Tensor, squares: Tensor, w: Tiled, eps: float) -> bool:
    return dense.fits(x, w) and squares.shape[0] <= dense.MOST_PARTS


def cost(x: Tensor, squares: Tensor, w: Tiled, eps: float) -> Cost:
    return dense.cost_of(w, x.shape[0], x, squares) + Cost(4 * x.shape[0] * w.outputs)


def cases() -> Iterator[Case]:
    def make(tokens: int, v: int, d: int):
        def inputs(g: torch.Generator) -> tuple[Tensor, Tensor, Tiled, float]:
            return *dense.random_x(g, tokens, d), dense.random_tiled(g, v, d), 1e-5

        return inputs

    yield Case("T=1 nano", make(1, 4096, 320))
    yield Case("T=8 nano's width", make(8, 512, 320))
    yield Case("T=3 odd sizes", make(3, 90, 100))
    for tokens in (1, 8):
        yield Case(f"T={tokens} Kimi", make(tokens, 163840, 7168), small=False)


head = Op("head", reference, None, cost, cases, rtol=dense.RTOL, cuda=cuda, cuda_fits=fits)
