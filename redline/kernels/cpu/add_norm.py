"""`add_norm` on a CPU: the residual is changed in place."""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.kernel import Kernel
from redline.ops import add_norm as meaning


def run(args: meaning.AddNormArgs) -> tuple[Tensor, Tensor]:
    """-> (the same residual, changed in place; normed [T, D]). Tensors are contiguous float32."""
    residual_TD = args.residual_TD
    library = native.library()
    assert library is not None
    y = torch.empty_like(residual_TD)
    partial = 0 if args.partial_TD is None else native.pointer(args.partial_TD)
    tokens, d = residual_TD.shape
    library.redline_add_norm(
        native.pointer(residual_TD), partial, native.pointer(args.weight_D), y.data_ptr(), args.eps, tokens, d
    )
    return residual_TD, y


add_norm = Kernel(meaning.add_norm, run, "cpu")
