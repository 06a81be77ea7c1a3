"""The quantization settings of a config.json, in the form that the makers of the formats write.

`quantization_config` returns that section; `requantized` puts it into the config.json of a checkpoint that was stored
in another format. All other keys of the file are unchanged.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from redline import __version__
from redline.model.k2.config import Fp8Blocks, Int4Experts, Nvfp4Experts, Quantization, Unquantized
from redline.ops.formats import INT4_GROUP, NVFP4_GROUP

# From the published INT4 files. The last pattern matches only dense layers: a routed expert's name contains
# `mlp.experts.N.gate_proj`.
DENSE = r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"
INT4_KEPT = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", DENSE)


def quantization_config(
    quantization: Int4Experts | Nvfp4Experts | Fp8Blocks,
    kept: Sequence[str] | None = None,
    *,
    activations: bool = True,
    kv_scales: bool = False,
) -> dict[str, Any]:
    """As in the published files: K2-Instruct's FP8, the INT4 of K2-Thinking and later, and NVIDIA's NVFP4 versions.

    kept         modules that are not quantised, as patterns of the format: globs for ModelOpt, names or `re:`
                 expressions for compressed-tensors. None: as published, or for NVFP4 only the head
    activations  NVFP4: whether the files have scales for 4-bit activations
    kv_scales    NVFP4: whether the files have scales for an fp8 KV cache
    """
    match quantization:
        case Nvfp4Experts("ModelOpt"):
            return _modelopt(("lm_head",) if kept is None else kept, activations, kv_scales)
        case Nvfp4Experts():
            return _compressed_tensors_nvfp4(("lm_head",) if kept is None else kept, activations, kv_scales)
        case Fp8Blocks(rows, columns):
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [rows, columns],
            }
        case Int4Experts():
            return _int4(INT4_KEPT if kept is None else kept)


def requantized(
    values: Mapping[str, Any], quantization: Quantization, kept: Sequence[str], *, activations: bool, kv_scales: bool
) -> dict[str, Any]:
    """The config.json `values` of a checkpoint whose weights are now in `quantization`. Other arguments: see above.

    INT4 settings go inside text_config, as in Moonshot's files; NVFP4 settings at the top level, as in NVIDIA's.
    """
    found = {key: value for key, value in values.items() if key != "quantization_config"}
    if "text_config" in found:
        text = cast("dict[str, Any]", found["text_config"])
        found["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    if isinstance(quantization, Unquantized):
        return found
    inside = isinstance(quantization, Int4Experts) and "text_config" in found
    place = found["text_config"] if inside else found
    place["quantization_config"] = quantization_config(quantization, kept, activations=activations, kv_scales=kv_scales)
    return found


def hf_quant_config(kept: Sequence[str], *, activations: bool, kv_scales: bool) -> dict[str, Any]:
    """hf_quant_config.json, which ModelOpt writes next to config.json and older readers look for."""
    quantization: dict[str, Any] = {
        "quant_algo": _algorithm(activations),
        "kv_cache_quant_algo": "FP8" if kv_scales else None,
        "group_size": NVFP4_GROUP,
        "exclude_modules": list(kept),
    }
    return {"producer": _PRODUCER, "quantization": quantization}


# vLLM accepts a hf_quant_config.json only from this producer: the name belongs to the format.
_PRODUCER = {"name": "modelopt", "version": f"redline {__version__}"}


def _algorithm(activations: bool) -> str:
    return "NVFP4" if activations else "W4A16_NVFP4"


def _modelopt(kept: Sequence[str], activations: bool, kv_scales: bool) -> dict[str, Any]:
    e2m1: dict[str, Any] = {"dynamic": False, "group_size": NVFP4_GROUP, "num_bits": 4, "type": "float"}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": e2m1}
    if activations:
        group = {"input_activations": e2m1, **group}
    fp8 = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} if kv_scales else {}
    return {
        "config_groups": {"group_0": group},
        "ignore": list(kept),
        **fp8,
        "producer": _PRODUCER,
        "quant_algo": _algorithm(activations),
        "quant_method": "modelopt",
    }


def _compressed_tensors_nvfp4(kept: Sequence[str], activations: bool, kv_scales: bool) -> dict[str, Any]:
    e2m1: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": NVFP4_GROUP,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.float8_e4m3fn",
        "strategy": "tensor_group",
        "symmetric": True,
        "type": "float",
    }
    group: dict[str, Any] = {
        "format": "nvfp4-pack-quantized",
        # Dynamic block scales, computed per token, under the tensor-wide scale that the file has.
        "input_activations": {**e2m1, "dynamic": "local", "observer": "static_minmax"} if activations else None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": e2m1,
    }
    fp8: dict[str, Any] = {"dynamic": False, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "float"}
    return {
        "config_groups": {"group_0": group},
        "format": "nvfp4-pack-quantized",
        "ignore": list(kept),
        "kv_cache_scheme": fp8 if kv_scales else None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _int4(kept: Sequence[str]) -> dict[str, Any]:
    int4: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": INT4_GROUP,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group: dict[str, Any] = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": int4,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": list(kept),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
