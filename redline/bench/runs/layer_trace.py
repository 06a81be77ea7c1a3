"""A trace of one layer of a decode step: each kernel's start and end on every rank, beside the layer's floor.

    python -m redline.bench.runs.layer_trace --ranks 4 --alias 16 --rows 1 8 32
        --save benchmarks/results/layer-trace-four-h100.json --picture benchmarks/results/layer-trace-four-h100.png
    python -m redline.bench.runs.layer_trace --read EVENTS.json.gz --save FILE --picture PNG

It replays the graphs that `redline bench decode --shape` times, on random weights with drawn experts. First each number
of rows is timed, its ops too, while nothing records; then all are replayed once more, and torch.profiler (CUPTI) tells
of every kernel. All in one session of it: a second one may see nothing. The middle layers of all replays are taken
together. --events keeps all kernels as they were recorded, from which --read makes the same again without a GPU.
"""

import argparse
import gzip
import itertools
import os
import sys
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from redline.bench.machine import measure
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.step.depth import WARM_UP, Depth, Mark, Step, Timing, depth_of, measure_step, reroute
from redline.bench.step.depth_fit import Memory, check
from redline.bench.step.depth_gpu import GpuStep
from redline.bench.step.depth_record import record_of
from redline.bench.step.layer_kernels import (
    FEWEST_LAYERS,
    LayerTrace,
    RankTrace,
    Recording,
    kernels_of,
    layer_trace,
)
from redline.bench.step.layer_lanes import draw
from redline.bench.step.ranks import own_rank, ranks_of_gpus
from redline.bench.step.trace import traced
from redline.disk import save, written
from redline.errors import ConfigError
from redline.kernels.group import Group
from redline.kernels.hopper.kernel import has_kernels, why_not
from redline.model.k2.shapes import shape
from redline.worker.engine import free_memory

REPLAYS = 12  # of each number of rows that count; some 600 kernels each
READ_BYTES = 4 << 30  # read to measure bandwidth, at most, as `redline bench decode` does
LIMIT_S = 300.0  # after which the program ends, done or not; the first run on a machine compiles for minutes
MARK_CYCLES = 1000  # of the GPU's clock: of the kernel that parts the cases


def main() -> None:
    """Records, or reads what was recorded; prints, saves and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="kimi-k2.6")
    parser.add_argument("--ranks", type=count, default=1, help="GPUs that share the model, one process for each")
    parser.add_argument("--layers", type=count, help="of the step; absent: the shape's")
    parser.add_argument("--alias", type=count, help="layers that lie in memory, taken in turn; absent: all")
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=count, default=1024, help="tokens of each row before the step")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which it ends, done or not")
    parser.add_argument("--events", type=output, help="a .json.gz for all kernels as they were recorded")
    parser.add_argument("--read", type=Path, help="what --events has kept: nothing is run")
    parser.add_argument("--save", type=output, help="a JSON file for the layers")
    parser.add_argument("--picture", type=output, help="a PNG; needs matplotlib (the `bench` extra)")
    given = parser.parse_args()
    if given.read is not None:
        recording = read(given.read)
    else:
        recording = recorded(depths(given), given.limit)
        if own_rank():
            return
        if given.events is not None:
            save(given.events, gzip.compress(msgspec.json.encode(recording)))
    trace = layer_trace(recording)
    show(trace)
    if given.save is not None:
        save(given.save, msgspec.json.format(msgspec.json.encode(trace), indent=1) + b"\n")
    if given.picture is not None:
        with written(given.picture):
            draw(trace, given.picture)


def depths(given: argparse.Namespace) -> list[Depth]:
    """The cases of a command line. Raises ConfigError where no such step can be built or traced."""
    geometry = shape(given.shape)
    layers = given.layers or geometry.num_hidden_layers
    if layers < FEWEST_LAYERS:
        raise ConfigError(f"layers is {layers}; a trace takes the middle ones: at least {FEWEST_LAYERS}")
    found = [
        depth_of(
            given.shape,
            geometry,
            layers=layers,
            physical=given.alias or layers,
            experts=None,
            rows=rows,
            tokens=1,
            context=given.context,
            kv_dtype=torch.bfloat16,
            overlap=0.0,
            ranks=given.ranks,
        )
        for rows in given.rows
    ]
    for depth in found:
        check(depth)
    return found


def read(path: Path) -> Recording:
    """What --events has kept. Raises ConfigError where it cannot be read or is anything else."""
    try:
        return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Recording)
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected what --events keeps: {error}") from None


def recorded(cases: Sequence[Depth], limit_s: float) -> Recording:
    """Builds, times and records all cases, of one model. Raises ConfigError without the GPUs or the memory for it."""
    if not torch.cuda.is_available() or not has_kernels(torch.device("cuda")):
        raise ConfigError(f"nothing can be recorded here: {why_not()}; --read takes what was recorded elsewhere")
    ends_after(limit_s)
    first = cases[0]
    with ranks_of_gpus(first.config, first.ranks) as group:
        device = torch.device("cuda", group.rank)
        room_for(cases, device)
        machine = measure(device, min(Memory(first).weights, READ_BYTES))
        steps: list[GpuStep] = []
        timings: list[Timing] = []
        for case in cases:
            steps.append(GpuStep(case, lambda done, whole: None, device, group, like=steps[0] if steps else None))
            timings.append(measure_step(steps[-1], case, REPLAYS))
            group.check()
            say(f"{case.rows} rows: {timings[-1].ms:.3f} ms, not recorded")
        mine = recorded_by(group, steps, cases, [timing.ms for timing in timings])
        group.check()
        every = gathered(msgspec.json.encode(mine), group, device)
        say(f"recorded: {len(mine.kernels)} kernels and copies")
    return Recording(
        origin={**provenance("torch", "triton", "nvidia-cuda-cupti"), "cuda": torch.version.cuda},
        replays=REPLAYS,
        steps=tuple(record_of(case, timing, machine) for case, timing in zip(cases, timings, strict=True)),
        ranks=tuple(msgspec.json.decode(data, type=RankTrace) for data in every),
    )


def recorded_by(group: Group, steps: Sequence[Step], cases: Sequence[Depth], ms: Sequence[float]) -> RankTrace:
    """Replays each case, with a mark in front of it, while the profiler records."""
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # graphs outlive the session, and CUPTI's end has broken them
    spans: list[list[tuple[Mark, Mark]]] = []
    with torch.inference_mode():
        trace = traced(lambda: spans.extend(replayed(step, case) for step, case in zip(steps, cases, strict=True)))
    kernels = kernels_of(trace)
    if not kernels:
        raise ConfigError("torch.profiler told of no kernel: CUPTI records nothing here, or another profiler has it")
    return RankTrace(
        rank=group.rank,
        ms=tuple(ms),
        traced_ms=tuple(tuple(begin.until(end) for begin, end in of[WARM_UP:]) for of in spans),
        kernels=tuple(kernels),
    )


def replayed(step: Step, case: Depth) -> list[tuple[Mark, Mark]]:
    """Enqueues a mark, then the replays, with the experts that `measure_step` drew: the moments around each."""
    device = step.routing.device
    draws, turns = reroute(step, case), itertools.cycle(step.captures)
    torch.cuda._sleep(MARK_CYCLES)  # pyright: ignore[reportPrivateUsage]  # a kernel that no step has
    spans: list[tuple[Mark, Mark]] = []
    for _ in range(WARM_UP + REPLAYS):
        draws()
        begin = Mark(device)
        next(turns)()
        spans.append((begin, Mark(device)))
    return spans


def gathered(data: bytes, group: Group, device: torch.device) -> list[bytes]:
    """What each rank gives, in the order of ranks, on all of them."""
    if group.ranks == 1:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.ranks)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    most = max(int(size) for size in sizes)
    mine = torch.frombuffer(bytearray(data.ljust(most)), dtype=torch.uint8).to(device)
    found = [torch.empty_like(mine) for _ in range(group.ranks)]
    dist.all_gather(found, mine)
    return [one[: int(size)].cpu().numpy().tobytes() for one, size in zip(found, sizes, strict=True)]


def room_for(cases: Sequence[Depth], device: torch.device) -> None:
    """ConfigError, with what would fit, where weights and the pages of all cases do not."""
    rows = sum(case.rows for case in cases)
    memory, free = Memory(replace(cases[0], rows=rows)), free_memory(device)
    if memory.whole > free:
        raise memory.refusal(free)


def ends_after(seconds: float) -> None:
    """Ends this process, and with it the ranks that it has started, if it still runs then."""

    def end() -> None:
        say(f"error: not done after {seconds:.0f} s, so it ends here; --limit gives it longer")
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def say(line: str) -> None:
    """A line on stderr, of rank 0."""
    if own_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def show(trace: LayerTrace) -> None:
    """A line for each kernel of rank 0, and what each rank's layer takes."""
    for case in trace.cases:
        for lane in case.lanes:
            out = "".join(f"; left out: {why}: {number}" for why, number in lane.left_out.items())
            print(
                f"{case.name}, rank {lane.rank}: a layer {lane.layer_us:.2f} us, floor {case.floor_us:.2f}; step "
                f"{lane.ms:.3f} ms, recorded {lane.span_ms:.3f}; {lane.layers} layers of {lane.replays} replays{out}"
            )
        lane = next(lane for lane in case.lanes if lane.kernels)
        print(f"{'':>24}{'start':>9}{'end':>9}{'us':>9}{'gap':>9}{'adds':>9}{'alone':>9}{'floor':>9}")
        for k in lane.kernels:
            times = k.start_us, k.end_us, k.us, k.gap_us, k.adds_us, k.alone_us, k.floor_us
            print(f"{k.op[:24]:<24}" + "".join(f"{'':>9}" if time is None else f"{time:>9.2f}" for time in times))
    for note in trace.notes:
        print(note)


if __name__ == "__main__":
    program(main)
