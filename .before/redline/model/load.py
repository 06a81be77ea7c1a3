"""The model class for a checkpoint and a device: the GPU's own where its kernels run, the references' elsewhere."""

import torch

from redline.model import gpu, k2
from redline.model.checkpoint import Checkpoint
from redline.model.config import K2Config
from redline.ops.cuda import kernel


def load(checkpoint: Checkpoint, device: torch.device) -> k2.K2:
    if why_not(checkpoint.config, device) is None:
        return gpu.load(checkpoint, device)
    return k2.load(checkpoint, device)


def why_not(config: K2Config, device: torch.device) -> str | None:
    """One line, where the GPU's kernels do not run this model on this device; None where they do."""
    if not kernel.has_kernels(device):
        return kernel.why_not() if device.type == "cuda" else "not a GPU"
    if config.kv_lora_rank.bit_count() != 1 or config.kv_lora_rank > 512 or config.qk_rope_head_dim != 64:
        return "the GPU's kernels read latents of 64, 128, 256 or 512, and keys of 64"
    return None
