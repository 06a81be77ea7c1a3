"""A bf16 weight in tiles of 16 outputs x 32 inputs, as the GPU's kernels stream it.        N outputs, K inputs.

A tile is 1 KB, row-major, and is what one warp multiplies in two mma.sync: lane 4g + t finds its fragments in the 16
bytes at row g, columns 8t to 8t + 7, and in the same of row g + 8. Tiles of a row follow one another, so a warp's share
of K is one bulk copy.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

TILE_N, TILE_K = 16, 32
PAD_K = 128  # inputs, to a multiple of which K is padded: four warps share it


def padded(size: int, to: int) -> int:
    """The least multiple of `to` that is at least `size`."""
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
        """[..., N, K] bf16: the weight that was given, bit for bit."""
        full = self.data.transpose(-3, -2).flatten(-2).flatten(-3, -2)
        return full[..., : self.outputs, : self.inputs]

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K), the padding left out."""
        return (*self.data.shape[:-4], self.outputs, self.inputs)

    @property
    def nbytes(self) -> int:
        """Bytes of the data, the padding counted."""
        return self.data.nbytes
