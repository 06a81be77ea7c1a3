"""`best` on a GPU: several blocks compute parts of a row; the last one to finish writes the row's result."""

import functools

import torch
from torch import Tensor

from redline.kernels.cuda.kernel import CudaKernel, emulating, launch_record
from redline.kernels.kernel import Kernel
from redline.ops import best as meaning

MOST_ROWS = 512  # maximum per launch
THREADS = 512
_BLOCKS = 264  # resident at once on an NVIDIA H200, two per multiprocessor
_Launch = launch_record("step/best.cu", "BestLaunch")


@functools.cache
def _kernel(width: int) -> CudaKernel:
    return CudaKernel(
        "step/best.cu", "best", _Launch, {"WIDTH": width}, shared=THREADS // 32 * 16 + 16, threads=THREADS
    )


@functools.cache
def counters(device: torch.device) -> Tensor:
    """The rows' counters, int32 [512], zero between launches; only one launch may run on a device at a time. The first
    call allocates them, and must not be part of a graph's capture."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "`counters` comes before captures"
    return torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)


def run(args: meaning.BestArgs) -> tuple[Tensor, Tensor]:
    """The reference's result."""
    logits_RV = args.logits_RV
    assert logits_RV.is_cuda or emulating(), "a CUDA kernel was given a CPU tensor"
    (rows, vocabulary), step, device = logits_RV.shape, logits_RV.stride(0), logits_RV.device
    width = 4 if vocabulary % 4 == step % 4 == logits_RV.data_ptr() % 16 == 0 else 1
    parts = min(-(-vocabulary // (width * THREADS)), -(-_BLOCKS // max(rows, 1)))
    found = torch.empty(rows, parts, 4, dtype=torch.int32, device=device)
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    given = _Launch(
        logits=logits_RV.data_ptr(),  # rows may be strided
        found=found,
        done=counters(device),
        ids=ids,
        finite=finite,
        vocabulary=vocabulary,
        step=step,
    )
    _kernel(width).launch(given, parts if rows else 0, rows)
    return ids, finite


def fits(args: meaning.BestArgs) -> bool:
    """Whether the logits are float32, each row is contiguous, and there are at most 512 rows (one counter each)."""
    logits_RV = args.logits_RV
    return logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1 and logits_RV.shape[0] <= MOST_ROWS


best = Kernel(meaning.best, run, "cuda", fits)
