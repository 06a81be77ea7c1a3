"""Quantization to NVFP4: the choice of each 16-weight block's scale, and its error.

w[n, k] is stored as e2m1(code) x e4m3(block scale) x tensor scale (`ops.formats.Nvfp4`). Max scaling, ModelOpt's rule,
gives a block the scale max |w| / 6. The search also tries the neighbouring e4m3 numbers and keeps the one with the
least squared error: a scale that maps the largest weight to 4 instead of 6 wins for about half of all blocks, since the
grid has no 5. Positive e4m3 numbers ascend with their bytes, so neighbours are bytes a few up or down.

A searched weight has a power of two as its tensor scale. Then dividing by it (compressed-tensors) and multiplying by it
(ModelOpt) give the same, and a weight has 2 + 4 significant bits: every reader decodes it to the same bf16, exactly.

N outputs, K inputs, M blocks that are processed together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.ops.formats import E4M3_MOST, NVFP4_GROUP, NVFP4_MOST, Nvfp4

MAX_SCALING = (0,)
# Offsets of e4m3 bytes from that of max |w| / 6. Adding -2 and 7 would find the optimum among all 126 bytes; these two
# are best for one block in a hundred, and without them errors are within 0.1 % (`quantizers-cpu.json`).
SEARCHED = (0, -1, 1, 5, 4, 6, 3, 2)
WIDELY_SEARCHED = (*SEARCHED, -2, 7)  # with unequal input weights, -2 and 7 are best more often
BLOCKS_CPU = 4096  # processed together: 256 KiB of float32, so that all of it stays in a core's own cache
BLOCKS_GPU = 1 << 20  # for unequal input weights; otherwise one kernel does it all (`kernels.cuda.triton.nvfp4`)
_LARGEST_BYTE = 126  # e4m3's 448; 127 is NaN


@dataclass(frozen=True)
class OutputError:
    """The effect of quantization on a weight's outputs over the calibration texts: mean squares per token.

    seen         number of tokens
    calibrated   whether those were enough for calibration
    max_scaling  the squared error of max scaling
    """

    seen: int
    calibrated: bool
    squared: float
    output_squared: float
    max_scaling: float


@dataclass(frozen=True)
class Error:
    """The quantization error of a weight: sums of (w - rounded)^2 and of w^2, and the largest |w - rounded|.

    max_scaling: the first sum under max scaling instead of the search; equal to it if there was no search.
    outputs: None unless calibration texts were read.
    """

    squared: float
    weight_squared: float
    largest: float
    max_scaling: float
    outputs: OutputError | None = None


def max_scale(largest: float) -> float:
    """The tensor scale of max scaling: gives the block of the largest |w| the largest e4m3, 448. 1 for zero weights."""
    return float(torch.tensor(largest / (NVFP4_MOST * E4M3_MOST))) if largest > 0 else 1.0


def exact_scale(largest: float) -> float:
    """The power of two under which a block of the largest |w| reaches every searched scale, max |w| / 3 at most.

    Nothing saturates then. A block's scale is a normal e4m3 number, with all three bits of its fraction, if its largest
    weight is more than 1/7,168 of the tensor's. 1 for a zero weight.
    """
    return 2.0 ** math.ceil(math.log2(largest / (3 * E4M3_MOST))) if largest > 0 else 1.0


def round_nvfp4(
    weight_NK: Tensor, scale: float, offsets: Sequence[int], importance_K: Tensor | None = None
) -> tuple[Nvfp4, Error]:
    """Quantize a weight [N, K] of any float dtype, K divisible by 16, under a tensor scale.

    offsets       e4m3 bytes that a block tries, as offsets from that of its max |w| / 6; 0 must be among them
    importance_K  float32 weight of each input's squared error in the choice of scales; None: equal weights

    A block of zeros gets the smallest scale, and codes of zero. Codes are rounded to nearest, ties to even.
    """
    N, K = weight_NK.shape
    device = weight_NK.device
    if device.type == "cuda" and importance_K is None:
        return round_all([weight_NK], scale, offsets)[0]
    blocks = weight_NK.reshape(-1, NVFP4_GROUP)
    codes = torch.empty(N * K // NVFP4_GROUP, NVFP4_GROUP // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(N * K // NVFP4_GROUP, dtype=torch.uint8, device=device)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    largest = torch.zeros((), device=device)
    weights = None
    if importance_K is not None:  # block m has the columns of (m mod K / 16)
        weights = importance_K.float().view(-1, NVFP4_GROUP).repeat(N, 1)
    together = BLOCKS_CPU if device.type == "cpu" else BLOCKS_GPU
    part = Nvfp4Workspace(0, device)
    for first in range(0, blocks.shape[0], together):
        some = slice(first, first + together)
        if part.blocks != blocks[some].shape[0]:
            part = Nvfp4Workspace(blocks[some].shape[0], device)
        part.take(blocks[some], scale, None if weights is None else weights[some])
        byte, squared, plain = part.search(offsets)
        codes[some], farthest = part.codes(byte)
        scales[some] = byte.to(torch.uint8)
        largest = torch.maximum(largest, farthest)
        sums += torch.stack([squared.sum(), torch.dot(part.w.view(-1), part.w.view(-1)), plain.sum()])
    return _result(codes.view(N, K // 2), scales.view(N, K // NVFP4_GROUP), scale, [*sums.tolist(), largest.item()])


def round_all(weights: Sequence[Tensor], scale: float, offsets: Sequence[int]) -> list[tuple[Nvfp4, Error]]:
    """`round_nvfp4` for each weight, with a single GPU synchronization."""
    if not all(weight.is_cuda for weight in weights):
        return [round_nvfp4(weight, scale, offsets) for weight in weights]
    from redline.kernels.cuda.triton import nvfp4 as gpu

    begun = [gpu.round_nvfp4(weight, scale, offsets) for weight in weights]
    return [_result(codes, scales, scale, gpu.totals(sums)) for codes, scales, sums in begun]


def _result(codes: Tensor, scales: Tensor, scale: float, sums: Sequence[float]) -> tuple[Nvfp4, Error]:
    """sums: the squared error, the weights' squares, max scaling's squared error, the largest error, all unscaled."""
    squared, whole, plain, largest = sums
    packed = Nvfp4(codes, scales.view(torch.float8_e4m3fn), torch.full((1,), scale, device=codes.device))
    return packed, Error(squared * scale**2, whole * scale**2, largest * scale, plain * scale**2)


def packed(rounded_NK: Tensor, scale: float, bytes_NB: Tensor) -> Nvfp4:
    """Packs weights [N, K] already rounded to the grid of their blocks' scales: e4m3 bytes, integers [N, K / 16]."""
    N, K = rounded_NK.shape
    part = Nvfp4Workspace(N * K // NVFP4_GROUP, rounded_NK.device)
    part.take(rounded_NK.reshape(-1, NVFP4_GROUP), scale, None)
    codes, _ = part.codes(bytes_NB.reshape(-1).int())
    scales = bytes_NB.to(torch.uint8).view(torch.float8_e4m3fn)
    return Nvfp4(codes.reshape(N, K // 2), scales, torch.tensor([scale], device=rounded_NK.device))


class Nvfp4Workspace:
    """Working memory for M blocks, allocated once: fresh memory takes a core the time of an operation.

    w  |weights| over the tensor scale, float32 [16, M], so that sums over a block run along the first axis
    """

    def __init__(self, blocks: int, device: torch.device) -> None:
        self.blocks = blocks
        shape = NVFP4_GROUP, blocks
        self.w, self._y, self._step, self._value = (torch.empty(shape, device=device) for _ in range(4))
        self._sign, self._code = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        self._importance: Tensor | None = None

    def take(self, blocks: Tensor, scale: float, importance: Tensor | None) -> None:
        """Load weights [M, 16] and the weights of their errors, or None."""
        self.w.copy_(blocks.T)
        torch.bitwise_right_shift(self.w.view(torch.int32), 28, out=self._sign).bitwise_and_(8)
        self.w.abs_().div_(scale)
        self._importance = None if importance is None else importance.T.contiguous()

    def search(self, offsets: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """(e4m3 byte int32 [M] with the least error, its squared error [M], that of max scaling [M])."""
        middle = (self.w.amax(0) / NVFP4_MOST).clamp_(max=E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8).int()
        best_byte, best, plain = middle, torch.empty(0), torch.empty(0)
        for number, offset in enumerate((0, *(one for one in offsets if one))):
            byte = (middle + offset).clamp_(1, _LARGEST_BYTE)
            unit = unit_of(byte)
            y = torch.mul(self.w, 1 / unit, out=self._y)
            error = self._nearest(y, self._value, clipped=offset <= 0).sub_(y).square_()
            if self._importance is not None:
                error.mul_(self._importance)
            squared = error.sum(0).mul_(unit).mul_(unit)
            if not number:
                best_byte, best, plain = byte, squared, squared
                continue
            better = squared < best
            best_byte, best = torch.where(better, byte, best_byte), torch.where(better, squared, best)
        return best_byte, best, plain

    def codes(self, byte: Tensor) -> tuple[Tensor, Tensor]:
        """Codes for these block scales in pairs, uint8 [M, 8]; the largest |error| over the tensor scale, []."""
        unit = unit_of(byte)
        y = torch.div(self.w, unit, out=self._y)
        value = self._nearest(y, self._value)
        farthest = y.sub_(value).abs_().amax(0).mul_(unit).max()
        # From 1 on, a code counts the exponent and the first bit of the fraction; below 1 it counts halves.
        code = torch.bitwise_right_shift(value.view(torch.int32), 22, out=self._code).sub_(252)
        torch.maximum(code, torch.mul(value, 2, out=self._step).clamp_(max=1).int(), out=code)
        nibbles = code.bitwise_or_(self._sign).to(torch.uint8)
        return (nibbles[0::2] | nibbles[1::2] << 4).T, farthest

    def _nearest(self, y: Tensor, out: Tensor, clipped: bool = True) -> Tensor:
        """Write and return the nearest e2m1 of non-negative values: steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6.

        clipped: False if no value is above 6, because the scale is above max |w| / 6.

        A float32 between 2^23 and 2^24 is an integer, so adding and subtracting 1.5 x 2^23 steps rounds to a multiple
        of the step, ties to even.
        """
        step = self._step
        torch.bitwise_and(y.view(torch.int32), 0x7F800000, out=step.view(torch.int32))
        step.clamp_(1, 4).mul_(0.75 * 2**23)
        torch.add(y, step, out=out).sub_(step)
        return out.clamp_(max=NVFP4_MOST) if clipped else out


def unit_of(byte: Tensor) -> Tensor:
    """The e4m3 numbers of positive bytes, int32 -> float32: the same bits, with the exponent's bias corrected.

    torch's own conversion takes half the time of everything else together.
    """
    return (byte << 20).view(torch.float32) * 2.0**120


def largest(weights: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each weight, NaN if it contains one; a single GPU synchronization."""
    return torch.stack([torch.linalg.vector_norm(weight, math.inf).float() for weight in weights]).tolist()
