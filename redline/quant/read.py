"""Reads a checkpoint's weight as plain numbers, whatever its format."""

from typing import cast

import torch
from torch import Tensor

from redline.model.k2.checkpoint import Checkpoint, CheckpointWeight, Projection
from redline.ops.formats import Int4, Nvfp4


def dense(checkpoint: Checkpoint, weight: CheckpointWeight, device: torch.device) -> Tensor:
    """A weight [N, K], dequantized: float32 from 4 bits, else bf16 or the stored dtype."""
    if weight.kind != "expert":
        return checkpoint.plain(weight.name).to(device)
    _, layer, _, _, expert, projection, _ = weight.name.split(".")
    stored = checkpoint.expert(int(layer), int(expert), cast(Projection, projection.removesuffix("_proj")))
    match stored:
        case Int4(packed, scale):
            return _dequantized(Int4(packed.to(device), scale.to(device)))
        case Nvfp4(codes, scales, scale):
            return Nvfp4(codes.to(device), scales.to(device), scale.to(device)).dequantize()
        case Tensor():
            return stored.to(device)


def _dequantized(weight: Int4) -> Tensor:
    if not weight.packed.is_cuda:
        return weight.dequantize()
    from redline.kernels.cuda.triton.nvfp4 import dequantize_int4

    return dequantize_int4(weight)
