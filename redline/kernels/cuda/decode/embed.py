"""The embedding of T <= 256 tokens, in the form that the first layer reads (`dense`).     D hidden, V vocabulary."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.decode import dense
from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.layouts.tiled import PAD_K, padded
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

COLUMNS = 128  # per block
_Launch = launch_record("decode/embed.cu", "EmbedLaunch")


class EmbedArgs(NamedTuple):
    """Looks up each token's embedding, and prepares the input of the first layer's matmul."""

    ids_T: Tensor  # int64 [T]
    table_VD: Tensor  # bf16 [V, D]
    gamma_D: Tensor  # float32 [D]: weight of the first layer's norm


def reference(args: EmbedArgs) -> tuple[Tensor, Tensor, Tensor]:
    """-> (residual float32 [T, D], x bf16 [T, D padded], squares float32 [D padded / 128, T padded to 8])."""
    residual = args.table_VD[args.ids_T].float()
    x = dense.pad_columns((residual * args.gamma_D).to(torch.bfloat16))
    parts = dense.pad_columns(residual.pow(2)).unflatten(-1, (-1, COLUMNS)).sum(-1).T
    return residual, x, dense.pad_columns(parts, dense.MOST_TOKENS)


@functools.cache
def _kernel(d: int) -> CudaKernel:
    sizes = {"HIDDEN": d, "HIDDEN_PADDED": padded(d, PAD_K)}
    return CudaKernel("decode/embed.cu", "embed", _Launch, sizes, shared=0, threads=32 * dense.MOST_TOKENS)


def cuda(args: EmbedArgs) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's result; a block computes 128 columns of 8 tokens."""
    table_VD = args.table_VD
    tokens, d, device = args.ids_T.shape[0], table_VD.shape[1], table_VD.device
    blocks = padded(d, COLUMNS) // COLUMNS
    residual = torch.empty(tokens, d, device=device)
    x = torch.empty(tokens, padded(d, PAD_K), dtype=torch.bfloat16, device=device)
    squares = torch.empty(blocks, padded(tokens, dense.MOST_TOKENS), device=device)
    given = _Launch(
        ids=args.ids_T,
        table=table_VD,
        gamma=args.gamma_D,
        residual=residual,
        x=x,
        squares=squares,
        tokens=tokens,
    )
    _kernel(d).launch(given, blocks, squares.shape[1] // dense.MOST_TOKENS)
    return residual, x, squares


def fits(args: EmbedArgs) -> bool:
    """Whether there are 1 to 256 tokens, the table is bf16, and D is a multiple of 4: a thread has four columns."""
    return (
        1 <= args.ids_T.shape[0] <= dense.MOST_STREAMED
        and args.table_VD.dtype == torch.bfloat16
        and args.table_VD.shape[1] % 4 == 0
    )


def cost(args: EmbedArgs) -> Cost:
    """The tokens' rows, the residual, x, and the norm's weights once; operations are not counted."""
    return Cost(args.ids_T.shape[0] * args.table_VD.shape[1] * (2 + 4 + 2) + args.gamma_D.nbytes)


def cases() -> Iterator[Case]:
    """1 to 64 tokens at nano's and Kimi's widths and at an odd one; few rows of the table, since few are read."""

    def make(tokens: int, v: int, d: int):
        def inputs(g: torch.Generator) -> EmbedArgs:
            table = torch.randn(v, d, generator=g).to(torch.bfloat16)
            return EmbedArgs(torch.randint(v, (tokens,), generator=g), table, torch.rand(d, generator=g) + 0.5)

        return inputs

    yield Case("T=1 nano", make(1, 4096, 320))
    for tokens in (8, 9, 32, 64):
        yield Case(f"T={tokens} nano", make(tokens, 4096, 320))
    yield Case("T=3 odd width", make(3, 50, 76))
    yield Case("T=8 Kimi's width", make(8, 30, 7168))
    yield Case("T=64 Kimi's width", make(64, 30, 7168))


embed = Kernel(Op("embed", EmbedArgs, reference, cost, cases), cuda, "cuda", fits)
