"""`sample` on a CPU."""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.kernel import Kernel
from redline.kernels.record import record
from redline.messages.job import OPTIONS
from redline.ops import sample as meaning

_sample = native.function("sample")
READ = tuple(name for name, *_ in record(native.HERE / "core/kernels.h", "SampleOdds")._fields_)


def run(args: meaning.SampleArgs) -> Tensor:
    """-> ids int64 [R]. `narrowed` is not used: each row's parameters show whether it is filtered.

    A row with an option of which sample.cpp knows nothing is drawn by the reference, alone: no other row is part of it.
    """
    logits_RV, odds_RC = args.logits_RV, args.odds_RC
    rows, vocabulary = logits_RV.shape
    ids = torch.empty(rows, dtype=torch.int64)
    x, step = logits_RV.data_ptr(), logits_RV.stride(0)
    read_RC = odds_RC.contiguous() if READ == meaning.COLUMNS else odds_RC[:, [meaning.COLUMN[name] for name in READ]]
    _sample(x=x, ldx=step, odds=read_RC.data_ptr(), ids=ids, R=rows, V=vocabulary)
    for name in set(meaning.ODDS) - set(READ):
        for row in (odds_RC[:, meaning.COLUMN[name]] != OPTIONS[name].neutral).nonzero().flatten().tolist():
            ids[row] = meaning.reference(meaning.SampleArgs(logits_RV[row, None], odds_RC[row, None], True))
    return ids


def fits(args: meaning.SampleArgs) -> bool:
    """Whether the logits are float32 and each row is contiguous; rows may be strided."""
    return args.logits_RV.dtype == torch.float32 and args.logits_RV.stride(1) == 1


sample = Kernel(meaning.sample, run, "cpu", fits)
