"""A weight in tiles of 16 outputs x 32 inputs of bf16, or x 64 of int8, the layout that the GPU kernels stream.

A tile is 1 KB, row-major, and is multiplied by one warp in two mma.sync, or in four: lane 4g + t reads its fragments
from the t-th 16 bytes of row g, and of row g + 8. The tiles of a row are consecutive, so a warp's share of K is one
bulk copy.

N outputs, K inputs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.ops.formats import int8_round

TILE_N, TILE_K = 16, 32
PAD_K = 128  # K is padded to a multiple of this: four warps divide it
TILE_K_8, PAD_K_8 = 64, 256  # the same for an 8-bit weight
_ROWS_AT_ONCE = 4096  # rows of a weight that are rounded together; bounds the float32 copies


def padded(size: int, to: int) -> int:
    """The smallest multiple of `to` that is at least `size`."""
    return -(-size // to) * to


@dataclass(frozen=True)
class Tiled:
    """data bf16 [..., N / 16, K / 32, 16, 32], N padded to 16 and K to 128 with zeros."""

    data: Tensor
    outputs: int
    inputs: int

    @staticmethod
    def prepare(weight: Tensor) -> "Tiled":
        """weight bf16 [..., N, K], on any device; new memory."""
        n, k = weight.shape[-2:]
        full = F.pad(weight, (0, padded(k, PAD_K) - k, 0, padded(n, TILE_N) - n))
        tiles = full.unflatten(-1, (-1, TILE_K)).unflatten(-3, (-1, TILE_N)).transpose(-3, -2)
        return Tiled(tiles.contiguous(), n, k)

    def dense(self) -> Tensor:
        """[..., N, K] bf16: the original weight, bit for bit."""
        full = self.data.transpose(-3, -2).flatten(-2).flatten(-3, -2)
        return full[..., : self.outputs, : self.inputs]

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K), without padding."""
        return (*self.data.shape[:-4], self.outputs, self.inputs)

    @property
    def nbytes(self) -> int:
        """Bytes of the data, including padding."""
        return self.data.nbytes


@dataclass(frozen=True)
class Tiled8:
    """data int8 [N / 16, K / 64, 16, 64], N padded to 16 and K to 256 with zeros; scales float32 [N padded].

    A value is its integer times the scale of its row.
    """

    data: Tensor
    scales: Tensor
    outputs: int
    inputs: int

    @staticmethod
    def prepare(weight: Tensor | Tiled, device: torch.device | None = None) -> "Tiled8":
        """weight [N, K] in floating point or in bf16 tiles, on any device; new memory there, or on `device`.

        Rounded by `int8_round`.
        """
        n, k = weight.shape
        device = device or weight.data.device
        k_padded = padded(k, PAD_K_8)
        data = torch.zeros(padded(n, TILE_N) // TILE_N, k_padded // TILE_K_8, TILE_N, TILE_K_8, dtype=torch.int8)
        data, scales = data.to(device), torch.zeros(padded(n, TILE_N), device=device)
        for first in range(0, n, _ROWS_AT_ONCE):
            end = min(first + _ROWS_AT_ONCE, n)
            codes, scale = int8_round(_rows(weight, first, end).to(device))
            full = F.pad(codes, (0, k_padded - k, 0, padded(end, TILE_N) - end))
            tiles = full.unflatten(1, (-1, TILE_K_8)).unflatten(0, (-1, TILE_N)).transpose(1, 2)
            data[first // TILE_N : first // TILE_N + tiles.shape[0]] = tiles
            scales[first:end] = scale
        return Tiled8(data, scales, n, k)

    def dense(self) -> Tensor:
        """[N, K] float32: the rounded weight."""
        full = self.data.transpose(1, 2).flatten(2).flatten(0, 1)
        return (full * self.scales[:, None])[: self.outputs, : self.inputs]

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K), without padding."""
        return self.outputs, self.inputs

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales, including padding."""
        return self.data.nbytes + self.scales.nbytes


def _rows(weight: Tensor | Tiled, first: int, end: int) -> Tensor:
    """Rows [first, end) of a weight, `first` a multiple of 16."""
    if isinstance(weight, Tensor):
        return weight[first:end]
    tiles = slice(first // TILE_N, padded(end, TILE_N) // TILE_N)
    return Tiled(weight.data[tiles], end - first, weight.inputs).dense()
