"""`checksum` on a CPU, in the calling thread only: it is memory-bound, and the other threads are busy."""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.kernel import Kernel
from redline.ops import checksum as meaning

_checksum = native.function("checksum")


def run(args: meaning.ChecksumArgs) -> Tensor:
    """The reference's result, by one native call."""
    out = torch.empty((), dtype=torch.int64)
    _checksum(data=args.data_N, sum=out, count=args.data_N.numel(), seed=args.seed)
    return out


def fits(args: meaning.ChecksumArgs) -> bool:
    """Whether the bytes are uint8 and contiguous."""
    return args.data_N.dtype == torch.uint8 and args.data_N.is_contiguous()


def of_memory(address: int, count: int, seed: int) -> int:
    """The checksum of bytes of this process's memory, in [0, 2^64). Requires the kernels (`native.library`)."""
    out = torch.empty((), dtype=torch.int64)
    _checksum(data=address, sum=out, count=count, seed=seed)
    return meaning.number(out)


def run_rows(args: meaning.ChecksumsArgs) -> Tensor:
    """The reference's result, by one native call per row."""
    out_R = torch.empty(len(args.seeds), dtype=torch.int64)
    for row, (data_N, seed) in enumerate(zip(args.data_RN, args.seeds, strict=True)):
        _checksum(data=data_N, sum=out_R[row], count=data_N.numel(), seed=seed)
    return out_R


def fits_rows(args: meaning.ChecksumsArgs) -> bool:
    """Whether the bytes are uint8 and contiguous."""
    return args.data_RN.dtype == torch.uint8 and args.data_RN.is_contiguous()


checksum = Kernel(meaning.checksum, run, "cpu", fits)
checksums = Kernel(meaning.checksums, run_rows, "cpu", fits_rows)
