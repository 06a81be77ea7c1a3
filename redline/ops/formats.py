"""Packed weights as plain dataclasses: the docstring is the formula.

E experts (or any leading axes), N outputs, K inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

INT4_GROUP = 32


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
        """Of the weight that this stands for: [..., N, K]."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 8)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes

    def codes(self) -> Tensor:
        """u, int32 [..., N, K], 0..15."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=self.packed.device)
        return (self.packed[..., None] >> shifts & 15).flatten(-2)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[..., N, K]. Exact in float32: 4 bits times bf16's 8 fit in 24."""
        groups = (self.codes() - 8).float().unflatten(-1, (-1, INT4_GROUP))
        return (groups * self.scale.float()[..., None]).flatten(-2).to(dtype)


def int4_scale(weight: Tensor) -> Tensor:
    """The scale of each group of 32 inputs: max |w| / 7.5, rounded to bf16; 1 where the group is zero.

    weight [..., N, K] -> bf16 [..., N, K // 32]. The symmetric minmax observer of compressed-tensors does the same.
    """
    amax = weight.float().unflatten(-1, (-1, INT4_GROUP)).abs().amax(-1)
    return torch.where(amax > 0, amax / 7.5, torch.ones_like(amax)).to(torch.bfloat16)


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
    """Quantise and dequantise, float32 [..., N, K]: for quantisation-aware training, which adds straight-through."""
    q, scale = int4_round(weight)
    return (q.unflatten(-1, (-1, INT4_GROUP)) * scale.float()[..., None]).flatten(-2)
