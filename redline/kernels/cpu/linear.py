"""`linear` on a CPU: each output is one chain in the order of k.

Products are exact; or x is rounded to bf16 where the caller allows it: then 32 multiplications are one instruction
instead of two, as on a GPU.
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
    """-> y float32 [T, N]; a view of wider rows where N is no whole panel."""
    weight = args.weight
    tokens, k = args.x_TK.shape
    padded = (weight.outputs + PANEL - 1) // PANEL * PANEL
    y = torch.empty(tokens, padded)
    _linear(x=args.x_TK, ldx=k, w=weight.data, y=y, ldy=padded, T=tokens, N=padded, K=k, rounded=args.rounded)
    return y if padded == weight.outputs else y[:, : weight.outputs]


def fits(args: meaning.LinearArgs[Weight]) -> bool:
    """Whether the weight lies in panels, which it does where K is a multiple of 32: the C++ reads nothing else."""
    return isinstance(args.weight, Matrix) and args.weight.panels


linear = Kernel(meaning.linear, run, "cpu", fits, laid_out)
