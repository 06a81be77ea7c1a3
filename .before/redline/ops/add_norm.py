"""residual += partial; y = residual / rms(residual) * w.        T tokens, D hidden.

The addition belongs to the next sublayer's norm: a sublayer returns its partial sum, so that an all-reduce can later
stand in its place (DESIGN section 4).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from redline.ops import native
from redline.ops.op import Case, Cost, Op


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, statistics in float32."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def reference(residual_TD: Tensor, partial_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """-> (residual, normed). `residual_TD` may be changed in place and must not be used afterwards."""
    residual = residual_TD if partial_TD is None else residual_TD + partial_TD
    return residual, rms_norm(residual, weight_D, eps)


def kernel(residual_TD: Tensor, partial_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    library = native.library()
    assert library is not None
    y = torch.empty_like(residual_TD)
    partial = 0 if partial_TD is None else native.pointer(partial_TD)
    tokens, d = residual_TD.shape
    library.redline_add_norm(
        native.pointer(residual_TD), partial, native.pointer(weight_D), y.data_ptr(), eps, tokens, d
    )
    return residual_TD, y


def cost(residual_TD: Tensor, partial_TD: Tensor | None, weight_D: Tensor, eps: float) -> Cost:
    return Cost((3 if partial_TD is None else 4) * residual_TD.nbytes + weight_D.nbytes)


def cases() -> Iterator[Case]:
    def make(tokens: int, d: int, first: bool):
        def inputs(g: torch.Generator) -> tuple[Tensor, Tensor | None, Tensor, float]:
            partial = None if first else torch.randn(tokens, d, generator=g)
            return torch.randn(tokens, d, generator=g), partial, torch.rand(d, generator=g) + 0.5, 1e-5

        return inputs

    yield Case("T=1 nano, first layer", make(1, 320, True))
    yield Case("T=1 nano", make(1, 320, False))
    yield Case("T=9 nano", make(9, 320, False))
    yield Case("T=3 odd width", make(3, 75, False))
    yield Case("T=4 Kimi", make(4, 7168, False))


add_norm = Op("add_norm", reference, kernel, cost, cases)
