"""`best` on a CPU."""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.kernel import Kernel
from redline.ops import best as meaning

_best = native.function("best")


def run(args: meaning.BestArgs) -> tuple[Tensor, Tensor]:
    """The reference's result, by one native call."""
    logits_RV = args.logits_RV
    rows, vocabulary = logits_RV.shape
    ids, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    _best(x=logits_RV.data_ptr(), ldx=logits_RV.stride(0), ids=ids, finite=finite, R=rows, V=vocabulary)
    return ids, finite


def fits(args: meaning.BestArgs) -> bool:
    """Whether the logits are float32 and each row is contiguous; rows may be strided."""
    return args.logits_RV.dtype == torch.float32 and args.logits_RV.stride(1) == 1


best = Kernel(meaning.best, run, "cpu", fits)
