"""Chooses the model class for a checkpoint and a device: the GPU's own if its kernels run there, or the references'."""

import torch
from torch import Tensor

from redline.kernels.group import ALONE, Group
from redline.kernels.hopper import kernel
from redline.model.k2 import cpu, hopper
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config


def load(checkpoint: Checkpoint, device: torch.device, group: Group = ALONE) -> cpu.K2:
    """The model of a checkpoint on a device: the GPU's own class if `why_not` returns None, else the references'.

    group: tensor parallel ranks; only this rank's part is loaded. ConfigError if the model cannot be divided evenly;
    CheckpointError if a norm or the router contains a number that is not finite.
    """
    if why_not(checkpoint.config, device) is None:
        return hopper.load(checkpoint, device, group=group)
    return cpu.load(checkpoint, device, group=group)


def load_layer(checkpoint: Checkpoint, device: torch.device, layer: int, embedding_VD: Tensor) -> cpu.K2:
    """One layer of a checkpoint as a model, of the same class as in `load`; see `cpu.load_layer`."""
    own = why_not(checkpoint.config, device) is None
    return (hopper if own else cpu).load_layer(checkpoint, device, layer, embedding_VD)


def why_not(config: K2Config, device: torch.device) -> str | None:
    """The reason, in one line, why the GPU kernels do not support this model or device; None if they do."""
    if not kernel.has_kernels(device):
        return kernel.why_not() if device.type == "cuda" else "not a GPU"
    if config.kv_lora_rank.bit_count() != 1 or config.kv_lora_rank > 512 or config.qk_rope_head_dim != 64:
        return "the GPU's kernels read latents of 64, 128, 256 or 512, and keys of 64"
    return None
