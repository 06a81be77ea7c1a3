"""residual += partial; y = residual / rms(residual) * w.        T tokens, D hidden.

The addition belongs to the next sublayer's norm: a sublayer returns its partial sum, so that the addition can later
be replaced by an all-reduce.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.ops.op import Case, Cost, Op


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis [..., D], in x's dtype; computed in float32."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


class AddNormArgs(NamedTuple):
    """Adds a sublayer's partial sum to the residual, and normalizes the result."""

    residual_TD: Tensor  # [T, D], float32 on a CPU; may be changed in place, and must not be used after the call
    partial_TD: Tensor | None  # [T, D] in the residual's dtype; None before the first layer: nothing to add
    weight_D: Tensor  # float32 [D]: weight of the norm
    eps: float  # added to the mean square


def reference(args: AddNormArgs) -> tuple[Tensor, Tensor]:
    """-> (residual, normed), each [T, D] in the residual's dtype."""
    residual = args.residual_TD if args.partial_TD is None else args.residual_TD + args.partial_TD
    return residual, rms_norm(residual, args.weight_D, args.eps)


def cost(args: AddNormArgs) -> Cost:
    """The residual and the partial sum are read and written once; operations are too few to count."""
    return Cost((2 if args.partial_TD is None else 4) * args.residual_TD.nbytes + args.weight_D.nbytes)


def cases() -> Iterator[Case]:
    """With and without a partial sum, at the widths of nano and Kimi, and at one that is no multiple of a vector."""

    def make(tokens: int, d: int, first: bool):
        def inputs(g: torch.Generator) -> AddNormArgs:
            partial = None if first else torch.randn(tokens, d, generator=g)
            return AddNormArgs(torch.randn(tokens, d, generator=g), partial, torch.rand(d, generator=g) + 0.5, 1e-5)

        return inputs

    yield Case("T=1 nano, first layer", make(1, 320, True))
    yield Case("T=1 nano", make(1, 320, False))
    yield Case("T=9 nano", make(9, 320, False))
    yield Case("T=3 odd width", make(3, 75, False))
    yield Case("T=4 Kimi", make(4, 7168, False))


add_norm = Op("add_norm", AddNormArgs, reference, cost, cases)
