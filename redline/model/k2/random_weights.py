"""A K2 with its full number of layers but no checkpoint: random weights, several layers sharing one layer in memory.

The time of a step does not depend on the values of the weights, so speed can be measured, and a server run, without
them. On a GPU the experts of each token are forced (`forced_routing`); the CPU kernels do not support that.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from redline.errors import ConfigError
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.group import ALONE, Group
from redline.kernels.inputs import Inputs
from redline.model.k2.config import K2Config
from redline.model.k2.cpu import K2
from redline.model.k2.cuda import GpuK2
from redline.model.k2.forced_routing import draw
from redline.model.k2.load import why_not
from redline.model.k2.random_cpu import random_cpu_k2
from redline.model.k2.random_gpu import random_gpu_k2

Progress = Callable[[int, int], object]  # (layers made, layers to make)


def dense_layers(config: K2Config) -> int:
    """Number of the model's layers without experts."""
    return min(config.first_k_dense_replace, config.num_hidden_layers)


def place_of(config: K2Config, in_memory: int, layer: int, rotation: int = 0) -> int:
    """The index of the layer in memory that a layer of the model uses.

    Each dense layer has its own; MoE layers use the others round-robin, beginning at offset `rotation`.
    """
    dense = dense_layers(config)
    if layer < dense:
        return layer
    return dense + (layer - dense + rotation) % (in_memory - dense)


def check_in_memory(config: K2Config, in_memory: int, key: str) -> None:
    """Raises ConfigError if the model cannot use `in_memory` layers. key: name of the setting, for the message."""
    layers, dense = config.num_hidden_layers, dense_layers(config)
    if in_memory > layers:
        raise ConfigError(f"{key} is {in_memory}; the model has {layers} layers, so at most {layers}")
    if layers > dense and in_memory <= dense:
        raise ConfigError(
            f"{key} is {in_memory}; the {dense} layers without experts are not shared, so it is at least {dense + 1}"
        )


def random_k2(
    config: K2Config,
    in_memory: int,
    tokens: int,
    device: torch.device,
    progress: Progress = lambda made, whole: None,
    group: Group = ALONE,
) -> K2:
    """A model of this geometry, or a rank's part of it on a GPU, for steps of at most `tokens` tokens.

    in_memory: number of distinct layers in memory; the model's layers share them. ConfigError if that number is not
    valid for this model, or if several ranks are requested on a CPU.
    """
    check_in_memory(config, in_memory, "random_weights")
    if why_not(config, device) is None:
        return forced_k2(config, in_memory, tokens, device, progress, group)
    if group.ranks > 1:
        raise ConfigError(f"random_weights over {group.ranks} ranks need GPUs with kernels of their own")
    return random_cpu_k2(config, _places(config, in_memory), progress=progress)


class ForcedK2(GpuK2):
    """A model on a GPU whose expert choices are forced, not routed.

    routing: int32 [layers, tokens, k]; a step of fewer tokens reads the first of them. Its address never changes, so
    replayed CUDA graphs read the latest values.
    """

    def __init__(self, model: GpuK2, tokens: int) -> None:
        assert isinstance(model.head, Tiled), "a GPU's head is tiled"
        super().__init__(model.config, model.embedding_VD, model.gpu_blocks, model.norm, model.head, model.group)
        c, generator = model.config, torch.Generator(model.device).manual_seed(0)
        self.routing = draw(generator, c.num_hidden_layers, 1, tokens, c.n_routed_experts, c.num_experts_per_tok)

    def forward(
        self,
        inputs: Inputs,
        planes: Tensor,
        layers: Sequence[int] = (),
        launched: Callable[[int], object] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `GpuK2.forward`."""
        return super().forward(replace(inputs, routing=self.routing[:, : inputs.count]), planes, layers, launched)


def forced_k2(
    config: K2Config,
    in_memory: int,
    tokens: int,
    device: torch.device,
    progress: Progress = lambda made, whole: None,
    group: Group = ALONE,
) -> ForcedK2:
    """As `random_k2`, on a GPU, or on a CPU with the emulator of the GPU kernels."""
    return ForcedK2(random_gpu_k2(config, _places(config, in_memory), device, progress=progress, group=group), tokens)


def _places(config: K2Config, in_memory: int) -> list[int]:
    return [place_of(config, in_memory, layer) for layer in range(config.num_hidden_layers)]
