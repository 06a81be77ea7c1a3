"""The likeliest token of each row, the first of them where several are.        R rows, V vocabulary.

And whether all of the row is finite: one look at the logits answers both.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from redline.ops import native
from redline.ops.cuda.kernel import Kernel, address, emulating, structure
from redline.ops.op import Case, Cost, Op

MOST_ROWS = 512  # of one launch
THREADS = 512
_BLOCKS = 264  # at once on an NVIDIA H200, two to a multiprocessor


def reference(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """-> (ids int64 [R], finite bool [R]). A row with a NaN has any id below V."""
    return logits_RV.argmax(-1), logits_RV.isfinite().all(-1)


def kernel(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    library = native.library()
    assert library is not None
    rows, vocabulary = logits_RV.shape
    ids, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    step = logits_RV.stride(0)
    library.redline_best(logits_RV.data_ptr(), step, ids.data_ptr(), finite.data_ptr(), rows, vocabulary)
    return ids, finite


def fits(logits_RV: Tensor) -> bool:
    return logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1


_Arguments = structure("Arguments", "logits found done ids finite", "vocabulary step")


@functools.cache
def _kernel(width: int) -> Kernel:
    return Kernel("best.cu", "best", {"WIDTH": width}, shared=THREADS // 32 * 16 + 16, threads=THREADS)


@functools.cache
def _done(device: torch.device) -> Tensor:
    """The rows' counters, zero between launches: of the launches on a device, one at a time runs."""
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), "`best` must run before it is recorded"
    return torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)


def cuda(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    assert logits_RV.is_cuda or emulating(), "a CUDA kernel was given a CPU tensor"
    (rows, vocabulary), step, device = logits_RV.shape, logits_RV.stride(0), logits_RV.device
    width = 4 if vocabulary % 4 == step % 4 == logits_RV.data_ptr() % 16 == 0 else 1
    parts = min(-(-vocabulary // (width * THREADS)), -(-_BLOCKS // max(rows, 1)))
    found = torch.empty(rows, parts, 4, dtype=torch.int32, device=device)
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    made = address(found), address(_done(device)), address(ids), address(finite)
    _kernel(width).launch(_Arguments(logits_RV.data_ptr(), *made, vocabulary, step), parts if rows else 0, rows)
    return ids, finite


def cuda_fits(logits_RV: Tensor) -> bool:
    return fits(logits_RV) and logits_RV.shape[0] <= MOST_ROWS


def cost(logits_RV: Tensor) -> Cost:
    return Cost(logits_RV.nbytes + 9 * logits_RV.shape[0])


def cases() -> Iterator[Case]:
    def make(rows: int, vocabulary: int):
        def inputs(g: torch.Generator) -> tuple[Tensor]:
            return (torch.randn(rows, vocabulary, generator=g),)

        return inputs

    def ties(g: torch.Generator) -> tuple[Tensor]:
        return (torch.randint(3, (40, 100), generator=g).float(),)

    def infinite(g: torch.Generator) -> tuple[Tensor]:
        x = torch.randn(4, 70, generator=g)
        x[0, 3], x[1, 69], x[2] = torch.inf, -torch.inf, -torch.inf
        return (x,)

    yield Case("R=1 nano", make(1, 4096))
    yield Case("R=64 nano", make(64, 4096))
    yield Case("many of the greatest, V no multiple of 16", ties)
    yield Case("infinite numbers", infinite)
    yield Case("R=4 Kimi", make(4, 163840))


best = Op("best", reference, kernel, cost, cases, fits=fits, cuda=cuda, cuda_fits=cuda_fits)
