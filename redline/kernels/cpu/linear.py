"""`linear` on a CPU: each output is accumulated in the order of k.

Products are exact; or, if the caller allows it, x is rounded to bf16: then 32 multiplications are one instruction
instead of two, and the result is rounded as on a GPU.
"""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.panels import PANEL, Matrix, laid_out
from redline.kernels.kernel import Kernel
from redline.ops import linear as meaning
from redline.ops.formats import Weight

_linear = native.function("linear")


def run(args: meaning.LinearArgs[Matrix]) -> Tensor:
    """-> y float32 [T, N]; a view of wider rows if N is not a multiple of the panel width."""
    weight = args.weight
    tokens, k = args.x_TK.shape
    padded = (weight.outputs + PANEL - 1) // PANEL * PANEL
    y = torch.empty(tokens, padded)
    _linear(x=args.x_TK, ldx=k, w=weight.data, y=y, ldy=padded, T=tokens, N=padded, K=k, rounded=args.rounded)
    return y if padded == weight.outputs else y[:, : weight.outputs]


def fits(args: meaning.LinearArgs[Weight]) -> bool:
    """Whether the weight is in panels, the only layout that the C++ reads; K is then a multiple of 32."""
    return isinstance(args.weight, Matrix) and args.weight.panels


linear = Kernel(meaning.linear, run, "cpu", fits, laid_out)
