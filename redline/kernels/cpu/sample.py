"""`sample` on a CPU."""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.kernel import Kernel
from redline.ops import sample as meaning

_sample = native.function("sample")


def run(args: meaning.SampleArgs) -> Tensor:
    """-> ids int64 [R]. `narrowed` is not used: each row's parameters show whether it is top-k / top-p filtered."""
    logits_RV = args.logits_RV
    rows, vocabulary = logits_RV.shape
    ids = torch.empty(rows, dtype=torch.int64)
    x, step = logits_RV.data_ptr(), logits_RV.stride(0)
    _sample(x=x, ldx=step, odds=args.odds_R5, ids=ids, R=rows, V=vocabulary)
    return ids


def fits(args: meaning.SampleArgs) -> bool:
    """Whether the logits are float32 and each row is contiguous; rows may be strided."""
    return args.logits_RV.dtype == torch.float32 and args.logits_RV.stride(1) == 1


sample = Kernel(meaning.sample, run, "cpu", fits)
