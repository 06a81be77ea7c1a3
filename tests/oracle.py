"""An independent K2: transformers' DeepseekV3ForCausalLM on the dequantised weights of any checkpoint that we read.

This module does not use Redline's own loader, config or formats, so that a common error cannot hide. INT4 is unpacked
by compressed-tensors, the library that owns the format. Both libraries are test dependencies, and are imported inside
the functions that use them.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

PREFIX = re.compile(r"^(language_model\.)?(model\.)?")
TEXT = ("layers.", "embed_tokens.", "norm.", "lm_head.")
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32, experts: str = "eager") -> Any:
    """A DeepseekV3ForCausalLM in evaluation mode, on the CPU. `experts`: eager, batched_mm or grouped_mm.

    Its low-rank norms get the config's eps: vLLM and SGLang use it, while transformers has a constant 1e-6. Raises
    OSError if config.json is missing, and RuntimeError if the tensors are not those of the config.
    """
    from transformers import DeepseekV3ForCausalLM

    config = transformers_config(folder)
    model: Any = DeepseekV3ForCausalLM(config).eval()
    model.load_state_dict(_fused(_tensors(folder, config)))
    # Parameters only: rotary frequencies and the router's correction bias are buffers that stay float32.
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = config.rms_norm_eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = config.rms_norm_eps
    model.set_experts_implementation(experts)
    return model


def transformers_config(folder: Path) -> Any:
    """DeepseekV3Config with the values of config.json, nested or flat, with `rope_scaling` or `rope_parameters`."""
    from transformers import DeepseekV3Config

    top = json.loads((folder / "config.json").read_text())
    text: dict[str, Any] = top.get("text_config", top)
    rope: dict[str, Any] = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    rope.setdefault("rope_theta", text.get("rope_theta"))
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    known = {field.name for field in fields(DeepseekV3Config)} - {"rope_parameters", "model_type"}
    values: dict[str, Any] = {key: value for key, value in text.items() if key in known}
    values |= {"rope_parameters": rope, "rope_interleave": True, "num_mtp_layers": 0, "attn_implementation": "sdpa"}
    return DeepseekV3Config(**values)


@torch.inference_mode()
def logits(model: Any, tokens: list[int]) -> Tensor:
    """float32 [tokens, vocabulary] over one sequence, computed in one pass without a cache."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


@torch.inference_mode()
def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """The `count` most likely next tokens, one after another; no token ends the sequence."""
    output = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(tokens) :].tolist()


def _tensors(folder: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Text tensors under transformers' names, dequantised to float32."""
    from compressed_tensors.compressors.pack_quantized.helpers import (  # pyright: ignore[reportMissingTypeStubs]
        unpack_from_int32,
    )

    raw: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            raw |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    for name, tensor in raw.items():
        text = PREFIX.sub("", name)
        layer = re.match(r"layers\.(\d+)\.", text)
        if not text.startswith(TEXT) or (layer and int(layer[1]) >= config.num_hidden_layers):
            continue  # vision, or a multi-token-prediction layer
        text = text if text.startswith("lm_head") else f"model.{text}"
        if name.endswith(".weight_packed"):
            rows, words = tensor.shape
            codes = unpack_from_int32(tensor, 4, torch.Size((rows, words * 8))).float()
            scale = raw[name.replace("weight_packed", "weight_scale")].float()
            yield text.replace("weight_packed", "weight"), codes * scale.repeat_interleave(32, 1)
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = raw[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            yield text, tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
        elif name.endswith((".weight", ".e_score_correction_bias")):
            yield text, tensor.float()


def _fused(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """transformers keeps the experts of a layer in two tensors: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors:
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
        else:
            state[name] = tensor
    for place, by_expert in experts.items():
        order = [by_expert[e] for e in sorted(by_expert)]
        state[f"{place}.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in order])
        state[f"{place}.down_proj"] = torch.stack([e["down"] for e in order])
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])  # absent if the weights are tied
    return state
