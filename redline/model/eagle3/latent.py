"""Converts a drafter's latent between its trained width and the target's width, by zero padding.

vLLM stores the drafter's KV rows in the target's cache, so both latents need the same width. Padding changes no value:
if only the first n of N latents are nonzero, the mean square over N is n / N times that over n:

    norm_N(s x) * w sqrt(n / N) = norm_n(x) * w        with epsilon times N / (n s^2)

So the padded layer with rows of `kv_a` times s = 2^round(log2 sqrt(N / n)), and `kv_a_layernorm` times sqrt(n / N),
equals the narrow layer. If N / n is a power of 4, such as 512 / 128, no weight is rounded and epsilon is unchanged.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from redline.model.eagle3.config import Eagle3Config

_NARROWEST = 64  # the kernels of `ops` support 64, 128, 256, 512
_KV_A = "layers.0.self_attn.kv_a_proj_with_mqa.weight"  # [latent | rotated key, 2 D]
_NORM = "layers.0.self_attn.kv_a_layernorm.weight"  # [latent]
_KV_B = "layers.0.self_attn.kv_b_proj.weight"  # [heads x (nope + value), latent]


def pad_latent(
    config: Eagle3Config, tensors: Mapping[str, Tensor], width: int
) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """The same drafter with a latent of `width`; unchanged if it has no latent or already that width.

    tensors: by our names, as in `Eagle3.state_dict`.
    """
    own = config.kv_lora_rank
    if config.architecture != "mla" or own >= width:
        return config, dict(tensors)
    ratio = math.sqrt(width / own)
    latent, key = tensors[_KV_A].split([own, config.qk_rope_head_dim])
    latent = latent * _power_of_two(ratio)
    padded = {
        _KV_A: torch.cat([latent, latent.new_zeros(width - own, latent.shape[1]), key]),
        _NORM: _wider(tensors[_NORM] / ratio, width),
        _KV_B: _wider(tensors[_KV_B], width),
    }
    return replace(config, kv_lora_rank=width), {**tensors, **padded}


def cut_latent(config: Eagle3Config, tensors: Mapping[str, Tensor]) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """The same drafter without the latents that are always zero, cut to the next power of two that kernels support.

    tensors  by our names. The drafter's plane and the work of its attention become as small as before the latent was
             padded.
    """
    if config.architecture != "mla":
        return config, dict(tensors)
    width = config.kv_lora_rank
    latent, key = tensors[_KV_A].split([width, config.qk_rope_head_dim])
    used = latent.any(1).nonzero().flatten().tolist()
    own = max(_NARROWEST, 1 << used[-1].bit_length()) if used else width
    if own >= width:
        return config, dict(tensors)
    ratio = math.sqrt(width / own)
    cut = {
        _KV_A: torch.cat([latent[:own] / _power_of_two(ratio), key]),
        _NORM: tensors[_NORM][:own] * ratio,
        _KV_B: tensors[_KV_B][:, :own].contiguous(),
    }
    return replace(config, kv_lora_rank=own), {**tensors, **cut}


def _power_of_two(ratio: float) -> float:
    """The nearest power of two: multiplying a weight by it does not round."""
    return 2.0 ** round(math.log2(ratio))


def _wider(values: Tensor, width: int) -> Tensor:
    """[..., n] -> [..., width], padded with zeros at the end."""
    return torch.nn.functional.pad(values, (0, width - values.shape[-1]))
