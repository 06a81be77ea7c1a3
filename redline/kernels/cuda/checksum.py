"""`checksum` and `checksums` on a GPU, in Triton, without synchronising with the host."""

from torch import Tensor

from redline.kernels.kernel import Kernel
from redline.ops import checksum as meaning


def run(args: meaning.ChecksumArgs) -> Tensor:
    """The reference's result: int64 [] on the device."""
    from redline.kernels.cuda.triton.checksum import checksum

    return checksum(args.data_N, args.seed)


def fits(args: meaning.ChecksumArgs) -> bool:
    """Whether the bytes are contiguous and begin at a word boundary."""
    return args.data_N.is_contiguous() and args.data_N.data_ptr() % 8 == 0


def run_rows(args: meaning.ChecksumsArgs) -> Tensor:
    """The reference's result: int64 [R] on the device, in one launch."""
    from redline.kernels.cuda.triton.checksum import checksums

    return checksums(args.data_RN, args.seeds)


def fits_rows(args: meaning.ChecksumsArgs) -> bool:
    """Whether the bytes are contiguous, and each row begins and ends at a word boundary."""
    data_RN = args.data_RN
    return data_RN.is_contiguous() and data_RN.data_ptr() % 8 == 0 and data_RN.shape[1] % 8 == 0


checksum = Kernel(meaning.checksum, run, "cuda", fits)
checksums = Kernel(meaning.checksums, run_rows, "cuda", fits_rows)
