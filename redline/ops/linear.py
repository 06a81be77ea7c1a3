"""y = x W^T.        T tokens, K inputs, N outputs.

On a CPU x and y are float32 and W stays bf16: each output is one chain of float32 multiply-adds in the order of k.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from redline.ops import native
from redline.ops.op import Case, Cost, Op
from redline.ops.weights import PANEL, Matrix


def reference(x_TK: Tensor, weight: Matrix) -> Tensor:
    return x_TK @ weight.dense().to(x_TK.dtype).T


def kernel(x_TK: Tensor, weight: Matrix) -> Tensor:
    library = native.library()
    assert library is not None
    tokens, k = x_TK.shape
    padded = (weight.outputs + PANEL - 1) // PANEL * PANEL
    y = torch.empty(tokens, padded)
    library.redline_linear(native.pointer(x_TK), k, weight.address, y.data_ptr(), padded, tokens, padded, k)
    return y if padded == weight.outputs else y[:, : weight.outputs]


def cost(x_TK: Tensor, weight: Matrix) -> Cost:
    tokens, k = x_TK.shape
    y_bytes = tokens * weight.outputs * x_TK.element_size()
    return Cost(x_TK.nbytes + weight.nbytes + y_bytes, 2 * tokens * k * weight.outputs)


def cases() -> Iterator[Case]:
    def make(tokens: int, k: int, n: int):
        def inputs(g: torch.Generator) -> tuple[Tensor, Matrix]:
            weight = torch.randn(n, k, generator=g).to(torch.bfloat16)
            return torch.randn(tokens, k, generator=g), Matrix.prepare(weight)

        return inputs

    for tokens in (1, 2, 3, 5, 13, 70):
        yield Case(f"T={tokens} nano o_proj", make(tokens, 512, 320))
    yield Case("T=4 N not a multiple of 32", make(4, 96, 50))
    yield Case("T=1 Kimi q_a + kv_a", make(1, 7168, 2112), small=False)
    yield Case("T=4 Kimi o_proj", make(4, 8192, 7168), small=False)


linear = Op("linear", reference, kernel, cost, cases)
