"""Every rank's columns side by side on every rank: logits of a head whose rows are divided.    R rows, V columns."""

import functools

import torch
from torch import Tensor

from redline.kernels.hopper.decode import dense
from redline.kernels.hopper.kernel import CudaKernel, launch_record
from redline.kernels.hopper.ranks import Links

_Launch = launch_record("decode/gather_ranks.cu", "GatherRanksLaunch")
_THREADS = 512


@functools.cache
def _kernel(width: int, ranks: int) -> CudaKernel:
    sizes = {"WIDTH": width, "RANKS": ranks}
    return CudaKernel("decode/gather_ranks.cu", "gather_ranks", _Launch, sizes, shared=0, threads=_THREADS)


def gather_ranks(part_RV: Tensor, links: Links) -> Tensor:
    """float32 [R, V / ranks] of each rank -> [R, V]; V / ranks is a multiple of 4, R columns fit in a room."""
    (rows, width), device = part_RV.shape, part_RV.device
    assert rows * width <= links.gathered, f"{rows} rows of {width} columns; a room has {links.gathered} words"
    whole = torch.empty(rows, links.ranks * width, device=device)
    given = _Launch(part=part_RV.contiguous(), whole=whole, rows=rows, **links.of_gather())
    blocks = min(dense.multiprocessors(device), -(-rows * width // (4 * _THREADS)))
    _kernel(width, links.ranks).launch(given, blocks)
    return whole
