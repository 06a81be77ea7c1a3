"""Weights in the form that ops take; packed formats are plain dataclasses with their formula as docstring.

E experts (or any leading axes), N outputs, K inputs.
"""

import itertools
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

INT4_GROUP = 32
INT8_STEPS = 127


class Weight(Protocol):
    """A bf16 weight [..., N, K] in the layout of its chip."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K), without the layout's padding."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the layout, including its padding."""
        ...

    def dense(self) -> Tensor:
        """[..., N, K] bf16, bit-exact."""
        ...


W = TypeVar("W", bound=Weight, covariant=True)  # the layout of the weights in an op's record


class ExpertWeights(Protocol):
    """One projection of all experts of a layer, [E, N, K], in any format, in the layout of its chip."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, N, K), without the layout's padding."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all experts, including scales and padding."""
        ...

    def matrix(self, expert: int) -> Tensor:
        """[N, K] of one expert: bf16 if stored as bf16, float32 if dequantized from 4 bits."""
        ...


@dataclass(frozen=True)
class Plain:
    """A bf16 weight [..., N, K] without packing: a `Weight`, and with three axes also an `ExpertWeights`."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K)"""
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.data.nbytes

    def dense(self) -> Tensor:
        """The data itself, not a copy."""
        return self.data

    def matrix(self, expert: int) -> Tensor:
        """[N, K] bf16 of one expert, a view; the weight has three axes."""
        return self.data[expert]


@dataclass(frozen=True)
class Int4:
    """w[n, k] = (u[n, k] - 8) * scale[n, k // 32], u in 0..15 (offset binary, compressed-tensors' pack-quantized).

    packed  int32 [..., N, K // 8]   u of column 8c + i is bits [4i, 4i + 4) of word c
    scale   bf16  [..., N, K // 32]
    """

    packed: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K) of the unpacked weight."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 8)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales: 4.5 bits per weight."""
        return self.packed.nbytes + self.scale.nbytes

    def codes(self) -> Tensor:
        """u, int32 [..., N, K], 0..15."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=self.packed.device)
        return (self.packed[..., None] >> shifts & 15).flatten(-2)

    def matrix(self, expert: int) -> Tensor:
        """[N, K] float32 of one expert; the weight is [E, N, K]."""
        return Int4(self.packed[expert], self.scale[expert]).dequantize()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[..., N, K]. Exact in float32: a 4-bit code times a bf16 scale (8 significant bits) fits in 24 bits."""
        groups = (self.codes() - 8).float().unflatten(-1, (-1, INT4_GROUP))
        return (groups * self.scale.float()[..., None]).flatten(-2).to(dtype)


def int8_round(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row symmetrically to 127 steps of its largest magnitude -> (q int8 [N, K], scale float32 [N]).

    A weight is q * scale. If a row contains a number that is not finite, its scale is NaN, and so the whole row is.
    """
    weight_NK = weight_NK.float()
    most_N = weight_NK.abs().amax(1)
    scale_N = torch.where(most_N.isfinite(), most_N / INT8_STEPS, torch.nan)
    q_NK = (weight_NK / scale_N.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().nan_to_num(0.0)
    return q_NK.clamp(-INT8_STEPS, INT8_STEPS).to(torch.int8), scale_N


def int4_scale(weight: Tensor, steps: float = 7.5) -> Tensor:
    """The scale of each group of 32 inputs: max |w| / steps, rounded to bf16; 1 if the group is zero.

    weight [..., N, K] -> bf16 [..., N, K // 32]. 7.5 steps equal compressed-tensors' minmax observer.
    """
    amax = weight.float().unflatten(-1, (-1, INT4_GROUP)).abs().amax(-1)
    return torch.where(amax > 0, amax / steps, torch.ones_like(amax)).to(torch.bfloat16)


def int4_round(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to the nearest code: [..., N, K] -> (q float32 [..., N, K] in -8..7, scale bf16 [..., N, K // 32])."""
    scale = int4_scale(weight)
    groups = weight.float().unflatten(-1, (-1, INT4_GROUP))
    q = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    return q.flatten(-2), scale


def quantize_int4(weight: Tensor) -> Int4:
    """weight [..., N, K], K divisible by 32 -> Int4. `fake_int4` of the same weight is its exact `dequantize`."""
    q, scale = int4_round(weight)
    u = (q.to(torch.int32) + 8).unflatten(-1, (-1, 8))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
    return Int4(packed=(u << shifts).sum(-1, dtype=torch.int32), scale=scale)


def fake_int4(weight: Tensor) -> Tensor:
    """Quantize and dequantize, float32 [..., N, K]; for quantization-aware training by a straight-through estimator."""
    q, scale = int4_round(weight)
    return (q.unflatten(-1, (-1, INT4_GROUP)) * scale.float()[..., None]).flatten(-2)


NVFP4_GROUP = 16
NVFP4_MOST = 6.0  # the largest e2m1 value
E4M3_MOST = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the low three bits of a code; bit 3 is the sign


@dataclass(frozen=True)
class Nvfp4:
    """w[n, k] = e2m1(code[n, k]) * scales[n, k // 16] * scale[n S // N], as NVIDIA's ModelOpt defines it.

    compressed-tensors stores 1 / scale. Rows are S stacked matrices of equal height (gate, up), with one scale each.

    codes   uint8          [..., N, K // 2]   column 2c in the low four bits of byte c, 2c + 1 in the high ones
    scales  float8_e4m3fn  [..., N, K // 16]
    scale   float32        [..., S]
    """

    codes: Tensor
    scales: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K) of the unpacked weight."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and both kinds of scales: 4.5 bits per weight, and 4 bytes per stacked matrix."""
        return self.codes.nbytes + self.scales.nbytes + self.scale.nbytes

    def matrix(self, expert: int) -> Tensor:
        """[N, K] float32 of one expert; the weight is [E, N, K]."""
        return Nvfp4(self.codes[expert], self.scales[expert], self.scale[expert]).dequantize()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[..., N, K]. One rounding in float32: code times block scale is exact (2 and 4 significant bits)."""
        values = torch.tensor((*_E2M1, *(-v for v in _E2M1)), device=self.codes.device)
        codes = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(-2)
        blocks = values[codes.int()].unflatten(-1, (-1, NVFP4_GROUP)) * self.scales.float()[..., None]
        stacked = blocks.flatten(-2).unflatten(-2, (self.scale.shape[-1], -1)) * self.scale[..., None, None]
        return stacked.flatten(-3, -2).to(dtype)


def quantize_nvfp4(weight: Tensor) -> Nvfp4:
    """weight [..., N, K], K divisible by 16 -> Nvfp4 of one matrix, as ModelOpt's max calibration computes it.

    The matrix's scale is max |w| / (6 x 448); a block's scale is its max |w| / 6 divided by the matrix's scale, rounded
    to e4m3. Codes are rounded to nearest, ties to even.
    """
    w = weight.float()
    scale = w.abs().amax((-2, -1)) / (NVFP4_MOST * E4M3_MOST)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))[..., None]
    blocks = w.unflatten(-1, (-1, NVFP4_GROUP)) / scale[..., None, None]
    scales = (blocks.abs().amax(-1) / NVFP4_MOST).to(torch.float8_e4m3fn)
    unit = scales.float()[..., None]
    values = torch.where(unit > 0, blocks / unit, torch.zeros_like(blocks)).flatten(-2)
    codes = _nearest_e2m1(values.abs()) | (values < 0).to(torch.uint8) << 3
    return Nvfp4(codes[..., 0::2] | codes[..., 1::2] << 4, scales, scale)


def _nearest_e2m1(magnitude: Tensor) -> Tensor:
    """The nearest code of each magnitude, uint8 0..7: ties to even, magnitudes above 6 saturate."""
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for low, (below, above) in enumerate(itertools.pairwise(_E2M1)):
        middle = (below + above) / 2
        code += (magnitude >= middle if low % 2 else magnitude > middle).to(torch.uint8)
    return code
