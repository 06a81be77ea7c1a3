"""`redline quantize`: converts a checkpoint to another format, shard by shard, and reports the error.

A shard is written to a temporary file, renamed, then recorded with its SHA-256 in OUT/.quantize. So a kill at any time
loses at most the shard being written: the same command verifies the finished shards by checksum and resumes. Nothing
is deleted on failure. The index comes last: a folder with an index is complete.
"""

import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from redline import clock
from redline.disk import alone, check_room, human, is_full, save, written
from redline.errors import ConfigError
from redline.limits import processors
from redline.messages.base import Record
from redline.model.k2.checkpoint import Checkpoint, Stored, weights
from redline.model.k2.config import Int4Experts, Nvfp4Experts, read_json
from redline.model.k2.write import CONFIG, INDEX
from redline.model.k2.write_quantized import hf_quant_config, requantized
from redline.progress import Working
from redline.quant.calibrate import ROWS, SEEN, CalibrationInputs, capture, digest_of, stored_bytes
from redline.quant.card import CARD, QuantizedCard
from redline.quant.convert import (
    Converted,
    Item,
    KvScales,
    Moved,
    Unit,
    activation_scale,
    convert,
    entries_of,
    items_of,
)
from redline.quant.nvfp4 import Error
from redline.quant.settings import FORMATS, Format, Level, QuantizeConfig, as_stored, check, is_layout, kept, tasks
from redline.quant.shard import TensorEntry, file_bytes, measured, write_shard
from redline.quant.texts import CalibrationText
from redline.worker.engine import pick_device

HF_QUANT = "hf_quant_config.json"
RESULT = "quantize.json"
WORK, INPUTS = ".quantize", "inputs"
T = TypeVar("T")
NAMED = 20  # maximum number of weights reported as over the error limit
UNITS_A_GPU = 4  # units processed concurrently on each GPU, so that copies overlap with computation
_NOT_COPIED = {CONFIG, INDEX, HF_QUANT, RESULT, CARD}


class QuantizeJob(Record, frozen=True):
    """Everything that the bytes of the result depend on."""

    fingerprint: str  # of the source checkpoint
    format: Format
    level: Level
    also: tuple[str, ...]
    kv_scales: bool
    texts: str  # a hash of the calibration texts; empty without texts
    redline: str  # Redline's version


class WeightError(Record, frozen=True):
    """The quantization error of a weight.

    relative        root of sum (w - rounded)^2 over sum w^2
    largest         |w - rounded|
    to_max_scaling  the error over that of max scaling; 1 if max scaling has none

    For a calibrated weight also, over the calibration texts:

    seen                   tokens that were routed to it; if too few, the scale was searched instead (`searched`)
    output                 root of the outputs' squared error over their squares
    output_to_max_scaling  that error over that of max scaling
    """

    relative: float
    largest: float
    to_max_scaling: float
    seen: int | None = None
    searched: bool = False
    output: float | None = None
    output_to_max_scaling: float | None = None


class ShardDone(Record, frozen=True):
    """A finished shard: a file of OUT, its size, its checksum, and the errors of its quantized weights."""

    file: str
    bytes: int
    sha256: str
    weights: dict[str, WeightError]


class QuantizeResult(Record, frozen=True):
    """The content of OUT/quantize.json."""

    job: QuantizeJob
    shards: tuple[ShardDone, ...]


def run(config: QuantizeConfig, console: Console, texts: Sequence[CalibrationText] = ()) -> int:
    """Quantize; returns the exit code: 0, or 1 if the disk is full or a weight's error is over the limit.

    texts: calibration texts of the level "calibrated". Raises ConfigError and CheckpointError.
    """
    checkpoint = Checkpoint.open(config.source)
    check(config, checkpoint)
    if (config.level == "calibrated") != bool(texts):
        raise ConfigError(f"level: {config.level} {'reads no' if texts else 'needs'} texts")
    out = Path(config.out)
    if out.resolve() == Path(config.source).resolve():
        raise ConfigError(f"{out}: is the source; name another folder")
    with alone(out):
        return _run(config, checkpoint, texts, console)


def _run(config: QuantizeConfig, checkpoint: Checkpoint, texts: Sequence[CalibrationText], console: Console) -> int:
    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    work = plan(config, checkpoint, texts)
    for line in explain(work):
        say(line)
    try:
        with Working("checking finished shards") as working:
            done = _finished(work, working)
            if (work.out / INDEX).exists() and len(done) == len(work.shards):
                shutil.rmtree(work.out / WORK)
                say(f"{work.out}: is complete already: {len(done)} shards, all checksums verified")
                return _judge(list(done.values()), config.most_weight_error, say)
            if done:
                say(f"{len(done)} of {len(work.shards)} shards are finished, checksums verified; converting the rest")
            _check_room(work, done)
            inputs = None
            if texts and len(done) < len(work.shards):
                inputs = capture(
                    checkpoint,
                    texts,
                    work.out / WORK / INPUTS,
                    work.devices[0],
                    lambda layer, layers: working.show(layer, layers, what="calibration texts, layer by layer"),
                )
            shards = _convert_all(work, done, inputs, working)
        _finish(work, shards)
    except Exception as error:  # safetensors raises its own error for a full disk
        if not is_full(error):
            raise
        say(f"the disk is full: {work.out} keeps its finished shards; run the same command to resume", "red")
        return 1
    for line in summary(shards):
        say(line)
    return _judge(shards, config.most_weight_error, say)


def _judge(shards: Sequence[ShardDone], most: float, say: Callable[[str, str], None]) -> int:
    """1 if a weight's error is over the limit, with a message for each; else 0."""
    errors = [(error.relative, name) for shard in shards for name, error in shard.weights.items()]
    over = sorted(((error, name) for error, name in errors if not error <= most), reverse=True)
    for error, name in over[:NAMED]:
        say(f"weight error of {name}: {error:.4f}, at most {most:g} is allowed", "red")
    if len(over) > NAMED:
        say(f"and {len(over) - NAMED:,} more", "red")
    return int(bool(over))


# ------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class ShardPlan:
    """A file of the result, and the items of the source that it is made of."""

    file: str
    items: tuple[Item, ...]

    @property
    def entries(self) -> list[TensorEntry]:
        """Its tensors, in order."""
        return [entry for item in self.items for entry in entries_of(item)]

    @property
    def read(self) -> int:
        """Bytes of the source that are read for it."""
        return sum(_read(item) for item in self.items)


@dataclass(frozen=True)
class QuantizePlan:
    """Everything that is known before the first weight is read."""

    config: QuantizeConfig
    checkpoint: Checkpoint
    out: Path
    job: QuantizeJob
    shards: tuple[ShardPlan, ...]
    devices: tuple[torch.device, ...]
    workers: int
    calibration: int  # bytes on disk
    activations: bool  # whether the result contains scales for 4-bit activations
    layout: bool  # whether codes are kept (`is_layout`)

    @property
    def bytes(self) -> int:
        """The size of all shards of the result."""
        return sum(file_bytes(shard.entries) for shard in self.shards)

    @property
    def how(self) -> str:
        """The level, or a note that codes are kept."""
        return "codes and scales kept" if self.layout else self.config.level

    @property
    def memory(self) -> int:
        """Peak memory in bytes, at most: of units that are being computed, or wait to be written."""
        units = [item for shard in self.shards for item in shard.items if isinstance(item, Unit)]
        new = max((sum(entry.bytes for entry in unit.entries) for unit in units), default=0)
        wide = max((sum(math.prod(task.weight.shape) for task in unit.tasks) for unit in units), default=0)
        on_host = self.devices[0].type == "cpu"
        moments = max((task.weight.shape[1] for unit in units for task in unit.tasks), default=0) ** 2
        computed = WIDE_BYTES * wide + (4 * MOMENTS * moments + 4 * ROWS * math.isqrt(moments)) * (self.calibration > 0)
        return self.workers * (computed * on_host + AHEAD * new)


AHEAD = 2  # units per worker that are submitted ahead of the one being written
WIDE_BYTES = 16  # per value of a unit being computed: its code as an integer, and as float32: value, scaled, rounded
MOMENTS = 4  # matrices of second moments in memory while one is inverted


def plan(config: QuantizeConfig, checkpoint: Checkpoint, texts: Sequence[CalibrationText] = ()) -> QuantizePlan:
    """Plan the conversion. Reads no weight."""
    from redline import __version__

    every = list(weights(checkpoint.config))
    layout = is_layout(config, checkpoint)
    if layout:
        config = as_stored(config, checkpoint, every)
    todo = tasks(config, checkpoint, every)
    activations = config.level == "calibrated"
    if layout:
        kept_codes = [task.weight for task in todo.values() if isinstance(task.to, Nvfp4Experts)]
        activations = all(activation_scale(checkpoint, weight) is not None for weight in kept_codes)
    sources = list(checkpoint.files)
    names = [f"model-{number:05}-of-{len(sources):05}.safetensors" for number in range(1, len(sources) + 1)]
    to = FORMATS[config.format]
    maker = to.maker if isinstance(to, Nvfp4Experts) else None
    items = items_of(checkpoint, todo, activations, maker if config.kv_scales else None, maker if layout else None)
    shards = [ShardPlan(name, tuple(here)) for name, here in zip(names, items, strict=True)]
    devices = _devices(config.device)
    workers = config.workers
    if workers is None:
        workers = processors() if devices[0].type == "cpu" else UNITS_A_GPU * len(devices)
    if workers < 1:
        raise ConfigError(f"workers is {workers}; expected at least 1")
    job = QuantizeJob(
        fingerprint=checkpoint.fingerprint,
        format=config.format,
        level=config.level,
        also=tuple(sorted(config.also)),
        kv_scales=config.kv_scales,
        texts=digest_of(texts) if texts else "",
        redline=__version__,
    )
    calibration = stored_bytes(checkpoint, texts) if texts else 0
    return QuantizePlan(
        config, checkpoint, Path(config.out), job, tuple(shards), devices, workers, calibration, activations, layout
    )


def explain(work: QuantizePlan) -> list[str]:
    """The plan as lines of text: sizes read and written, and the peak memory."""
    read = sum(shard.read for shard in work.shards)
    units = sum(isinstance(item, Unit) for shard in work.shards for item in shard.items)
    where = f"{work.workers} workers on {', '.join(map(str, work.devices))}"
    return [
        f"{work.config.source} -> {work.config.format}, {work.how}: {human(read)} in {len(work.shards)} "
        f"shards become {human(work.bytes)}; {units:,} weights or pairs of them, {where}",
        f"memory at the peak: {human(work.memory)} at most, in addition to the program's own",
    ]


def _devices(name: str | None) -> tuple[torch.device, ...]:
    device = pick_device(name)
    if device.type == "cpu":
        return (device,)
    return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))


def _read(item: Item) -> int:
    match item:
        case Unit():
            return item.read
        case KvScales():
            return 0
        case Moved(stored=Stored(start=start, stop=stop)):
            return stop - start
        case Stored():
            return item.stop - item.start


# ---------------------------------------------------------------------------------------------------------- resuming


def _finished(work: QuantizePlan, working: Working) -> dict[str, ShardDone]:
    """The finished shards with a matching checksum, by file.

    Raises ConfigError if the folder contains anything else.
    """
    folder, by_file = work.out / WORK, dict[str, ShardDone]()
    begun, ended = (folder / "job.json").exists(), (work.out / RESULT).exists()
    job = work.job
    if ended:  # checking or repairing a finished folder recreates WORK, without records
        result = _decoded(work.out / RESULT, QuantizeResult)
        job, by_file = result.job, {record.file: record for record in result.shards}
    if begun:
        job = _decoded(folder / "job.json", QuantizeJob)
        records = [_decoded(path, ShardDone) for path in folder.glob("model-*.json")]
        by_file |= {record.file: record for record in records}
    here = any((work.out / name).exists() for name in (CONFIG, INDEX)) or any(work.out.glob("*.safetensors"))
    if here and not (begun or ended):
        raise ConfigError(f"{work.out}: contains a checkpoint not made by `redline quantize`: name another folder")
    for field in QuantizeJob.__struct_fields__:
        was, now = getattr(job, field), getattr(work.job, field)
        if was != now:
            raise ConfigError(f"{work.out}: begun with {field} {was}, this run has {now}: name another folder")
    with written(folder):
        folder.mkdir(exist_ok=True)
    save(folder / "job.json", msgspec.json.encode(work.job))
    total, read, found = sum(record.bytes for record in by_file.values()), 0, dict[str, ShardDone]()
    for record in by_file.values():
        working.show(read / max(total, 1), 1.0)
        path = work.out / record.file
        if path.exists() and path.stat().st_size == record.bytes and measured(path).sha256 == record.sha256:
            found[record.file] = record
        read += record.bytes
    return found


def _decoded(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_room(work: QuantizePlan, done: Mapping[str, ShardDone]) -> None:
    needed = sum(file_bytes(shard.entries) for shard in work.shards if shard.file not in done)
    if needed and not (work.out / WORK / INPUTS / "told.json").exists():
        needed += work.calibration
    check_room(work.out, needed, f"{len(work.shards) - len(done)} shards take")


# -------------------------------------------------------------------------------------------------------------- work


def _convert_all(
    work: QuantizePlan, done: Mapping[str, ShardDone], inputs: CalibrationInputs | None, working: Working
) -> list[ShardDone]:
    """The records of all shards, after the missing ones have been written."""
    left = [shard for shard in work.shards if shard.file not in done]
    total, read, began = sum(shard.read for shard in left), 0, clock.monotonic()

    def progress(count: int) -> None:
        nonlocal read
        read += count
        rate = human(round(read / max(clock.monotonic() - began, 1e-9)))
        working.show(read / max(total, 1), 1.0, what="quantize", note=f"{rate}/s")

    records = dict(done)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, processors() // work.workers))  # threads per worker
    try:
        with ThreadPoolExecutor(work.workers, "quantize") as pool:
            for shard in left:
                records[shard.file] = _convert_shard(work, shard, inputs, pool, progress)
    finally:
        torch.set_num_threads(threads)
    return [records[shard.file] for shard in work.shards]


def _convert_shard(
    work: QuantizePlan,
    shard: ShardPlan,
    inputs: CalibrationInputs | None,
    pool: ThreadPoolExecutor,
    progress: Callable[[int], None],
) -> ShardDone:
    errors: dict[str, Error] = {}
    with written(work.out):
        made = write_shard(work.out / shard.file, shard.entries, _data(work, shard, inputs, pool, progress, errors))
    record = ShardDone(
        file=shard.file,
        bytes=made.bytes,
        sha256=made.sha256,
        weights={name: weight_error(error) for name, error in errors.items()},
    )
    save(work.out / WORK / f"{Path(shard.file).stem}.json", msgspec.json.encode(record))
    return record


def _data(
    work: QuantizePlan,
    shard: ShardPlan,
    inputs: CalibrationInputs | None,
    pool: ThreadPoolExecutor,
    progress: Callable[[int], None],
    errors: dict[str, Error],
) -> Iterator[Tensor]:
    """The shard's tensors in order, with workers some units ahead. Fills `errors`."""
    waiting: deque[tuple[Item, Future[Converted] | None]] = deque()
    begun = 0

    def first() -> Iterator[Tensor]:
        nonlocal begun
        item, future = waiting.popleft()
        if future is not None:
            begun -= 1
            made = future.result()
            errors.update(made.errors)
            yield from made.tensors
        elif isinstance(item, KvScales):
            assert inputs is not None
            yield from (tensor for _, tensor in item.tensors(inputs.kv_scale(item.layer)))
        else:
            stored = item.stored if isinstance(item, Moved) else item
            assert isinstance(stored, Stored)
            yield work.checkpoint.raw(stored) if stored.stop > stored.start else torch.empty(0, dtype=torch.uint8)
        progress(_read(item))

    try:
        for number, item in enumerate(shard.items):
            future = None
            if isinstance(item, Unit):
                device = work.devices[number % len(work.devices)]
                future = pool.submit(convert, item, work.checkpoint, work.config.level, device, inputs)
                begun += 1
            waiting.append((item, future))
            while begun > AHEAD * work.workers:
                yield from first()
        while waiting:
            yield from first()
    finally:
        for _, future in waiting:
            if future is not None:
                future.cancel()


def weight_error(error: Error) -> WeightError:
    """Converts the sums of a weight to ratios."""
    outputs = error.outputs
    return WeightError(
        relative=_ratio(error.squared, error.weight_squared, 0.0),
        largest=error.largest,
        to_max_scaling=_ratio(error.squared, error.max_scaling, 1.0),
        seen=None if outputs is None else outputs.seen,
        searched=outputs is not None and not outputs.calibrated,
        output=None if outputs is None else _ratio(outputs.squared, outputs.output_squared, 0.0),
        output_to_max_scaling=None if outputs is None else _ratio(outputs.squared, outputs.max_scaling, 1.0),
    )


def _ratio(squared: float, to: float, without: float) -> float:
    return (squared / to) ** 0.5 if to > 0 else without


# -------------------------------------------------------------------------------------------------------------- end


def _finish(work: QuantizePlan, shards: Sequence[ShardDone]) -> None:
    """Write all files other than the shards. The index is the last."""
    source, out = Path(work.config.source), work.out
    with written(out):
        for path in sorted(source.iterdir()):
            beside = path.is_file() and not path.name.startswith(".") and ".safetensors" not in path.name
            if beside and path.name not in _NOT_COPIED:
                shutil.copyfile(path, out / path.name)
    has = {"activations": work.activations, "kv_scales": work.config.kv_scales}
    to, names = FORMATS[work.config.format], kept(work.config, work.checkpoint)
    _save(out / CONFIG, requantized(read_json(source / CONFIG), to, names, **has))
    if to == Nvfp4Experts("ModelOpt"):
        _save(out / HF_QUANT, hf_quant_config(names, **has))
    save(out / CARD, _card(work, shards).encode())
    os.chmod(out / CARD, 0o644)
    _save(out / RESULT, msgspec.to_builtins(QuantizeResult(job=work.job, shards=tuple(shards))))
    weight_map = {entry.name: shard.file for shard in work.shards for entry in shard.entries}
    size = sum(entry.bytes for shard in work.shards for entry in shard.entries)
    _save(out / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})
    Checkpoint.open(out)  # verifies the result: every name, dtype, shape and size
    shutil.rmtree(out / WORK)


def _card(work: QuantizePlan, shards: Sequence[ShardDone]) -> str:
    """README.md of the result."""
    quantised: set[str] = set()
    kept: list[tuple[str, str]] = []
    for item in (item for shard in work.shards for item in shard.items):
        if isinstance(item, Unit) and isinstance(item.tasks[0].to, Nvfp4Experts | Int4Experts):
            quantised |= {entry.name for entry in item.entries}
        elif not isinstance(item, KvScales | Moved):
            kept += [(entry.name, entry.dtype) for entry in entries_of(item) if entry.bytes]
    theirs = Path(work.config.source) / CARD
    card = QuantizedCard(
        to=FORMATS[work.config.format],
        how=work.how,
        source=Path(work.config.source).resolve().name,
        was=work.checkpoint.config.quantization,
        fingerprint=work.job.fingerprint,
        version=work.job.redline,
        size=work.bytes,
        quantised=quantised,
        kept=kept,
        activations=work.activations,
        kv_scales=work.config.kv_scales,
        errors=summary(shards),
        theirs=theirs.read_text(errors="replace") if theirs.is_file() else "",
    )
    return card.text()


def _save(path: Path, value: Any) -> None:
    save(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    os.chmod(path, 0o644)


def summary(shards: Sequence[ShardDone]) -> list[str]:
    """Lines that summarize the error by projection, with the worst weight of each."""
    by_projection: dict[str, list[tuple[str, WeightError]]] = {}
    for shard in shards:
        for name, error in shard.weights.items():
            by_projection.setdefault(name.split(".")[-2], []).append((name, error))
    lines: list[str] = []
    for projection, found in sorted(by_projection.items()):
        count = len(found)
        mean = (sum(error.relative**2 for _, error in found) / count) ** 0.5
        ratio = sum(error.to_max_scaling for _, error in found) / count
        name, worst = max(found, key=lambda one: one[1].relative)
        lines.append(
            f"{projection}: {count:,} weights, error {mean:.4f} of the weight ({ratio:.3f} of max scaling's); "
            f"worst {worst.relative:.4f}, {name}"
        )
    if not by_projection:
        lines.append("no weight was rounded")
    every = [error for shard in shards for error in shard.weights.values() if error.output_to_max_scaling is not None]
    if every:
        ratio = sum(error.output_to_max_scaling or 0.0 for error in every) / len(every)
        rare = sum(error.searched for error in every)
        lines.append(
            f"outputs over the calibration texts: {ratio:.3f} of max scaling's error; {rare:,} of {len(every):,} "
            f"weights received fewer than {SEEN} tokens, and were searched"
        )
    return lines
