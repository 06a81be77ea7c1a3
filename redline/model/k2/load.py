"""Opens checkpoints of Kimi K2, and chooses the model class for a device: the GPU's own if its kernels run there, or
the references'."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from redline.kernels.cuda import kernel
from redline.kernels.group import ALONE, Group
from redline.model.k2 import cpu, cuda
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config


def load(checkpoint: Checkpoint, device: torch.device, group: Group = ALONE) -> cpu.K2:
    """The model of a checkpoint on a device: the GPU's own class if `why_not` returns None, else the references'.

    group: tensor parallel ranks; only this rank's part is loaded. ConfigError if the model cannot be divided evenly;
    CheckpointError if a norm or the router contains a number that is not finite.
    """
    if why_not(checkpoint.config, device) is None:
        return cuda.load(checkpoint, device, group=group)
    return cpu.load(checkpoint, device, group=group)


def load_layer(checkpoint: Checkpoint, device: torch.device, layer: int, embedding_VD: Tensor) -> cpu.K2:
    """One layer of a checkpoint as a model, of the same class as in `load`; see `cpu.load_layer`."""
    own = why_not(checkpoint.config, device) is None
    return (cuda if own else cpu).load_layer(checkpoint, device, layer, embedding_VD)


def why_not(config: K2Config, device: torch.device) -> str | None:
    """The reason, in one line, why the GPU kernels do not support this model or device; None if they do."""
    if not kernel.has_kernels(device):
        return kernel.why_not() if device.type == "cuda" else "not a GPU"
    if config.n_group > 1:
        return "no GPU kernel routes within groups of experts"
    if config.kv_lora_rank.bit_count() != 1 or config.kv_lora_rank > 512 or config.qk_rope_head_dim != 64:
        return "the GPU's kernels read latents of 64, 128, 256 or 512, and keys of 64"
    return None


class LatentLoader:
    """The `ModelLoader` of models with latent attention and routed experts."""

    def config(self, folder: Path | str) -> K2Config:
        return K2Config.from_folder(folder)

    def open(self, folder: Path | str) -> Checkpoint:
        return Checkpoint.open(folder)

    def load(self, checkpoint: Checkpoint, device: torch.device, group: Group) -> cpu.K2:
        return load(checkpoint, device, group)

    def random(
        self,
        config: K2Config,
        in_memory: int,
        tokens: int,
        device: torch.device,
        progress: Callable[[int, int], object],
        group: Group,
    ) -> cpu.K2:
        from redline.model.k2.random_weights import random_k2  # which imports this module

        return random_k2(config, in_memory, tokens, device, progress, group)

    def refusal(self, config: K2Config, device: torch.device) -> str | None:
        return None


LOADER = LatentLoader()
