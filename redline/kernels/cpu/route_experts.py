"""`route_experts` on a CPU."""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.panels import Matrix, laid_out
from redline.kernels.kernel import Kernel
from redline.ops import route_experts as meaning
from redline.ops.formats import Weight


def run(x_TD: Tensor, weight: Matrix, bias_E: Tensor, k: int, normalise: bool, scale: float) -> tuple[Tensor, Tensor]:
    library = native.library()
    assert library is not None
    tokens, d = x_TD.shape
    ids = torch.empty(tokens, k, dtype=torch.int32)
    weights = torch.empty(tokens, k)
    library.redline_route_experts(
        native.pointer(x_TD),
        weight.address,
        native.pointer(bias_E),
        ids.data_ptr(),
        weights.data_ptr(),
        *(tokens, d, weight.outputs, k, normalise, scale),
    )
    return ids, weights


def fits(x_TD: Tensor, weight: Weight, *_: object) -> bool:
    return isinstance(weight, Matrix) and weight.panels


route_experts = Kernel(meaning.route_experts, run, "cpu", fits, laid_out)
