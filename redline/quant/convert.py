"""Units of conversion: the tensors that a source shard becomes, and the weights that are computed together.

A unit is the work item of one worker: a weight, or gate and up of an expert, which share their tensor scale. Its new
tensors take the place of the source's codes. All other tensors are copied byte for byte.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from redline.errors import CheckpointError
from redline.model.k2.checkpoint import Checkpoint, CheckpointWeight, Stored
from redline.model.k2.config import Int4Experts, Maker, Nvfp4Experts, Quantization
from redline.model.k2.write import int4_tensors, kv_scale_tensors, nvfp4_tensors
from redline.ops.formats import INT4_GROUP, NVFP4_GROUP, Int4, Nvfp4
from redline.quant import int4, nvfp4
from redline.quant.calibrate import SEEN, CalibrationInputs, input_scale
from redline.quant.gptq import damping_of, output_error, round_gptq, second_moments
from redline.quant.nvfp4 import Error, OutputError
from redline.quant.read import dense
from redline.quant.settings import KV_SCALE, Level, Task
from redline.quant.shard import TensorEntry, entry_of


class Unit(NamedTuple):
    """Weights that are computed together, and the layout of the tensors that replace them."""

    tasks: tuple[Task, ...]
    entries: tuple[TensorEntry, ...]  # of all tensors, in the order of `convert`'s result
    read: int  # bytes of the source


@dataclass(frozen=True)
class Converted:
    """A unit's new tensors, on the CPU, and the error of each quantized weight, by logical name.

    Weights that are bf16 and stay bf16 have no error: attention and dense layers of an FP8 checkpoint.
    """

    tensors: list[Tensor]
    errors: dict[str, Error]


class KvScales(NamedTuple):
    """The scales of a layer's fp8 KV cache, which are stored after the norm of its latents."""

    layer: int
    at: str  # the stored name of its attention module
    maker: Maker

    def tensors(self, scale: float) -> list[tuple[str, Tensor]]:
        """(name, tensor) pairs, in storage order."""
        return kv_scale_tensors(self.at, scale, self.maker)


class Moved(NamedTuple):
    """A scale of an fp8 KV cache that the source already has, renamed and reshaped to another maker's layout."""

    stored: Stored
    entry: TensorEntry


Item = Stored | Unit | KvScales | Moved

_LATENT_NORM = re.compile(r"(?P<at>(?:.*\.)?layers\.(?P<layer>\d{1,6})\.self_attn)\.kv_a_layernorm\.weight")


def items_of(
    checkpoint: Checkpoint,
    tasks: Mapping[str, Task],
    activations: bool,
    kv_scales: Maker | None = None,
    layout: Maker | None = None,
) -> list[list[Item]]:
    """The contents of each new shard, in the order of the source's bytes.

    activations  whether scales for 4-bit activations are written
    kv_scales    maker of the names under which scales of an fp8 KV cache are written, replacing existing ones
    layout       maker of the names that existing scales get, if codes are kept
    """
    replaced = _replaced(checkpoint, tasks)
    shards = [_items(file, checkpoint, tasks, replaced, activations) for file in checkpoint.files]
    if layout:
        return [list(_moved(items, layout, kv_scales is not None)) for items in shards]
    if kv_scales:
        return [list(_with_kv_scales(items, checkpoint.config.num_hidden_layers, kv_scales)) for items in shards]
    return shards


def _moved(items: Iterable[Item], maker: Maker, kv_scales: bool) -> Iterator[Item]:
    for item in items:
        match = KV_SCALE.fullmatch(item.name) if isinstance(item, Stored) else None
        if match is None:
            yield item
            continue
        if not kv_scales:  # some layers have no scales, which the new config.json could not express
            continue
        assert isinstance(item, Stored)
        name, tensor = kv_scale_tensors(match[1], 1.0, maker)["kv".index(match[2])]
        yield Moved(item, entry_of(name, tensor.dtype, tensor.shape))


def activation_scale(checkpoint: Checkpoint, weight: CheckpointWeight) -> Stored | None:
    """The stored tensor scale of a weight's 4-bit activations in an NVFP4 checkpoint."""
    codes = checkpoint.parts(weight)[0]
    module = base_name(codes).removesuffix("weight")
    for tensors in checkpoint.files.values():
        if stored := tensors.get(f"{module}input_scale") or tensors.get(f"{module}input_global_scale"):
            return stored
    return None


def _with_kv_scales(items: Iterable[Item], layers: int, maker: Maker) -> Iterator[Item]:
    for item in items:
        name = item.name if isinstance(item, Stored) else ""
        if KV_SCALE.fullmatch(name):
            continue
        yield item
        if (norm := _LATENT_NORM.fullmatch(name)) and int(norm["layer"]) < layers:
            yield KvScales(int(norm["layer"]), norm["at"], maker)


def _items(
    file: Path,
    checkpoint: Checkpoint,
    tasks: Mapping[str, Task],
    replaced: Mapping[str, Task | None],
    activations: bool,
) -> list[Item]:
    found: list[Item] = []
    for stored in sorted(checkpoint.files[file].values(), key=lambda stored: stored.start):
        if stored.name not in replaced:
            found.append(stored)
            continue
        task = replaced[stored.name]
        if task is None:
            continue
        pair = [tasks[weight.name] for weight in task.scaled_with]
        here = [one for one in pair if checkpoint.parts(one.weight)[0].file == file]
        first = min(here, key=lambda one: checkpoint.parts(one.weight)[0].start)
        if task is first:
            found.append(_unit(tuple(sorted(here, key=lambda one: one is not first)), checkpoint, activations))
    return found


def _replaced(checkpoint: Checkpoint, tasks: Mapping[str, Task]) -> dict[str, Task | None]:
    """The replaced tensors of the source: a weight's codes map to its task, the tensors that go with them to None."""
    found: dict[str, Task | None] = {}
    for task in tasks.values():
        codes, *others = checkpoint.parts(task.weight)
        base = base_name(codes)
        module = base.removesuffix("weight")
        beside = [f"{base}_shape", f"{module}input_scale", f"{module}input_global_scale"]
        found |= dict.fromkeys([*(part.name for part in others), *beside], None)
        found[codes.name] = task
    return found


def entries_of(item: Item) -> list[TensorEntry]:
    """The entries of an item in the new shard."""
    if isinstance(item, Unit):
        return list(item.entries)
    if isinstance(item, KvScales):
        return [entry_of(name, tensor.dtype, tensor.shape) for name, tensor in item.tensors(1.0)]
    if isinstance(item, Moved):
        return [item.entry]
    return [TensorEntry(item.name, item.dtype, item.shape, item.stop - item.start)]


def base_name(codes: Stored) -> str:
    """The stored name that ends in `.weight`, of the tensor with a weight's codes or with the weight itself."""
    return codes.name.removesuffix("_packed")


def _unit(tasks: tuple[Task, ...], checkpoint: Checkpoint, activations: bool) -> Unit:
    entries: list[TensorEntry] = []
    for task in tasks:
        N, K = task.weight.shape
        match task.to:
            case Nvfp4Experts():
                packed = Nvfp4(_meta(torch.uint8, N, K // 2), _meta(torch.float8_e4m3fn, N, K // NVFP4_GROUP), _one())
            case Int4Experts():
                packed = Int4(_meta(torch.int32, N, K // 8), _meta(torch.bfloat16, N, K // INT4_GROUP))
            case _:
                packed = _meta(torch.bfloat16, N, K)
        inputs = _one() if activations else None
        made = _tensors(base_name(checkpoint.parts(task.weight)[0]), packed, task.to, inputs)
        entries += [entry_of(name, tensor.dtype, tensor.shape) for name, tensor in made]
    read = sum(part.stop - part.start for task in tasks for part in checkpoint.parts(task.weight))
    return Unit(tasks, tuple(entries), read)


def _meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _one() -> Tensor:
    return _meta(torch.float32, 1)


def _tensors(
    name: str, packed: Nvfp4 | Int4 | Tensor, to: Quantization, inputs: Tensor | None
) -> list[tuple[str, Tensor]]:
    if isinstance(packed, Nvfp4):
        assert isinstance(to, Nvfp4Experts)
        return nvfp4_tensors(name, packed, to.maker, inputs)
    return int4_tensors(name, packed) if isinstance(packed, Int4) else [(name, packed)]


def convert(
    unit: Unit, checkpoint: Checkpoint, level: Level, device: torch.device, inputs: CalibrationInputs | None = None
) -> Converted:
    """Read a unit's weights and quantize them. inputs: their calibration inputs; for the level "calibrated".

    Raises CheckpointError if a weight contains NaN or infinity.
    """
    if isinstance(checkpoint.config.quantization, Nvfp4Experts) and isinstance(unit.tasks[0].to, Nvfp4Experts):
        return _laid_out(unit, checkpoint)
    values = {task.weight.name: dense(checkpoint, task.weight, device) for task in unit.tasks}
    scale, largest = _scale(unit, values, checkpoint, level, device)
    quantised = isinstance(unit.tasks[0].to, Nvfp4Experts)
    if inputs is not None and quantised:
        return _calibrated(unit, values, scale, largest, checkpoint, inputs, device)
    tensors: list[Tensor] = []
    errors: dict[str, Error] = {}
    rounded = iter(())
    if quantised:
        tried = nvfp4.MAX_SCALING if level == "fast" else nvfp4.SEARCHED
        rounded = iter(nvfp4.round_all([values[task.weight.name] for task in unit.tasks], scale, tried))
    for task in unit.tasks:
        value = values.pop(task.weight.name)
        match task.to:
            case Nvfp4Experts():
                packed, error = next(rounded)
            case Int4Experts():
                packed, error = int4.round_int4(value, int4.MINMAX if level == "fast" else int4.SEARCHED)
            case _:
                packed = value.to(torch.bfloat16)
                error = None if value.dtype == torch.bfloat16 else _error(value, packed)
        made = _tensors(base_name(checkpoint.parts(task.weight)[0]), packed, task.to, None)
        tensors += [tensor.cpu() for _, tensor in made]
        if error is not None:
            errors[task.weight.name] = error
    return Converted(tensors, errors)


def _laid_out(unit: Unit, checkpoint: Checkpoint) -> Converted:
    """The same codes and scales under another maker's names."""
    source, tensors = checkpoint.config.quantization, list[Tensor]()
    assert isinstance(source, Nvfp4Experts)
    activations = len(unit.entries) == 4 * len(unit.tasks)
    for task in unit.tasks:
        packed = checkpoint.nvfp4(task.weight.name)
        assert packed is not None
        base = base_name(checkpoint.parts(task.weight)[0])
        inputs = None
        if activations and (stored := activation_scale(checkpoint, task.weight)) is not None:
            inputs = checkpoint.raw(stored).clone().view(torch.float32)
            inputs = inputs if source.maker == "ModelOpt" else 1 / inputs
        tensors += [tensor for _, tensor in _tensors(base, packed, task.to, inputs)]
    return Converted(tensors, {})


def _calibrated(
    unit: Unit,
    values: Mapping[str, Tensor],
    scale: float,
    largest: float,
    checkpoint: Checkpoint,
    inputs: CalibrationInputs,
    device: torch.device,
) -> Converted:
    """Quantize with calibration inputs. gate and up have the same inputs, so they are quantized as one weight."""
    x, seen = inputs.of(checkpoint, unit.tasks[0].weight, device)
    moments = second_moments(x)
    stacked = torch.cat([values[task.weight.name].float() for task in unit.tasks])
    damping = damping_of(len(x), x.shape[1])
    packed = round_gptq(stacked, moments, scale, damping) if seen >= SEEN else None
    if packed is None:
        packed, _ = nvfp4.round_nvfp4(stacked, scale, nvfp4.SEARCHED)
    activations = torch.tensor([input_scale(x)])
    tensors: list[Tensor] = []
    errors: dict[str, Error] = {}
    first = 0
    for task in unit.tasks:
        name, rows = task.weight.name, slice(first, first + task.weight.shape[0])
        first = rows.stop
        part = Nvfp4(packed.codes[rows].contiguous(), packed.scales[rows].contiguous(), packed.scale)
        made = _tensors(base_name(checkpoint.parts(task.weight)[0]), part, task.to, activations)
        tensors += [tensor.cpu() for _, tensor in made]
        value = values[name].float()
        plain, plain_error = nvfp4.round_nvfp4(value, nvfp4.max_scale(largest), nvfp4.MAX_SCALING)
        errors[name] = replace(
            _error(value, part.dequantize()),
            max_scaling=plain_error.squared,
            outputs=OutputError(
                seen=seen,
                calibrated=seen >= SEEN,
                squared=output_error(value - part.dequantize(), moments),
                output_squared=output_error(value, moments),
                max_scaling=output_error(value - plain.dequantize(), moments),
            ),
        )
    return Converted(tensors, errors)


def _scale(
    unit: Unit, values: Mapping[str, Tensor], checkpoint: Checkpoint, level: Level, device: torch.device
) -> tuple[float, float]:
    """(tensor scale of the unit's weights, their largest magnitude). A partner in another shard is included."""
    pair = unit.tasks[0].scaled_with
    found = nvfp4.largest([values[one.name] if one.name in values else dense(checkpoint, one, device) for one in pair])
    for weight, most in zip(pair, found, strict=True):
        if not most < float("inf"):  # NaN too
            raise CheckpointError(f"{weight.name}: expected finite numbers, found NaN or infinity")
    largest = max(found)
    return nvfp4.max_scale(largest) if level == "fast" else nvfp4.exact_scale(largest), largest


def _error(value: Tensor, rounded: Tensor) -> Error:
    difference = value.float() - rounded.float()
    squared = float(difference.square().sum(dtype=torch.float64))
    whole = float(value.float().square().sum(dtype=torch.float64))
    return Error(squared, whole, float(difference.abs().max()), squared)
