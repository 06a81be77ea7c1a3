"""`best` on a GPU: parts of a row in blocks of their own; the last of them to end has the row's answer."""

import functools

import torch
from torch import Tensor

from redline.kernels.hopper.kernel import CudaKernel, emulating, launch_record
from redline.kernels.kernel import Kernel
from redline.ops import best as meaning

MOST_ROWS = 512  # of one launch
THREADS = 512
_BLOCKS = 264  # at once on an NVIDIA H200, two to a multiprocessor
_Launch = launch_record("step/best.cu", "BestLaunch")


@functools.cache
def _kernel(width: int) -> CudaKernel:
    return CudaKernel(
        "step/best.cu", "best", _Launch, {"WIDTH": width}, shared=THREADS // 32 * 16 + 16, threads=THREADS
    )


@functools.cache
def _done(device: torch.device) -> Tensor:
    """The rows' counters, zero between launches: of the launches on a device, one at a time runs."""
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), "`best` must run before it is recorded"
    return torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)


def run(args: meaning.BestArgs) -> tuple[Tensor, Tensor]:
    logits_RV = args.logits_RV
    assert logits_RV.is_cuda or emulating(), "a CUDA kernel was given a CPU tensor"
    (rows, vocabulary), step, device = logits_RV.shape, logits_RV.stride(0), logits_RV.device
    width = 4 if vocabulary % 4 == step % 4 == logits_RV.data_ptr() % 16 == 0 else 1
    parts = min(-(-vocabulary // (width * THREADS)), -(-_BLOCKS // max(rows, 1)))
    found = torch.empty(rows, parts, 4, dtype=torch.int32, device=device)
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    given = _Launch(
        logits=logits_RV.data_ptr(),  # its rows may lie apart
        found=found,
        done=_done(device),
        ids=ids,
        finite=finite,
        vocabulary=vocabulary,
        step=step,
    )
    _kernel(width).launch(given, parts if rows else 0, rows)
    return ids, finite


def fits(args: meaning.BestArgs) -> bool:
    logits_RV = args.logits_RV
    return logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1 and logits_RV.shape[0] <= MOST_ROWS


best = Kernel(meaning.best, run, "hopper", fits)
