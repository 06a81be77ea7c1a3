"""Reads the vision tower and projector of a checkpoint, and writes random ones for tests and measurements."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from redline.errors import CheckpointError
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import read_json
from redline.model.vision.config import VisionConfig
from redline.model.vision.tower import VisionTower

_READABLE = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}


def vision_config(folder: Path | str, text_hidden: int) -> VisionConfig | None:
    """The tower of a checkpoint folder; None if its config.json has no vision_config. Raises CheckpointError."""
    path = Path(folder) / "config.json"
    return VisionConfig.from_dict(read_json(path), text_hidden, str(path))


def load_tower(checkpoint: Checkpoint, config: VisionConfig, device: torch.device) -> VisionTower:
    """Copies tower and projector onto a device: in float32 on a CPU, in bf16 on a GPU.

    CheckpointError for a missing or misshapen tensor, or a format that is not read: published files, quantised ones
    too, store the tower in bf16.
    """
    stored = {name: tensor for file in checkpoint.files.values() for name, tensor in file.items()}
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    weights: dict[str, Tensor] = {}
    for name, _ in config.tensors():
        if name not in stored:
            continue  # the tower names what is missing
        tensor = stored[name]
        if tensor.dtype not in _READABLE:
            expected = ", ".join(_READABLE)
            raise CheckpointError(f"{tensor.file}: {name} has dtype {tensor.dtype}; expected one of {expected}")
        values = checkpoint.raw(tensor).clone().view(_READABLE[tensor.dtype]).view(tensor.shape)
        weights[name] = values.to(device, dtype)
    return VisionTower(config, weights)


def random_tensors(config: VisionConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(stored name, bf16 tensor), scaled so that activations neither vanish nor grow."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in config.tensors():
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            values = 0.1 * values + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        elif "pos_emb" not in name:
            values /= values[0].numel() ** 0.5
        yield name, values.to(torch.bfloat16)
