"""y = x W^T.        T tokens, K inputs, N outputs.

On a CPU x and y are float32 and W stays bf16: each output is one chain in the order of k, exact in its products, or of
x rounded to bf16 where the caller allows it: then 32 multiplications are one instruction instead of two, as on a GPU.
On a GPU both are bf16; a weight in tiles is streamed for few tokens, and laid out anew for the library for many.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from redline.ops import native
from redline.ops.op import Case, Cost, Op
from redline.ops.tiled import Tiled
from redline.ops.weights import PANEL, Matrix

ROUNDED = 4e-3  # what rounding to bf16 may change, of the length of the result: 2^-9 a number at most
STREAMED = 192  # tokens up to which a product streams its tiles; more are the library's


def reference(x_TK: Tensor, weight: Matrix | Tiled, rounded: bool = False) -> Tensor:
    """rounded: a kernel may round x to bf16."""
    return x_TK @ weight.dense().to(x_TK.dtype).T


def kernel(x_TK: Tensor, weight: Matrix | Tiled, rounded: bool = False) -> Tensor:
    library = native.library()
    assert library is not None
    assert isinstance(weight, Matrix), "the CPU's kernels read panels"
    tokens, k = x_TK.shape
    padded = (weight.outputs + PANEL - 1) // PANEL * PANEL
    y = torch.empty(tokens, padded)
    library.redline_linear(native.pointer(x_TK), k, weight.address, y.data_ptr(), padded, tokens, padded, k, rounded)
    return y if padded == weight.outputs else y[:, : weight.outputs]


def fits(x_TK: Tensor, weight: Matrix | Tiled, rounded: bool = False) -> bool:
    return isinstance(weight, Matrix) and weight.panels


def cuda(x_TK: Tensor, weight: Matrix | Tiled, rounded: bool = False) -> Tensor:
    assert isinstance(weight, Tiled)
    return product(x_TK, weight, x_TK.dtype)


def product(x_TK: Tensor, weight: Tiled, dtype: torch.dtype) -> Tensor:
    """[T, N] of that type. x bf16 [T, K], or filled with zeros to the multiple of 128 that the tiles have."""
    if x_TK.shape[0] > STREAMED:
        return torch.mm(x_TK[:, : weight.inputs], weight.dense().T, out_dtype=dtype)
    from redline.ops.triton_kernels.linear import linear as streamed  # Triton is imported where it is used

    fill = weight.data.shape[-3] * 32 - x_TK.shape[1]
    return streamed(torch.nn.functional.pad(x_TK, (0, fill)) if fill else x_TK, weight, dtype)


def cuda_fits(x_TK: Tensor, weight: Matrix | Tiled, rounded: bool = False) -> bool:
    return isinstance(weight, Tiled) and x_TK.dtype == torch.bfloat16


def cost(x_TK: Tensor, weight: Matrix | Tiled, rounded: bool = False) -> Cost:
    tokens, k = x_TK.shape
    y_bytes = tokens * weight.outputs * x_TK.element_size()
    return Cost(x_TK.nbytes + weight.nbytes + y_bytes, 2 * tokens * k * weight.outputs)


def cases() -> Iterator[Case]:
    def make(tokens: int, k: int, n: int, rounded: bool = False):
        def inputs(g: torch.Generator) -> tuple[Tensor, Matrix, bool]:
            weight = torch.randn(n, k, generator=g).to(torch.bfloat16)
            return torch.randn(tokens, k, generator=g), Matrix.prepare(weight), rounded

        return inputs

    for tokens in (1, 2, 3, 5, 13, 70):
        yield Case(f"T={tokens} nano o_proj", make(tokens, 512, 320))
    for tokens in (1, 2, 3, 4, 6, 8, 12, 31, 70):
        yield Case(f"T={tokens} nano o_proj, rounded", make(tokens, 512, 320, True), rtol=ROUNDED)
    yield Case("T=4 N not a multiple of 32", make(4, 96, 50))
    yield Case("T=1 Kimi q_a + kv_a", make(1, 7168, 2112), small=False)
    yield Case("T=4 Kimi o_proj", make(4, 8192, 7168), small=False)


linear = Op("linear", reference, kernel, cost, cases, fits=fits, cuda=cuda, cuda_fits=cuda_fits)
