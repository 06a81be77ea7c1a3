"""A K2 at its true depth without a checkpoint: random weights, of which several layers may be one in memory.

What a step reads and computes does not depend on what the weights say, so speed is measured, and served, without them.
On a GPU the experts of each token are given, not chosen (`forced_routing`); a CPU's kernels take none from outside.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from redline.errors import ConfigError
from redline.kernels.group import ALONE, Group
from redline.kernels.hopper.layouts.tiled import Tiled
from redline.kernels.inputs import Inputs
from redline.model.k2.config import K2Config
from redline.model.k2.cpu import K2
from redline.model.k2.forced_routing import draw
from redline.model.k2.hopper import GpuK2
from redline.model.k2.load import why_not
from redline.model.k2.random_cpu import random_cpu_k2
from redline.model.k2.random_hopper import random_gpu_k2

Progress = Callable[[int, int], object]  # (layers made, layers to make)


def dense_layers(config: K2Config) -> int:
    """How many of the model's layers have no experts."""
    return min(config.first_k_dense_replace, config.num_hidden_layers)


def place_of(config: K2Config, in_memory: int, layer: int, rotation: int = 0) -> int:
    """Which of the layers in memory a layer of the model uses.

    Dense layers lie alone; those with experts share the others in turn, beginning `rotation` places later.
    """
    dense = dense_layers(config)
    if layer < dense:
        return layer
    return dense + (layer - dense + rotation) % (in_memory - dense)


def check_in_memory(config: K2Config, in_memory: int, key: str) -> None:
    """Raises ConfigError where a model cannot use so many layers. key: what the number is called."""
    layers, dense = config.num_hidden_layers, dense_layers(config)
    if in_memory > layers:
        raise ConfigError(f"{key} is {in_memory}; the model has {layers} layers, so at most {layers}")
    if layers > dense and in_memory <= dense:
        raise ConfigError(
            f"{key} is {in_memory}; layers without experts lie alone ({dense}), so it is at least {dense + 1}"
        )


def random_k2(
    config: K2Config,
    in_memory: int,
    tokens: int,
    device: torch.device,
    progress: Progress = lambda made, whole: None,
    group: Group = ALONE,
) -> K2:
    """A model of this geometry, or a rank's part of it on a GPU, for steps of so many tokens at most.

    in_memory: layers that lie there; all others are one of them. Raises ConfigError where that is no number of this
    model, or ranks on a CPU would share it.
    """
    check_in_memory(config, in_memory, "random_weights")
    if why_not(config, device) is None:
        return forced_k2(config, in_memory, tokens, device, progress, group)
    if group.ranks > 1:
        raise ConfigError(f"random_weights over {group.ranks} ranks need GPUs with kernels of their own")
    return random_cpu_k2(config, _places(config, in_memory), progress=progress)


class ForcedK2(GpuK2):
    """A model on a GPU whose experts are given, not chosen.

    routing: int32 [layers, tokens, k]; a step of fewer tokens reads the first of them. It stays where it is, so that
    recorded steps read what was written there last.
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
    """As `random_k2`, on a GPU; or on a CPU by the emulator of its kernels."""
    return ForcedK2(random_gpu_k2(config, _places(config, in_memory), device, progress=progress, group=group), tokens)


def _places(config: K2Config, in_memory: int) -> list[int]:
    return [place_of(config, in_memory, layer) for layer in range(config.num_hidden_layers)]
