"""Logits over the vocabulary: `head` for T <= 8 tokens, `head_8` for any number with an 8-bit weight.

D hidden, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.decode import dense
from redline.kernels.cuda.kernel import launch_record
from redline.kernels.cuda.layouts.tiled import PAD_K, PAD_K_8, Tiled, Tiled8
from redline.kernels.cuda.linear import product
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

_Launch = launch_record("decode/dense.cu", "HeadLaunch")
_Launch8 = launch_record("decode/dense.cu", "Head8Launch")


class HeadArgs(NamedTuple):
    """Multiplies each token's last state, normed as it is read, by the head."""

    x: Tensor  # bf16 [T, D padded]: as in `dense`; or already normed, with `squares` and eps that give an rms of 1
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
    """Whether dense.cu supports it: 1 to 8 tokens, bf16, an even V, and at most 256 parts of squares."""
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


head = Kernel(Op("head", HeadArgs, reference, cost, cases, rtol=dense.RTOL), cuda, "cuda", fits)


class Head8Args(NamedTuple):
    """Multiplies each token's last state, which is already normed, by an 8-bit head."""

    x: Tensor  # bf16 [T, D padded to 256 with zeros]
    w: Tiled8  # [V, D]


def _reference_8(args: Head8Args) -> Tensor:
    """-> logits float32 [T, V]."""
    return dense.product(args.x, args.w)


def _cuda_8(args: Head8Args) -> Tensor:
    """The reference's result: up to 8 tokens with dense.cu, more, or an odd V, with Triton."""
    x, w = args.x, args.w
    if x.shape[0] > dense.MOST_TOKENS or w.outputs % 2:
        from redline.kernels.cuda.triton import head as streamed  # Triton is imported only on use

        return streamed.head_8(x, w)
    kernel, blocks = dense.kernel_of(_Launch8, "HEAD_8", w, x.shape[0])
    logits = torch.empty(x.shape[0], w.outputs, device=x.device)
    given = _Launch8(
        weights=w.data, x=x, squares=None, scales=w.scales, logits=logits, tokens=x.shape[0], parts=0, eps=0.0
    )
    kernel.launch(given, blocks)
    return logits


def _fits_8(args: Head8Args) -> bool:
    """Whether there is at least one token, and x is bf16 and padded."""
    x, w = args.x, args.w
    padded_x = x.is_contiguous() and x.shape[1] == w.data.shape[1] * w.data.shape[3]
    return x.shape[0] >= 1 and x.dtype == torch.bfloat16 and padded_x


def _cost_8(args: Head8Args) -> Cost:
    """The head and x once, and the logits."""
    tokens = args.x.shape[0]
    return dense.cost_of(args.w, tokens, args.x) + Cost(4 * tokens * args.w.outputs)


def _cases_8() -> Iterator[Case]:
    """1 to 64 tokens at sizes of nano and of Kimi and at odd ones."""

    def make(tokens: int, v: int, d: int):
        def inputs(g: torch.Generator) -> Head8Args:
            x = dense.pad_columns(torch.randn(tokens, d, generator=g).to(torch.bfloat16), PAD_K_8)
            weight = torch.randn(v, d, generator=g) * (torch.rand(v, 1, generator=g) + 0.5) * d**-0.5
            return Head8Args(x, Tiled8.prepare(weight))

        return inputs

    yield Case("T=1 nano", make(1, 4096, 320))
    yield Case("T=8 nano's width", make(8, 512, 320))
    yield Case("T=9 nano's width", make(9, 512, 320))
    yield Case("T=70 nano's width", make(70, 256, 320))
    yield Case("T=2 Kimi's width", make(2, 4448, 7168))
    for tokens in (3, 17):
        yield Case(f"T={tokens} odd sizes", make(tokens, 90, 100))
    yield Case("T=3 odd vocabulary", make(3, 91, 100))
    for tokens in (1, 4, 8, 16, 64):
        yield Case(f"T={tokens} Kimi", make(tokens, 163840, 7168), small=False)


head_8 = Kernel(Op("head_8", Head8Args, _reference_8, _cost_8, _cases_8, rtol=dense.RTOL), _cuda_8, "cuda", _fits_8)


def logits_of(normed_RD: Tensor, w: Tiled | Tiled8, squares: Tensor) -> Tensor:
    """Logits float32 [R, V] of any number of rows that are already normed, bf16 [R, D]; w [V, D].

    squares: float32 [1, 8], D in each: the sums of squares of such rows. The caller makes them once, since a captured
    CUDA graph would otherwise fill them in every replay.
    """
    if isinstance(w, Tiled8):
        return head_8(_filled(normed_RD, PAD_K_8), w)
    if normed_RD.shape[0] > dense.MOST_TOKENS or w.outputs % 2:
        return product(normed_RD, w, torch.float32)
    return head(_filled(normed_RD, PAD_K), squares, w, 0.0)


def _filled(x: Tensor, to: int) -> Tensor:
    """x contiguous, its columns padded to a multiple of `to` with zeros."""
    return dense.pad_columns(x, to) if x.shape[1] % to else x.contiguous()
