"""The embedding of T <= 64 tokens, as the first layer of a step reads it (`ops.dense`).     D hidden, V vocabulary."""

import ctypes
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from redline.ops import dense
from redline.ops.cuda.kernel import Kernel, address, structure
from redline.ops.op import Case, Cost, Op
from redline.ops.tiled import PAD_K, padded

COLUMNS = 128  # of a block
Arguments = structure("Embed", "ids table gamma residual x squares", "tokens")


def reference(ids_T: Tensor, table_VD: Tensor, gamma_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ids_T int64; table_VD bf16; gamma_D float32, of the first layer's norm.

    -> (residual float32 [T, D], x bf16 [T, D padded], squares float32 [parts, T padded to 8])
    """
    residual = table_VD[ids_T].float()
    x = dense.pad_columns((residual * gamma_D).to(torch.bfloat16))
    parts = dense.pad_columns(residual.pow(2)).unflatten(-1, (-1, COLUMNS)).sum(-1).T
    return residual, x, dense.pad_columns(parts, dense.MOST_TOKENS)


@functools.cache
def _kernel(d: int) -> Kernel:
    sizes = {"HIDDEN": d, "HIDDEN_PADDED": padded(d, PAD_K)}
    return Kernel("embed.cu", "embed", sizes, shared=0, threads=32 * dense.MOST_TOKENS)


def cuda(ids_T: Tensor, table_VD: Tensor, gamma_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, d, device = ids_T.shape[0], table_VD.shape[1], table_VD.device
    blocks = padded(d, COLUMNS) // COLUMNS
    residual = torch.empty(tokens, d, device=device)
    x = torch.empty(tokens, padded(d, PAD_K), dtype=torch.bfloat16, device=device)
    squares = torch.empty(blocks, padded(tokens, dense.MOST_TOKENS), device=device)
    given: ctypes.Structure = Arguments(
        *(address(ids_T), address(table_VD), address(gamma_D)),
        *(address(residual), address(x), address(squares), tokens),
    )
    _kernel(d).launch(given, blocks, squares.shape[1] // dense.MOST_TOKENS)
    return residual, x, squares


def fits(ids_T: Tensor, table_VD: Tensor, gamma_D: Tensor) -> bool:
    return (
        1 <= ids_T.shape[0] <= dense.MOST_STREAMED and table_VD.dtype == torch.bfloat16 and table_VD.shape[1] % 4 == 0
    )


def cost(ids_T: Tensor, table_VD: Tensor, gamma_D: Tensor) -> Cost:
    return Cost(ids_T.shape[0] * table_VD.shape[1] * (2 + 4 + 2) + gamma_D.nbytes)


def cases() -> Iterator[Case]:
    def make(tokens: int, v: int, d: int):
        def inputs(g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
            table = torch.randn(v, d, generator=g).to(torch.bfloat16)
            return torch.randint(v, (tokens,), generator=g), table, torch.rand(d, generator=g) + 0.5

        return inputs

    yield Case("T=1 nano", make(1, 4096, 320))
    for tokens in (8, 9, 32, 64):
        yield Case(f"T={tokens} nano", make(tokens, 4096, 320))
    yield Case("T=3 odd width", make(3, 50, 76))
    yield Case("T=8 Kimi's width", make(8, 30, 7168))
    yield Case("T=64 Kimi's width", make(64, 30, 7168))


embed = Op("embed", reference, None, cost, cases, cuda=cuda, cuda_fits=fits)
