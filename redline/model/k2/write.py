"""Writes checkpoints in the Hugging Face layout: shards, index, config.json.

`write_checkpoint` streams, so the whole model is never in memory. `k25_config` returns the config.json of Kimi K2.5 and
later for any geometry. `random_checkpoint` writes a model of random weights in every layout of the family.
"""

import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from redline.model.k2.checkpoint import NVFP4_NAMES, CheckpointWeight, weights
from redline.model.k2.config import (
    Fp8Blocks,
    Int4Experts,
    K2Config,
    Maker,
    Nvfp4Experts,
    Quantization,
    Unquantized,
    Yarn,
)
from redline.model.k2.write_quantized import quantization_config
from redline.model.vision.config import VisionConfig
from redline.model.vision.load import random_tensors
from redline.ops.formats import INT4_GROUP, Int4, Nvfp4, quantize_int4, quantize_nvfp4

# k25: K2.5 and later. k25-short: without `.model.`, as in some NVIDIA revisions. k2: K2 and K2-Thinking, flat.
# deepseek: as k2, with model_type deepseek_v3 and a layer for multi-token prediction after the last one.
Layout = Literal["k25", "k25-short", "k2", "deepseek"]

SHARD_BYTES = 14_000_000
CONFIG, INDEX = "config.json", "model.safetensors.index.json"

_PREFIX = {"k25": "language_model.model.", "k25-short": "language_model.", "k2": "model.", "deepseek": "model."}
_HEAD = {
    "k25": "language_model.lm_head.weight",
    "k25-short": "language_model.lm_head.weight",
    "k2": "lm_head.weight",
    "deepseek": "lm_head.weight",
}
_FORMATS: dict[str, Quantization] = {
    "int4": Int4Experts(),
    "nvfp4": Nvfp4Experts("ModelOpt"),
    "bf16": Unquantized(),
    "fp8": Fp8Blocks(128, 128),
}
_INPUT_SCALE = {"ModelOpt": "input_scale", "compressed-tensors": "input_global_scale"}
_FP8_MAX = 448.0  # the largest finite e4m3


def write_checkpoint(
    folder: Path | str,
    tensors: Iterable[tuple[str, Tensor]],
    config: dict[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes `model-00001-of-000NN.safetensors`, their index and config.json into `folder`, created if missing.

    tensors      (stored name, CPU tensor that shares no memory with another); at most one shard of them is in memory
    shard_bytes  maximum bytes of tensor data in a file; a larger tensor gets a file of its own

    An existing checkpoint is replaced only after all new data is written: if the disk is full, it stays unchanged.
    Shards are renamed first, and the index last, so a folder with an index is complete.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        shards: list[list[str]] = []
        total = 0
        for shard in _shards(tensors, shard_bytes):
            shards.append(list(shard))
            total += sum(tensor.nbytes for tensor in shard.values())
            path = building / str(len(shards))
            save_file(shard, path, metadata={"format": "pt"})
            path.chmod(0o644)  # safetensors makes files that only their owner can read
            del shard  # free it before the next one is gathered
        files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(building / CONFIG, config)
        _write_json(building / INDEX, index)
        (folder / INDEX).unlink(missing_ok=True)
        for old in folder.glob("model-*-of-*.safetensors"):
            old.unlink()
        for number, file in enumerate(files, 1):
            (building / str(number)).replace(folder / file)
        for file in (CONFIG, INDEX):
            (building / file).replace(folder / file)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def checkpoint_names(config: K2Config, layout: Layout = "k25") -> dict[str, str]:
    """Logical name -> stored name of every weight. An INT4 weight has three stored tensors: see `int4_tensors`."""
    return {weight.name: stored_name(weight.name, layout) for weight in weights(config)}


def stored_name(name: str, layout: Layout = "k25") -> str:
    """`layers.0.input_layernorm.weight` -> `language_model.model.layers.0.input_layernorm.weight`, and so on."""
    return _HEAD[layout] if name == "lm_head.weight" else _PREFIX[layout] + name


def int4_tensors(name: str, weight: Int4) -> list[tuple[str, Tensor]]:
    """The stored tensors of an INT4 weight [N, K] with this stored name (`...gate_proj.weight`): (name, tensor)."""
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return [(f"{name}_packed", weight.packed), (f"{name}_scale", weight.scale), (f"{name}_shape", shape)]


def nvfp4_tensors(
    name: str, weight: Nvfp4, maker: Maker = "ModelOpt", input_scale: Tensor | None = None
) -> list[tuple[str, Tensor]]:
    """The stored tensors of an NVFP4 weight [N, K] with this stored name, under the maker's names: (name, tensor).

    input_scale: float32, one number: the tensor scale of its 4-bit activations. None omits it.
    """
    packed, whole = NVFP4_NAMES[maker]
    scales = [(name + whole, weight.scale)]
    if input_scale is not None:
        scales.append((name.removesuffix("weight") + _INPUT_SCALE[maker], input_scale))
    one_way = [(at, scale.reshape(()) if maker == "ModelOpt" else 1 / scale.reshape(1)) for at, scale in scales]
    return [(name + packed, weight.codes), (f"{name}_scale", weight.scales), *one_way]


def kv_scale_tensors(at: str, scale: float, maker: Maker) -> list[tuple[str, Tensor]]:
    """The stored tensors of the scale of a layer's fp8 KV cache: (name, float32 tensor), under the maker's names.

    at: the stored name of the layer's attention. Keys and values share one latent row, so both scales are equal.
    """
    names = ("k_proj.k_scale", "v_proj.v_scale") if maker == "ModelOpt" else ("k_scale", "v_scale")
    shape = () if maker == "ModelOpt" else (1,)
    return [(f"{at}.{name}", torch.full(shape, scale)) for name in names]


def quantize_fp8(weight: Tensor, block: Fp8Blocks) -> tuple[Tensor, Tensor]:
    """The inverse of `redline.model.k2.checkpoint.dequantize_fp8`, rounded to nearest.

    weight [N, K] -> (float8_e4m3fn [N, K], scale_inv float32 [ceil(N / rows), ceil(K / columns)])
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % block.columns, 0, -rows % block.rows))
    down, across = padded.shape[0] // block.rows, padded.shape[1] // block.columns
    blocks = padded.view(down, block.rows, across, block.columns)
    amax = blocks.abs().amax((1, 3))
    scale_inv = torch.where(amax > 0, amax / _FP8_MAX, torch.ones_like(amax))
    codes = (blocks / scale_inv[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn).contiguous(), scale_inv


def k25_config(
    config: K2Config,
    layout: Layout = "k25",
    *,
    media_placeholder_token_id: int | None = None,
    vision_config: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """config.json in the form of Moonshot's K2.5 and later; for layout "k2", the flat form of K2 and K2-Thinking; for
    "deepseek" that of DeepSeek-V3.

    `K2Config.from_dict` of it returns an equal config. A text-only file has no vision_config. Of the published files'
    keys these are omitted: generation defaults, which no reader uses, and auto_map, which names code that is not in the
    folder.
    """
    text: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **{key: getattr(config, key) for key in _AS_THEY_ARE},
        **_FIXED,
        "num_key_value_heads": config.num_attention_heads,
        "rope_scaling": None if config.yarn is None else {"type": "yarn", **asdict(config.yarn)},
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
        "dtype": "bfloat16",
    }
    if not isinstance(config.quantization, Unquantized):
        text["quantization_config"] = quantization_config(config.quantization)
    if layout == "deepseek":
        return {**text, "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    if layout == "k2":
        return text
    top: dict[str, Any] = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        **{key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "tie_word_embeddings")},
        "ignore_index": -100,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": text,
    }
    if media_placeholder_token_id is not None:
        top["media_placeholder_token_id"] = media_placeholder_token_id
    if vision_config is not None:
        top["vision_config"] = vision_config
    return top


def k25_preprocessor_config() -> dict[str, Any]:
    """preprocessor_config.json of K2.5 and later: how images and videos become patches of the vision tower.

    vLLM needs the file to open any checkpoint of this architecture, even for text only.
    """
    return {
        "media_proc_cfg": {
            "in_patch_limit": 16_384,
            "patch_size": 14,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "merge_kernel_size": 2,
            "fixed_output_tokens": None,
            "patch_limit_on_one_side": 512,
            "in_patch_limit_each_frame": 4_096,
            "in_patch_limit_video": None,
            "sample_fps": 2.0,
            "temporal_merge_kernel_size": 4,
            "timestamp_mode": "hh:mm:ss.fff",
        }
    }


def tiny_config(**changes: Any) -> K2Config:
    """A model of 0.3 million parameters with every component: a dense layer, two MoE layers, YaRN, INT4 experts.

    changes: fields of K2Config to override.
    """
    values: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "intermediate_size": 160,
        "routed_scaling_factor": 2.827,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "low_rank_norm_eps": 1e-5,
        "vocab_size": 512,
        "max_position_embeddings": 65536,
        "rope_theta": 50000.0,
        "yarn": Yarn(
            factor=64.0,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=1024,
        ),
        "bos_token_id": 0,
        "eos_token_ids": (1,),
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "quantization": Int4Experts(),
    }
    return K2Config(**{**values, **changes})


def random_checkpoint(
    folder: Path | str,
    config: K2Config,
    seed: int = 0,
    quantization: Literal["int4", "nvfp4", "bf16", "fp8"] = "int4",
    layout: Layout = "k25",
    *,
    shard_bytes: int = SHARD_BYTES,
    experts_alike: bool = False,
    vision: VisionConfig | None = None,
    media_token: int | None = None,
) -> K2Config:
    """Writes a model of random weights, streamed. Returns the config that a reader gets: `config` with `quantization`.

    shard_bytes    as in `write_checkpoint`
    experts_alike  all experts have the first one's weights: the size is the same, and writing is as fast as the disk
    vision         also writes this vision tower, and the preprocessor's config
    media_token    the id that a prompt has at the positions of an image
    """
    config = replace(config, low_rank_norm_eps=config.rms_norm_eps, quantization=_FORMATS[quantization])
    tensors = _random_tensors(config, seed, layout, experts_alike)
    written = k25_config(config, layout)
    if vision is not None:
        tensors = itertools.chain(tensors, random_tensors(vision, seed))
        written = k25_config(config, vision_config=vision.to_dict(), media_placeholder_token_id=media_token)
        Path(folder).mkdir(parents=True, exist_ok=True)
        _write_json(Path(folder) / "preprocessor_config.json", k25_preprocessor_config())
    write_checkpoint(folder, tensors, written, shard_bytes)
    return config


def sparse_checkpoint(folder: Path | str, config: K2Config, layers: Collection[int], seed: int = 0) -> None:
    """Writes an INT4 checkpoint with the file names and sizes of a complete one, and random weights only in `layers`.

    The rest of the files is holes: a Kimi K2.6 of 594 GB uses only the disk space of `layers`. Each shard is one layer;
    the first also has the embedding, the last also has the last norm and the head. All experts of a layer are equal.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator, last = torch.Generator().manual_seed(seed), config.num_hidden_layers - 1
    by_layer: dict[int, list[CheckpointWeight]] = {}
    for weight in weights(config):
        parts = weight.name.split(".")
        layer = int(parts[1]) if parts[0] == "layers" else 0 if parts[0] == "embed_tokens" else last
        by_layer.setdefault(layer, []).append(weight)
    weight_map: dict[str, str] = {}
    for layer, some in by_layer.items():
        file = f"model-{layer + 1:05}-of-{len(by_layer):05}.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for name, dtype, shape in (entry for weight in some for entry in _int4_entries(weight)):
            size = math.prod(shape) * {"I32": 4, "BF16": 2, "F32": 4, "I64": 8}[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            weight_map[name], end = file, end + size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
            alike: dict[str, list[tuple[str, Tensor]]] = {}
            for weight in some if layer in layers else ():
                if not weight.name.startswith("layers."):
                    continue
                key = weight.name.split(".")[-2] if weight.kind == "expert" else weight.name
                if key not in alike:
                    alike[key] = _stored_form("", _random(weight, generator), weight, Int4Experts())
                for suffix, tensor in alike[key]:
                    out.seek(8 + len(text) + header[stored_name(weight.name) + suffix]["data_offsets"][0])
                    out.write(tensor.contiguous().view(torch.uint8).numpy().data)
    _write_json(folder / CONFIG, k25_config(replace(config, quantization=Int4Experts())))
    _write_json(folder / INDEX, {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))})


def _int4_entries(weight: CheckpointWeight) -> list[tuple[str, str, tuple[int, ...]]]:
    """(stored name, dtype, shape) of the tensors that `_stored_form` makes of an INT4 weight."""
    name = stored_name(weight.name)
    if weight.kind != "expert":
        return [(name, "F32" if name.endswith("e_score_correction_bias") else "BF16", weight.shape)]
    rows, columns = weight.shape
    packed = (f"{name}_packed", "I32", (rows, columns // 8))
    return [packed, (f"{name}_scale", "BF16", (rows, columns // INT4_GROUP)), (f"{name}_shape", "I64", (2,))]


def _random_tensors(config: K2Config, seed: int, layout: Layout, experts_alike: bool) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    if layout == "deepseek":
        yield from _predicting_layer(config, generator)
    first_expert: dict[str, list[tuple[str, Tensor]]] = {}
    for weight in weights(config):
        name = stored_name(weight.name, layout)
        if weight.kind != "expert" or not experts_alike:
            yield from _stored_form(name, _random(weight, generator), weight, config.quantization)
            continue
        projection = name.split(".")[-2]
        if projection not in first_expert:
            parts = _stored_form("", _random(weight, generator), weight, config.quantization)
            first_expert[projection] = parts
        for suffix, tensor in first_expert[projection]:
            yield name + suffix, tensor.clone()


def _predicting_layer(config: K2Config, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """A part of DeepSeek-V3's layer for multi-token prediction, which no reader of the text model needs."""
    at, hidden = f"model.layers.{config.num_hidden_layers}", config.hidden_size
    shapes = {"embed_tokens": (config.vocab_size, hidden), "enorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    for name, shape in shapes.items():
        yield f"{at}.{name}.weight", torch.randn(shape, generator=generator).to(torch.bfloat16)


def _random(weight: CheckpointWeight, generator: torch.Generator) -> Tensor:
    """Float32. Scaled so that activations neither vanish nor grow; norms are near 1, not 1, so an omitted one shows."""
    values = torch.randn(weight.shape, generator=generator)
    if weight.name.endswith("norm.weight"):
        return 1 + 0.1 * values
    if weight.name.endswith("e_score_correction_bias"):
        return 0.1 * values
    return values if weight.name == "embed_tokens.weight" else values * weight.shape[-1] ** -0.5


def _stored_form(
    name: str, values: Tensor, weight: CheckpointWeight, quantization: Quantization
) -> list[tuple[str, Tensor]]:
    match quantization:
        case Int4Experts() if weight.kind == "expert":
            return int4_tensors(name, quantize_int4(values))
        case Nvfp4Experts() if weight.kind == "expert":
            return nvfp4_tensors(name, quantize_nvfp4(values))
        case Fp8Blocks() as block if weight.kind != "plain":
            codes, scale_inv = quantize_fp8(values, block)
            return [(name, codes), (f"{name}_scale_inv", scale_inv)]
        case _:
            # The correction bias decides near-ties, so it stays float32, as in transformers and vLLM.
            dtype = torch.float32 if weight.name.endswith("e_score_correction_bias") else torch.bfloat16
            return [(name, values.to(dtype))]


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# Fields of K2Config with the same key and value in config.json.
_AS_THEY_ARE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_shared_experts",
    "n_routed_experts",
    "routed_scaling_factor",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_rope_head_dim",
    "v_head_dim",
    "qk_nope_head_dim",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "first_k_dense_replace",
    "norm_topk_prob",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
)

_FIXED: dict[str, Any] = {
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_nextn_predict_layers": 0,
}
