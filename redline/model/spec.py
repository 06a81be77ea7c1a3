"""The model families that Redline serves; a `ModelSpec` is the interface of one to the other packages.

This module imports no torch, so the API process can read it; a family's code is imported when `loader` is first read.
docs/models.md describes how to add a family.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from redline.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from redline.kernels.group import Group
    from redline.model.k2.checkpoint import Checkpoint
    from redline.model.k2.config import K2Config
    from redline.model.k2.cpu import K2


class ModelLoader(Protocol):
    """Opens a family's checkpoints. The geometry that `config` returns has the KV layout (bytes per token), the sizes
    and the costs (bytes of weights, parameters); the model that `load` returns has the forward pass."""

    def config(self, folder: Path | str) -> K2Config:
        """The geometry, from config.json. Raises CheckpointError with key, value and what is supported."""
        ...

    def open(self, folder: Path | str) -> Checkpoint:
        """Opens a checkpoint: reads headers only. Raises CheckpointError."""
        ...

    def load(self, checkpoint: Checkpoint, device: torch.device, group: Group) -> K2:
        """Copies the checkpoint, or this rank's part of it, onto the device. Raises CheckpointError, ConfigError."""
        ...

    def random(
        self,
        config: K2Config,
        in_memory: int,
        tokens: int,
        device: torch.device,
        progress: Callable[[int, int], object],
        group: Group,
    ) -> K2:
        """The model with random weights; `in_memory` layers of them are in memory. tokens: the most of a step.
        progress: called with (layers made, layers in all)."""
        ...

    def refusal(self, config: K2Config, device: torch.device) -> str | None:
        """The sentence why this device cannot serve the model: what is missing, and the fix; None if it can."""
        ...


@dataclass(frozen=True)
class ModelSpec:
    """One family of models."""

    name: str
    architectures: tuple[str, ...]  # values of config.json's `architectures`
    model_types: tuple[str, ...]  # values of config.json's `model_type`
    owns: Callable[[Mapping[str, Any]], bool]  # whether a config.json with such a model_type is of this family
    chat: str  # the name of its chat format in `chat.template.FORMATS`
    module: str  # the module with its LOADER

    @property
    def loader(self) -> ModelLoader:
        """Opens its checkpoints; imports torch."""
        return importlib.import_module(self.module).LOADER


def _groups(config: Mapping[str, Any]) -> Any:
    return config.get("n_group", 1)


# Published files of Kimi K2, and Moonlight's, may call themselves deepseek_v3; DeepSeek's have groups of experts.
SPECS = (
    ModelSpec(
        name="Kimi K2",
        architectures=("KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM"),
        model_types=("kimi_k25", "kimi_k2", "deepseek_v3"),
        owns=lambda config: config.get("model_type") != "deepseek_v3" or _groups(config) == 1,
        chat="kimi",
        module="redline.model.k2.load",
    ),
    ModelSpec(
        name="DeepSeek-V3",
        architectures=("DeepseekV3ForCausalLM",),
        model_types=("deepseek_v3",),
        owns=lambda config: _groups(config) != 1,
        chat="deepseek",
        module="redline.model.deepseek_v3",
    ),
)


def spec_of(folder: Path | str) -> ModelSpec:
    """The family of a model's folder, by its config.json. Raises CheckpointError if no family has its model_type."""
    path = Path(folder) / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); expected the model's config") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected one JSON object: {error}") from None
    for spec in SPECS:
        if config.get("model_type") in spec.model_types and spec.owns(config):
            return spec
    known = ", ".join(dict.fromkeys(each for spec in SPECS for each in spec.model_types))
    raise CheckpointError(f"{path}: model_type is {config.get('model_type')!r}; supported: {known}")
