"""`add_norm` on a CPU: the residual is changed in place."""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.kernel import Kernel
from redline.ops import add_norm as meaning

_add_norm = native.function("add_norm")


def run(args: meaning.AddNormArgs) -> tuple[Tensor, Tensor]:
    """-> (the same residual, changed in place; normed [T, D]). Both tensors are contiguous float32."""
    residual_TD = args.residual_TD
    tokens, d = residual_TD.shape
    y = torch.empty_like(residual_TD)
    _add_norm(residual=residual_TD, partial=args.partial_TD, w=args.weight_D, y=y, eps=args.eps, T=tokens, D=d)
    return residual_TD, y


add_norm = Kernel(meaning.add_norm, run, "cpu")
