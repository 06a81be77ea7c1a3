"""y = x W^T.        T tokens, K inputs, N outputs.

On a CPU x and y are float32, on a GPU bf16; W is bf16 on both.
"""

from collections.abc import Iterator
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from redline.ops.formats import Plain, W, Weight
from redline.ops.op import Case, Cost, Op

ROUNDED = 4e-3  # what rounding to bf16 may change, of the length of the result: 2^-9 a number at most


class LinearArgs(NamedTuple, Generic[W]):
    """What `linear` takes."""

    x_TK: Tensor
    weight: W
    rounded: bool = False


def reference(args: LinearArgs[Weight]) -> Tensor:
    """rounded: a kernel may round x to bf16."""
    return args.x_TK @ args.weight.dense().to(args.x_TK.dtype).T


def cost(args: LinearArgs[Weight]) -> Cost:
    x_TK, weight = args.x_TK, args.weight
    tokens, k = x_TK.shape
    y_bytes = tokens * weight.shape[-2] * x_TK.element_size()
    return Cost(x_TK.nbytes + weight.nbytes + y_bytes, 2 * tokens * k * weight.shape[-2])


def cases() -> Iterator[Case]:
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
