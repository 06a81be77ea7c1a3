"""`linear` on a GPU: tiles are streamed for few tokens; for many the weight is converted for cuBLAS."""

from typing import Protocol

import torch
from torch import Tensor

from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.kernel import Kernel
from redline.ops import linear as meaning
from redline.ops.formats import Weight

STREAMED = 512  # maximum tokens for which a matmul streams its tiles; more use cuBLAS


def run(args: meaning.LinearArgs[Tiled]) -> Tensor:
    """-> y bf16 [T, N]."""
    return product(args.x_TK, args.weight, args.x_TK.dtype)


def product(x_TK: Tensor, weight: Tiled, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """-> y [T, N] of that dtype. x bf16 [T, K], or with K padded with zeros to the tiles' multiple of 128.

    out: memory for y, optional; bf16.
    """
    if x_TK.shape[0] > STREAMED:
        return products(weight, dtype)(x_TK, out)
    from redline.kernels.cuda.triton.linear import linear as streamed  # Triton is imported only on use

    fill = weight.data.shape[-3] * 32 - x_TK.shape[1]
    return streamed(torch.nn.functional.pad(x_TK, (0, fill)) if fill else x_TK, weight, dtype, out)


class Products(Protocol):
    """`product` with a fixed weight and dtype."""

    def __call__(self, x_TK: Tensor, out: Tensor | None = None) -> Tensor:
        """As `product`."""
        ...


def products(weight: Tiled, dtype: torch.dtype) -> Products:
    """`product` with one weight, for several parts of rows: the weight is converted for cuBLAS only once."""
    laid: list[Tensor] = []

    def one(x_TK: Tensor, out: Tensor | None = None) -> Tensor:
        if x_TK.shape[0] <= STREAMED:
            return product(x_TK, weight, dtype, out)
        if not laid:
            from redline.kernels.cuda.triton.linear import laid_out

            laid.append(laid_out(weight).T)
        x_TK = x_TK[:, : weight.inputs]
        return torch.mm(x_TK, laid[0], out_dtype=dtype) if out is None else torch.mm(x_TK, laid[0], out=out)

    return one


def fits(args: meaning.LinearArgs[Weight]) -> bool:
    """Whether x is bf16 and the weight is in tiles; any number of tokens."""
    return isinstance(args.weight, Tiled) and args.x_TK.dtype == torch.bfloat16


linear = Kernel(meaning.linear, run, "cuda", fits)
