"""y = x W^T.        T tokens, K inputs, N outputs.

On a CPU x and y are float32, on a GPU bf16; W is bf16 on both.
"""

from collections.abc import Iterator
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from redline.ops.formats import Plain, W, Weight
from redline.ops.op import Case, Cost, Op

ROUNDED = 4e-3  # relative error (of norms) from rounding x to bf16: at most 2^-9 per number


class LinearArgs(NamedTuple, Generic[W]):
    """Computes y = x W^T."""

    x_TK: Tensor  # [T, K]; float32 on a CPU, bf16 on a GPU
    weight: W  # bf16 [N, K], in the layout of its chip
    rounded: bool = False  # whether a kernel may round x to bf16; the reference never does


def reference(args: LinearArgs[Weight]) -> Tensor:
    """-> y [T, N] in x's dtype; the weight is converted to that dtype first."""
    return args.x_TK @ args.weight.dense().to(args.x_TK.dtype).T


def cost(args: LinearArgs[Weight]) -> Cost:
    """x, the weight and y move once; two operations per weight and token."""
    x_TK, weight = args.x_TK, args.weight
    tokens, k = x_TK.shape
    y_bytes = tokens * weight.shape[-2] * x_TK.element_size()
    return Cost(x_TK.nbytes + weight.nbytes + y_bytes, 2 * tokens * k * weight.shape[-2])


def cases() -> Iterator[Case]:
    """Nano's o_proj over few and many tokens, exact and rounded; an N that is no multiple of a panel; Kimi's sizes."""

    def make(tokens: int, k: int, n: int, rounded: bool = False):
        def inputs(g: torch.Generator) -> LinearArgs[Weight]:
            weight = torch.randn(n, k, generator=g).to(torch.bfloat16)
            return LinearArgs(torch.randn(tokens, k, generator=g), Plain(weight), rounded)

        return inputs

    for tokens in (1, 2, 3, 5, 13, 70):
        yield Case(f"T={tokens} nano o_proj", make(tokens, 512, 320))
    for tokens in (1, 2, 3, 4, 6, 8, 12, 31, 70):
        yield Case(f"T={tokens} nano o_proj, rounded", make(tokens, 512, 320, True), rtol=ROUNDED)
    yield Case("T=4 N not a multiple of 32", make(4, 96, 50))
    yield Case("T=1 Kimi q_a + kv_a", make(1, 7168, 2112), small=False)
    yield Case("T=4 Kimi o_proj", make(4, 8192, 7168), small=False)


linear = Op("linear", LinearArgs[Weight], reference, cost, cases)
