"""The settings of `redline quantize`, and the weights that they apply to."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from redline.errors import ConfigError
from redline.messages.base import Record
from redline.model.k2.checkpoint import Checkpoint, CheckpointWeight
from redline.model.k2.config import Fp8Blocks, Int4Experts, Nvfp4Experts, Quantization, Unquantized
from redline.ops.formats import INT4_GROUP, NVFP4_GROUP

Format = Literal["nvfp4-modelopt", "nvfp4-ct", "int4", "bf16"]
Level = Literal["fast", "search", "calibrated"]
ALSO = ("shared", "dense")

FORMATS: dict[Format, Quantization] = {
    "nvfp4-modelopt": Nvfp4Experts("ModelOpt"),
    "nvfp4-ct": Nvfp4Experts("compressed-tensors"),
    "int4": Int4Experts(),
    "bf16": Unquantized(),
}
KV_SCALE = re.compile(r"(.*\.layers\.\d{1,6}\.self_attn)\.(?:[kv]_proj\.)?([kv])_scale")
_SHARED = re.compile(r"layers\.\d+\.mlp\.shared_experts\..*")
_DENSE = re.compile(r"layers\.\d+\.mlp\.(gate|up|down)_proj\.weight")


class QuantizeConfig(Record, frozen=True, kw_only=True):
    """The settings of `redline quantize`."""

    source: str  # a checkpoint's folder
    out: str  # a folder
    format: Format = "nvfp4-modelopt"
    level: Level = "search"
    also: tuple[str, ...] = ()  # of ALSO: quantised in addition to the routed experts
    kv_scales: bool = False  # write KV cache scales measured on the texts; an engine then keeps the cache in fp8
    workers: int | None = None  # weights computed concurrently; default: one per core, or four per GPU
    device: str | None = None  # cpu or cuda; default: the GPUs, if there are any
    most_weight_error: float = 0.15  # maximum error of any weight, as defined in `quant.audit.Bounds`


@dataclass(frozen=True)
class Task:
    """A weight to convert. `scaled_with` (includes itself): the weights that share its tensor scale, gate and up."""

    weight: CheckpointWeight
    to: Quantization  # Unquantized: bf16
    scaled_with: tuple[CheckpointWeight, ...]


def check(config: QuantizeConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if these settings cannot be applied to this checkpoint."""
    source, target = checkpoint.config.quantization, FORMATS[config.format]
    if not set(config.also) <= set(ALSO):
        raise ConfigError(f"also: {', '.join(config.also)}; expected {' or '.join(ALSO)}")
    if config.also and not isinstance(target, Nvfp4Experts):
        raise ConfigError(f"also: a checkpoint of {config.format} has only its routed experts quantised; leave it out")
    if config.level == "calibrated" and not isinstance(target, Nvfp4Experts):
        raise ConfigError(f"level: calibrated is for NVFP4; {config.format} has fast and search")
    if config.kv_scales and config.level != "calibrated":
        raise ConfigError(f"kv_scales: level {config.level} reads no texts to measure them on; use --level calibrated")
    if is_layout(config, checkpoint):
        if config.level == "calibrated":
            raise ConfigError("level: NVFP4 to NVFP4 keeps the codes, so nothing is calibrated; leave --level out")
        if config.also:
            raise ConfigError("also: NVFP4 to NVFP4 keeps what the source has quantised; leave --also out")
    elif type(source) is type(target):
        raise ConfigError(f"{config.source}: is stored as {config.format} already")
    group = NVFP4_GROUP if isinstance(target, Nvfp4Experts) else INT4_GROUP if isinstance(target, Int4Experts) else 1
    for key in ("hidden_size", "moe_intermediate_size", *(("intermediate_size",) if "dense" in config.also else ())):
        if getattr(checkpoint.config, key) % group:
            raise ConfigError(
                f"{config.source}: {key} is {getattr(checkpoint.config, key)}; needs a multiple of {group}"
            )


def is_layout(config: QuantizeConfig, checkpoint: Checkpoint) -> bool:
    """Whether only the layout changes (NVFP4 to another maker's NVFP4): codes and scales are kept and renamed."""
    source, target = checkpoint.config.quantization, FORMATS[config.format]
    return isinstance(source, Nvfp4Experts) and isinstance(target, Nvfp4Experts) and source != target


def as_stored(config: QuantizeConfig, checkpoint: Checkpoint, weights: Iterable[CheckpointWeight]) -> QuantizeConfig:
    """The config completed from a source in another layout: the quantised modules, and scales of an fp8 KV cache.

    If only some of the shared experts or dense layers are quantised, those become bf16.
    """
    linear = [weight for weight in weights if weight.kind == "linear"]
    also: list[str] = []
    for name, pattern in (("shared", _SHARED), ("dense", _DENSE)):
        found = [len(checkpoint.parts(weight)) > 1 for weight in linear if pattern.fullmatch(weight.name)]
        also += [name] * (bool(found) and all(found))
    return replace(config, also=tuple(also), kv_scales=has_kv_scales(checkpoint))


def has_kv_scales(checkpoint: Checkpoint) -> bool:
    """Whether every layer has both scales of an fp8 KV cache."""
    names = [name for tensors in checkpoint.files.values() for name in tensors]
    found = {(match[1], match[2]) for name in names if (match := KV_SCALE.fullmatch(name))}
    return len(found) >= 2 * checkpoint.config.num_hidden_layers


def tasks(config: QuantizeConfig, checkpoint: Checkpoint, weights: list[CheckpointWeight]) -> dict[str, Task]:
    """The weights to convert, by logical name. All others keep their bytes.

    In addition to the requested weights, those in a format that the new config.json cannot express become bf16: FP8
    attention, or modules other than experts that an NVFP4 file has quantised.
    """
    target = FORMATS[config.format]
    by_name = {weight.name: weight for weight in weights}
    found: dict[str, Task] = {}
    for weight in weights:
        if _chosen(weight, config):
            found[weight.name] = Task(weight, target, _pair(weight, by_name))
        elif isinstance(checkpoint.config.quantization, Fp8Blocks | Nvfp4Experts) and len(checkpoint.parts(weight)) > 1:
            found[weight.name] = Task(weight, Unquantized(), (weight,))
    return found


def _chosen(weight: CheckpointWeight, config: QuantizeConfig) -> bool:
    return (
        weight.kind == "expert"
        or ("shared" in config.also and _SHARED.fullmatch(weight.name) is not None)
        or ("dense" in config.also and _DENSE.fullmatch(weight.name) is not None)
    )


def _pair(weight: CheckpointWeight, by_name: dict[str, CheckpointWeight]) -> tuple[CheckpointWeight, ...]:
    """The weight and its partner: engines compute gate and up in one product, which has one tensor scale."""
    for this, other in ((".gate_proj.", ".up_proj."), (".up_proj.", ".gate_proj.")):
        if this in weight.name:
            return weight, by_name[weight.name.replace(this, other)]
    return (weight,)


def kept(config: QuantizeConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """The modules that are not quantised, in the format's own pattern syntax, for its config.json."""
    if config.format == "nvfp4-modelopt":
        return _globs(config, checkpoint)
    expressions = ["re:.*lm_head$", "re:.*self_attn.*"]
    expressions += [] if "shared" in config.also else ["re:.*shared_experts.*"]
    # Routed experts are named `mlp.experts.N.gate_proj`, so this pattern matches the dense layers only.
    expressions += [] if "dense" in config.also else [r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    if config.format == "int4":
        return ("lm_head", *expressions[1:])  # as published
    expressions += [r"re:.*mlp\.gate$", "re:.*embed_tokens$"]
    names = [name for tensors in checkpoint.files.values() for name in tensors]
    for tower in ("vision_tower", "mm_projector"):
        expressions += [f"re:.*{tower}.*"] * any(name.startswith(tower) for name in names)
    return (*expressions, *(rf"re:.*layers\.{layer}\..*" for layer in _drafting(checkpoint)))


def _globs(config: QuantizeConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Patterns as in NVIDIA's files: head, attention of each layer, shared experts, dense layers, vision towers."""
    model = checkpoint.config
    names = [name for tensors in checkpoint.files.values() for name in tensors]
    at = next(name for name in names if name.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    found = {f"{at}layers.{layer}*" for layer in _drafting(checkpoint)}
    found |= {name.removesuffix(".weight") for name in names if name.endswith("lm_head.weight")}
    for layer in range(model.num_hidden_layers):
        dense = not model.is_moe(layer)
        if dense and "dense" not in config.also:
            found.add(f"{at}layers.{layer}.*")  # not `layers.1*`, which would be layer 10 too
            continue
        found.add(f"{at}layers.{layer}.self_attn*")
        if not dense and "shared" not in config.also:
            found.add(f"{at}layers.{layer}.mlp.shared_experts*")
    found |= {f"{tower}*" for tower in ("vision_tower", "mm_projector") if any(n.startswith(tower) for n in names)}
    return tuple(sorted(found))


def _drafting(checkpoint: Checkpoint) -> list[int]:
    """The layers after the last one, which are for drafting (MTP) and are copied unchanged."""
    names = [name for tensors in checkpoint.files.values() for name in tensors]
    layers = {int(match[1]) for name in names if (match := re.search(r"(?:^|\.)layers\.(\d{1,6})\.", name))}
    return sorted(layer for layer in layers if layer >= checkpoint.config.num_hidden_layers)
