"""`redline bench decode --shape ... --draft-shape ...`: the table of `bench.step.rounds`."""

import functools
import gc
import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from redline.bench.step.depth_fit import DepthMemory
from redline.bench.step.depth_record import RoundRecord, append, round_record
from redline.bench.step.drafters import EAGLE3_MLA, drafter_weights, public_drafter
from redline.bench.step.ranks import own_rank, ranks_of_gpus
from redline.bench.step.rounds import RoundCase, RoundTiming, measure_round, random_drafter
from redline.bench.step.trace import draw
from redline.cli.bench.step_tables import (
    READ_BYTES,
    DepthConfig,
    all_threads,
    cases,
    check_device,
    describe,
    limits,
    saved_case_by_case,
)
from redline.cli.console import rate, say
from redline.errors import ConfigError
from redline.kernels.cuda.step.step_rows import MOST_DRAFTS, MOST_ROWS
from redline.kernels.group import Group
from redline.messages.base import Record
from redline.model.block.config import BlockConfig
from redline.model.draft_shard import left_out
from redline.model.drafter import Drafter
from redline.model.k2.cpu import K2
from redline.model.k2.cuda import most_decoded
from redline.model.k2.random_weights import random_k2
from redline.ops.op import PeakRates
from redline.policy.synthetic import GOLDEN, GOLDEN_BLOCK_DRAFTS, golden_block, rates_of, read_acceptance
from redline.progress import Working
from redline.worker.config import HEAD_BITS
from redline.worker.engine import free_memory, pick_device

GOLDEN_NAME = "golden"
DRAFTS_OF_CHAINS, DRAFTS_OF_BLOCKS = (1, 2, 3, 4), (3, 5, 7)  # draft tokens per round, by default


class RoundsConfig(Record, frozen=True):
    """Configuration of `redline bench decode --draft-shape`, which measures each batch x k x context."""

    step: DepthConfig  # its `tokens` is set to 1 + k
    draft_shape: str  # of `drafters.DRAFT_SHAPES`
    k: tuple[int, ...] = ()  # draft tokens per round; empty: DRAFTS_OF_CHAINS or DRAFTS_OF_BLOCKS
    draft_head_bits: int = 16  # bits per weight of the drafter's head: 16 or 8
    accept: str = GOLDEN_NAME  # mean tokens per round by k; or, for one k, a length or rates (`policy.synthetic`)


def bench_rounds(config: RoundsConfig, console: Console) -> int:
    """Measures rounds of a shape, prints and saves case by case. Returns the exit code: 0, or 130 after Ctrl-C.

    Raises ConfigError.
    """
    device = pick_device(None)
    check_device(config.step, device)
    measured = round_cases(config, forced=device.type != "cpu")
    if own_rank():
        step = msgspec.structs.replace(config.step, save=None)
        config, console = msgspec.structs.replace(config, step=step), Console(quiet=True)
    with ranks_of_gpus(measured[0].depth.config, config.step.ranks) as group:
        work = functools.partial(_bench_rounds, config, measured, device, console, group)
        return saved_case_by_case(config.step.save, RoundRecord, work, console)


def round_cases(config: RoundsConfig, *, forced: bool) -> list[RoundCase]:
    """The cases of a config, context by context. forced: as in `step_tables.cases`.

    Raises ConfigError, before anything is built.
    """
    if config.draft_head_bits not in HEAD_BITS:
        raise ConfigError(f"draft-head-bits is {config.draft_head_bits}; expected 16 or 8")
    found: list[RoundCase] = []
    drafts = config.k or (DRAFTS_OF_CHAINS if config.draft_shape == EAGLE3_MLA else DRAFTS_OF_BLOCKS)
    for context, rows, k in itertools.product(config.step.context, config.step.batch, drafts):
        asked = msgspec.structs.replace(config.step, context=(context,), batch=(rows,), tokens=(1 + k,))
        (depth,) = cases(asked, forced=forced)
        drafter = public_drafter(config.draft_shape, depth.config)
        most, block = MOST_DRAFTS, isinstance(drafter, BlockConfig)
        if isinstance(drafter, BlockConfig):
            most = min(most, drafter.drafts)
            if config.draft_head_bits != 16:
                raise ConfigError(f"draft-head-bits is {config.draft_head_bits}; {drafter.kind} has a head in 16 bits")
        if rows > MOST_ROWS or k > most:
            raise ConfigError(
                f"{rows} rows with --k {k}: a round of {config.draft_shape} has at most {MOST_ROWS} rows and {most} "
                "draft tokens"
            )
        if forced and rows * depth.tokens > most_decoded(depth.config, depth.ranks):
            raise ConfigError(
                f"{rows} rows with --k {k} are {rows * depth.tokens} tokens; a CUDA graph contains the decode "
                f"kernels, which take at most {most_decoded(depth.config, depth.ranks)} for {depth.shape}"
            )
        rates = _rates(config, k, len(drafts), block=block)
        found.append(RoundCase(depth=depth, drafter=drafter, rates=rates, head_bits=config.draft_head_bits))
    return found


def _rates(config: RoundsConfig, k: int, cases: int, *, block: bool) -> tuple[float, ...]:
    if config.accept == GOLDEN_NAME:
        most = GOLDEN_BLOCK_DRAFTS if block else len(GOLDEN)
        if k > most:
            raise ConfigError(f"accept is golden, which covers --k 1 to {most}; give an acceptance length for {k}")
        return rates_of(golden_block(k) if block else GOLDEN[k - 1], k, "accept")
    if cases != 1:
        raise ConfigError(f"accept is {config.accept}, which needs one --k, but {cases} were given; use golden")
    return rates_of(read_acceptance(config.accept, "accept"), k, "accept")


def _bench_rounds(
    config: RoundsConfig, measured: Sequence[RoundCase], device: torch.device, console: Console, group: Group
) -> int:
    repeats, save = config.step.repeats, config.step.save
    records: list[RoundRecord] = []
    hosts: list[float] = []
    with all_threads():
        largest = max(measured, key=lambda case: _memory(case, repeats).whole)
        memory = _memory(largest, repeats)
        for line in describe(largest.depth, config.step, memory):
            say(console, line)
        if memory.whole > (free := free_memory(device)):
            raise memory.refusal(free)
        machine = limits(device, min(memory.weights, READ_BYTES))
        try:
            with Working("building") as working:
                model, drafter = _models(measured, device, working, group)
                for number, case in enumerate(measured):
                    working.show(number, len(measured), what="rounds")
                    timing = measure_round(model, drafter, case, repeats)
                    records.append(round_record(case, timing, machine))
                    hosts.append(timing.host_ms)
                    _keep(records[-1], timing, save)
                    _release(device)
        except torch.OutOfMemoryError as error:
            raise memory.refusal(free) from error
        finally:
            if records:  # an interrupted run prints its finished cases too
                _print(records, hosts, machine, console)
        if save is not None:
            say(console, f"added to {save}", "dim")
    return 0


def _memory(case: RoundCase, repeats: int) -> DepthMemory:
    """While loading, the drafter's weights are in memory twice: whole, and as this rank's shard."""
    grows = case.reach(repeats) - case.depth.context - case.depth.tokens
    numbers = 2 * drafter_weights(case.drafter) - left_out(case.drafter, case.depth.ranks)
    return DepthMemory(case.depth, 2 * numbers, grows, case.drafter.kv_bytes_per_token(case.depth.kv_dtype))


def _models(measured: Sequence[RoundCase], device: torch.device, working: Working, group: Group) -> tuple[K2, Drafter]:
    """The target and the drafter of all cases, which differ only in rows, tokens and context."""
    most = max(case.depth.rows * case.depth.tokens for case in measured)
    first = measured[0]

    def made(done: int, whole: int) -> None:
        working.show(done / whole, 1.0)

    model = random_k2(first.depth.config, first.depth.physical, most, device, made, group)
    drafter = random_drafter(model, first.drafter, first.head_bits)
    _release(device)
    return model, drafter


def _release(device: torch.device) -> None:
    gc.collect()  # the previous case holds CUDA graphs
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _keep(record: RoundRecord, timing: RoundTiming, save: Path | None) -> None:
    """Appends the case to the file, and draws its trace into the same folder."""
    if save is None:
        return
    append(save, record)
    if timing.trace is not None and find_spec("matplotlib") is not None:
        bits, routing = record.draft_head_bits, record.routing
        sizes = f"context {record.context:,}, {record.rows} rows, k {record.k}"
        case = f"{record.drafter}, {sizes}, routing {routing}, head in {bits} bits"
        what = f"{record.shape} on {record.gpu}: {case}, {record.ms:.2f} ms per round, idle {record.idle_share:.1%}"
        name = (
            f"{record.drafter}-{record.context}-{record.rows}-rows-k{record.k}-{routing.replace(' ', '-')}-{bits}-bits"
        )
        draw(timing.trace, record.ms, what, save.with_name(f"{save.stem}-{name}.png"))


def _print(records: Sequence[RoundRecord], hosts: Sequence[float], machine: PeakRates, console: Console) -> None:
    """hosts: milliseconds that the host took to enqueue each case's round."""
    first = records[0]
    table = Table(
        title=f"rounds, {first.shape} on {machine.name}: {first.layers} layers, {first.kv_dtype} pages, "
        f"routing {first.routing}, {first.drafter} with its head in {first.draft_head_bits} bits",
        caption=f"floor: {machine.bytes_per_s / 1e9:.1f} GB/s or {machine.flops_per_s / 1e12:.2f} TFLOP/s, the larger "
        "(both measured in this run); none: ms of a step without drafts; x: speedup in tokens/s over it; host: ms to "
        "enqueue a round's copies and CUDA graphs",
    )
    whole, parts = (
        ("context", "rows", "k", "accept", "ms", "p10", "p90", "floor"),
        ("verify", "floor", "draft", "floor"),
    )
    for name in (*whole, *parts, "none", "tokens/s", "x", "idle", "host"):
        table.add_column(name, justify="right")
    for record, host_ms in zip(records, hosts, strict=True):
        verify, draft = record.ops
        milliseconds = (record.ms, record.p10_ms, record.p90_ms, record.floor_ms, record.verify_ms)
        figures = (*milliseconds, verify.floor_us / 1e3, record.draft_ms, draft.floor_us / 1e3, record.baseline_ms)
        table.add_row(
            *(f"{record.context:,}", str(record.rows), str(record.k), f"{record.accept:.2f}"),
            *(f"{figure:.2f}" for figure in figures),
            *(rate(record.tokens_per_s * record.ms / 1e3, record.ms, record.floor_ms, 1), f"{record.times:.2f}"),
            *("-" if record.idle_share is None else f"{record.idle_share:.1%}", f"{host_ms:.2f}"),
        )
    console.print(table)
