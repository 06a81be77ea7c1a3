"""residual += W y for T <= 8 tokens, and x of the norm that follows.        D hidden, K inputs.

Attention's output projection [D, H V], and the down projection of a dense MLP [D, I].
"""

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from redline.ops import dense
from redline.ops.cuda.kernel import address
from redline.ops.op import Case, Cost, Op
from redline.ops.tiled import PAD_K, Tiled, padded

Arguments = dense.arguments("ProjectOut", "residual gamma residual_out x_out squares_out")


def reference(y: Tensor, w: Tiled, residual_TD: Tensor, gamma_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y bf16 [T, K padded]; w [D, K]; residual float32 [T, D]; gamma_D float32 [D], of the norm that follows.

    -> (residual float32 [T, D], x bf16 [T, D padded], squares float32 [parts, 8]); `ops.dense` says what they are.
    """
    residual = residual_TD + dense.product(y, w)
    x = dense.pad_columns((residual * gamma_D).to(torch.bfloat16))
    return residual, x, dense.part_squares(residual, dense.blocks_of(w))


def cuda(y: Tensor, w: Tiled, residual_TD: Tensor, gamma_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, d_padded = y.shape[0], padded(w.outputs, PAD_K)
    kernel, blocks = dense.kernel_of("PROJECT_OUT", w, tokens, OUTPUTS_PADDED=d_padded)
    residual = torch.empty(tokens, w.outputs, device=y.device)
    x = torch.empty(tokens, d_padded, dtype=torch.bfloat16, device=y.device)
    squares = torch.empty(blocks, dense.MOST_TOKENS, device=y.device)
    given: ctypes.Structure = Arguments(
        *(address(w.data), address(y), 0, address(residual_TD), address(gamma_D)),
        *(address(residual), address(x), address(squares), tokens, 0, 0.0),
    )
    kernel.launch(given, blocks)
    return residual, x, squares


def fits(y: Tensor, w: Tiled, residual_TD: Tensor, gamma_D: Tensor) -> bool:
    return dense.fits(y, w)


def cost(y: Tensor, w: Tiled, residual_TD: Tensor, gamma_D: Tensor) -> Cost:
    tokens = y.shape[0]
    return dense.cost_of(w, tokens, y, residual_TD, residual_TD, gamma_D) + Cost(2 * tokens * w.outputs)


def cases() -> Iterator[Case]:
    def make(tokens: int, d: int, k: int):
        def inputs(g: torch.Generator) -> tuple[Tensor, Tiled, Tensor, Tensor]:
            y, _ = dense.random_x(g, tokens, k)
            residual, gamma = torch.randn(tokens, d, generator=g), torch.rand(d, generator=g) + 0.5
            return y, dense.random_tiled(g, d, k), residual, gamma

        return inputs

    yield Case("T=1 nano attention", make(1, 320, 512))
    yield Case("T=8 nano attention", make(8, 320, 512))
    for tokens in (1, 3, 8):
        yield Case(f"T={tokens} Kimi attention", make(tokens, 7168, 8192), small=False)
        yield Case(f"T={tokens} Kimi dense MLP", make(tokens, 7168, 18432), small=False)
    yield Case("T=2 nano dense MLP", make(2, 320, 768))
    yield Case("T=3 odd sizes", make(3, 58, 1300))
    yield Case("T=8 Kimi's heads", make(8, 48, 8192))
    yield Case("T=8 Kimi's dense MLP", make(8, 48, 18432))
    yield Case("T=1 Kimi's dense MLP", make(1, 32, 18432))


project_out = Op("project_out", reference, None, cost, cases, rtol=1e-4, cuda=cuda, cuda_fits=fits)
