"""`redline bench decode`: tables of `bench.step.checkpoint_steps` (a checkpoint) and `bench.step.depth` (a shape)."""

import functools
import gc
import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from redline.bench.machine import measure
from redline.bench.record import provenance
from redline.bench.step import depth_cpu, depth_gpu
from redline.bench.step.checkpoint_steps import bench_decode as measure_decode
from redline.bench.step.depth import Build, DepthCase, Timing, depth_of, measure_step
from redline.bench.step.depth_fit import DepthMemory, check
from redline.bench.step.depth_record import KV_DTYPES, PEER, PEER_DATE, DepthRecord, append, read, record_of
from redline.bench.step.ranks import own_rank, ranks_of_gpus
from redline.cli.bench.steps import DecodeFlags
from redline.cli.console import rate, save_result, say, until_interrupted
from redline.disk import check_output
from redline.errors import ConfigError
from redline.kernels.cpu import native
from redline.kernels.cuda.kernel import has_kernels, why_not
from redline.kernels.group import Group
from redline.messages.base import Record
from redline.messages.job import PAGE_TOKENS
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.forced_routing import OVERLAP
from redline.model.k2.shapes import shape
from redline.ops.op import PeakRates
from redline.progress import Working
from redline.worker.config import EngineConfig
from redline.worker.engine import EngineCore, free_memory, kv_dtype_of, pick_device

READ_BYTES = 4 << 30  # bytes read to measure bandwidth, at most: far more than any cache holds


def bench_checkpoint(folder: Path, flags: DecodeFlags, console: Console) -> int:
    """Measures decode steps of a checkpoint, prints, saves. Returns the exit code: 0, or 130 after Ctrl-C.

    Raises ConfigError or CheckpointError.
    """
    dtype = kv_dtype_of(flags.kv_dtype)
    if flags.save is not None:
        check_output(flags.save)
    batches, contexts, repeats = flags.batch or (1, 4, 16), flags.context or (200, 4000), flags.repeats or 40
    longest = max(contexts) + repeats + 128
    tokens = max(batches) * -(-longest // PAGE_TOKENS) * PAGE_TOKENS
    config = EngineConfig(
        kv_memory=tokens * Checkpoint.open(folder).config.kv_bytes_per_token(dtype),
        kv_dtype=flags.kv_dtype,
        max_model_len=longest,
        max_running=max(batches),
        step_tokens=max(512, *batches),
    )
    sizes = batches, contexts, repeats
    return until_interrupted(lambda: _bench_checkpoint(folder, config, sizes, flags.save, console), console)


def _bench_checkpoint(
    folder: Path,
    config: EngineConfig,
    sizes: tuple[Sequence[int], Sequence[int], int],
    save: Path | None,
    console: Console,
) -> int:
    """sizes: rows per step, tokens already in the KV cache, timed steps per case."""
    kv_dtype = config.kv_dtype
    with ExitStack() as stack, Working("loading weights") as working:
        runner = EngineCore.load(folder, config, progress=lambda done, total: working.show(done / total, 1.0)).runner
        stack.callback(runner.close)
        working.show(what="measuring the machine")
        torch.set_num_threads(native.threads())
        machine = limits(runner.model.device, runner.model.config.weight_bytes)

        def computed(done: int, total: int) -> None:
            working.show(done, total, what="tokens")

        cases = list(measure_decode(runner, machine, *sizes, computed))
    table = Table(
        title=f"decode, {folder.name} on {machine.name}, {kv_dtype} pages",
        caption=_caption(machine.bytes_per_s, machine.flops_per_s),
    )
    for name in ("batch", "context", "ms/step", "p10", "p90", "floor ms", "floor/time", "tokens/s"):
        table.add_column(name, justify="right")
    for case in cases:
        figures = f"{case.ms:.2f} {case.p10_ms:.2f} {case.p90_ms:.2f} {case.floor_ms:.2f} {case.ratio:.0%}".split()
        table.add_row(str(case.batch), str(case.context), *figures, rate(case.batch, case.ms, case.floor_ms))
    console.print(table)
    if save is not None:
        record = {
            **provenance("torch"),
            "folder": folder.name,
            "kv_dtype": kv_dtype,
            "bytes_per_s": machine.bytes_per_s,
            "flops_per_s": machine.flops_per_s,
            "cases": cases,
        }
        save_result(save, record, console)
    return 0


@contextmanager
def all_threads() -> Generator[None]:
    """torch has all threads, until `limits` has measured a CPU; then as many as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(native.threads())
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def limits(device: torch.device, working_set_bytes: int) -> PeakRates:
    """Measures this machine. On a CPU, torch then gets 1 thread: our kernels have their own."""
    machine = measure(device, working_set_bytes)
    if device.type == "cpu" and native.library() is not None:
        torch.set_num_threads(1)
    return machine


def _caption(bytes_per_s: float, flops_per_s: float) -> str:
    return (
        f"floor: the larger of bytes / {bytes_per_s / 1e9:.1f} GB/s and operations / {flops_per_s / 1e12:.2f} TFLOP/s "
        "(both measured in this run)"
    )


# ------------------------------------------------------------------------------------------------------------ depth


class DepthConfig(Record, frozen=True):
    """Configuration of `redline bench decode --shape`, which measures each batch x tokens x context."""

    shape: str
    layers: int | None = None  # None: the shape's
    alias: int | None = None  # layers kept in memory, run in turn; None: all
    experts: int | None = None  # experts per layer; None: the shape's
    routing: str | None = None  # uniform or correlated; None: uniform, if routing can be forced
    overlap: float | None = None  # correlated routing: share of experts that a row's next token reuses, 0 to 1
    batch: tuple[int, ...] = (1,)  # rows per step
    tokens: tuple[int, ...] = (1,)  # tokens per row
    context: tuple[int, ...] = (1024,)  # tokens already in the KV cache
    kv_dtype: str = "bf16"  # format of the KV cache
    repeats: int = 30  # timed steps per case
    save: Path | None = None  # a file; the cases are appended to its list
    ranks: int = 1  # tensor parallel ranks


def bench_depth(config: DepthConfig, console: Console) -> int:
    """Measures steps of a shape, prints and saves case by case. Returns the exit code: 0, or 130 after Ctrl-C.

    Raises ConfigError.
    """
    device = pick_device(None)
    check_device(config, device)
    measured = cases(config, forced=device.type != "cpu")
    if own_rank():
        config, console = msgspec.structs.replace(config, save=None), Console(quiet=True)
    with ranks_of_gpus(measured[0].config, config.ranks) as group:
        build = builder(device, group)
        work = functools.partial(_bench_depth, config, measured, build, device, console)
        return saved_case_by_case(config.save, DepthRecord, work, console)


def check_device(config: DepthConfig, device: torch.device) -> None:
    """Raises ConfigError if no step can be built on this device, or not over several ranks."""
    if device.type == "cuda" and not has_kernels(device):
        raise ConfigError(f"no step of a shape can be built on this machine ({why_not()}); give a checkpoint folder")
    if config.ranks > 1 and device.type == "cpu":
        raise ConfigError(f"ranks is {config.ranks}: a step of a shape is measured over several GPUs, not on a CPU")


def saved_case_by_case(save: Path | None, kind: type[DepthRecord], work: Callable[[], int], console: Console) -> int:
    """The exit code of `work`, or 130 after Ctrl-C. Raises ConfigError if `save` is a file of another kind."""
    if save is not None:
        check_output(save)
        if save.exists():
            read(save, kind)
    kept = "nothing was saved" if save is None else f"{save} contains the cases measured so far"
    return until_interrupted(work, console, kept)


def _bench_depth(
    config: DepthConfig, measured: list[DepthCase], build: Build, device: torch.device, console: Console
) -> int:
    machine: PeakRates | None = None
    with all_threads():
        for case in measured:
            for line in describe(case, config, DepthMemory(case)):
                console.print(line, highlight=False, soft_wrap=True, markup=False)
            _check_memory(case, device)
            if machine is None:
                machine = limits(device, min(max(DepthMemory(case).weights for case in measured), READ_BYTES))
            record = record_of(case, _measure(case, build, device, config.repeats), machine)
            _print(record, machine, console)
            if config.save is not None:
                append(config.save, record)
                say(console, f"added to {config.save}", "dim")
    return 0


def builder(device: torch.device, group: Group) -> Build:
    """The function that builds a step on this device, or one rank's part of it."""
    return depth_cpu.CpuStep if device.type == "cpu" else functools.partial(depth_gpu.GpuStep, group=group)


def cases(config: DepthConfig, *, forced: bool) -> list[DepthCase]:
    """The cases of a config. forced: the step takes the experts of each token as an input, drawn by `routing`.

    Raises ConfigError, before anything is built.
    """
    if config.kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv-dtype is {config.kv_dtype!r}; expected one of {', '.join(KV_DTYPES)}")
    geometry, overlap = shape(config.shape), _overlap(config, forced)
    layers = config.layers or geometry.num_hidden_layers
    found = [
        depth_of(
            config.shape,
            geometry,
            layers=layers,
            physical=config.alias or layers,
            experts=config.experts,
            rows=rows,
            tokens=tokens,
            context=context,
            kv_dtype=KV_DTYPES[config.kv_dtype],
            overlap=overlap,
            ranks=config.ranks,
        )
        for context, tokens, rows in itertools.product(config.context, config.tokens, config.batch)
    ]
    for case in found:
        check(case)
    return found


def _overlap(config: DepthConfig, forced: bool) -> float | None:
    if not forced:
        if config.routing is not None or config.overlap is not None:
            raise ConfigError("routing: the CPU kernels cannot force experts, so the model's router decides")
        return None
    match config.routing or "uniform":
        case "uniform" if config.overlap is None:
            return 0.0
        case "uniform":
            raise ConfigError("overlap applies to --routing correlated only")
        case "correlated":
            return OVERLAP if config.overlap is None else config.overlap
        case other:
            raise ConfigError(f"routing is {other!r}; expected uniform or correlated")


def describe(case: DepthCase, config: DepthConfig, memory: DepthMemory) -> list[str]:
    """Lines on the step that is built: its size, how it differs from the whole model, and its memory."""
    layers, whole = case.config.num_hidden_layers, shape(config.shape).n_routed_experts
    lines = [f"{case.shape}: {layers} layers, {case.rows} rows x {case.tokens} tokens, context {case.context:,}"]
    if case.ranks > 1:
        lines.append(f"ranks            {case.ranks}; bytes, floors and ops are of one rank")
    if case.physical < layers:
        lines.append(f"aliased          {layers} layers run on {case.physical} in memory, in turn")
    if case.config.n_routed_experts < whole:
        lines.append(f"fewer experts    {case.config.n_routed_experts} of {whole} per layer: rows share more of them")
    return lines + memory.explain()


def _check_memory(case: DepthCase, device: torch.device) -> None:
    """Raises ConfigError, with the size that would fit, if memory is too small."""
    gc.collect()  # the previous case's step holds CUDA graphs
    if device.type == "cuda":
        torch.cuda.empty_cache()
    memory, free = DepthMemory(case), free_memory(device)
    if memory.whole > free:
        raise memory.refusal(free)


def _measure(case: DepthCase, build: Build, device: torch.device, repeats: int) -> Timing:
    """Raises ConfigError, with the size that would fit, if memory runs out while measuring."""
    memory, free = DepthMemory(case), free_memory(device)
    with Working("building") as working:
        try:
            step = build(case, lambda done, whole: working.show(done / whole, 1.0))
            timed, total = 0, 1 + len(step.ops)
            working.show(0, total, what="timing the step and its ops")

            def did() -> None:
                nonlocal timed
                timed += 1
                working.show(timed, total)

            return measure_step(step, case, repeats, did=did)
        except torch.OutOfMemoryError as error:
            raise memory.refusal(free) from error


def _print(record: DepthRecord, machine: PeakRates, console: Console) -> None:
    if record.ops:
        console.print(_op_table(record, machine))
    for line in _sums(record):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _op_table(record: DepthRecord, machine: PeakRates) -> Table:
    what = f"{record.rows} x {record.tokens_per_row} tokens, context {record.context:,}, {record.kv_dtype} pages"
    table = Table(
        title=f"decode, {record.shape} on {record.gpu}: {what}, routing {record.routing}",
        caption=_caption(machine.bytes_per_s, machine.flops_per_s),
    )
    for name in ("op", "launches", "us each", "floor us", "floor/time", "ms of the step"):
        table.add_column(name, justify="left" if name == "op" else "right")
    for op in record.ops:
        each, floor = op.us / op.launches, op.floor_us / op.launches
        ratio = f"{op.floor_us / op.us:.0%}"
        table.add_row(op.name, str(op.launches), f"{each:.2f}", f"{floor:.2f}", ratio, f"{op.us / 1e3:.3f}")
    floor = sum(op.floor_us for op in record.ops) / 1e3
    table.add_section()
    table.add_row("sum of ops", "", "", f"{1e3 * floor:,.0f}", f"{floor / record.ops_ms:.0%}", f"{record.ops_ms:.3f}")
    return table


def _sums(record: DepthRecord) -> list[str]:
    lines = [
        f"step             {record.ms:.3f} ms (p10 {record.p10_ms:.3f}, p90 {record.p90_ms:.3f})",
        f"floor            {record.floor_ms:.3f} ms, {record.floor_ms / record.ms:.0%} of the time",
        f"experts read     {record.expert_bytes / 1e9:.3f} GB of distinct experts per step, mean",
        f"tokens/s         {rate(record.tokens, record.ms, record.floor_ms)}",
    ]
    if (ms := record.peer_ms) is not None:
        lines.append(
            f"peer             {PEER} on the same number of NVIDIA H200 ({PEER_DATE}), batch {record.tokens}: "
            f"{ms:g} ms, {ms / record.ms:.2f} times ours"
        )
    return lines
