"""The layers of a decode step out of the kernels that GPUs ran: what each launch of a layer did, and when.

A trace knows no layers. `cases`, `replays` and `layers` find them by the names of kernels, and `layer_trace` takes the
middle ones of every whole replay together: medians. A kernel may begin before the one in front of it has ended, and
then waits for it; so its own time says little, and `adds_us`, by how much later it ends than the one in front, is what
it costs the layer.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from redline.bench.step.depth import WARM_UP
from redline.bench.step.depth_record import DepthRecord, OpRecord
from redline.bench.step.trace import ON_DEVICE
from redline.errors import ConfigError
from redline.wire.base import Record

MARK = "spin_kernel"  # in the name of what is launched in front of each case's replays
BEGINS, ENDS = "embed", "best"  # the first and the last kernel of a step
ONCE = "absorb"  # a kernel that each layer launches once
DENSE = "dense"  # the kernel of several products (dense.cu), which a layer launches in this order
PRODUCTS = "project_a", "project_q", "project_out", "gates"
OPS = {*PRODUCTS, ONCE, "attend", "unabsorb", "choose_experts", "experts_up", "experts_down", "sum_ranks"}
TRITONS = {"partial_out": "project_out"}  # what Triton's kernels are called otherwise than their op
FEWEST_LAYERS = 8  # of a step of which the middle ones say something
NAME = 100  # characters of a name that are kept


class Ran(NamedTuple):
    """One kernel, copy or fill on a GPU. Nanoseconds of that GPU's clock, from anywhere."""

    name: str
    start_ns: int
    end_ns: int


class RankTrace(Record, frozen=True):
    """What one rank's GPU ran while it was recorded: of each case a mark, WARM_UP replays and those that count.

    ms         of each case: the same step without the recording, the median
    traced_ms  of each case: each replay that counts, recorded, by the GPU's events around its launch
    """

    rank: int
    ms: tuple[float, ...]
    traced_ms: tuple[tuple[float, ...], ...]
    kernels: tuple[Ran, ...]


class Recording(Record, frozen=True):
    """All that was recorded, before anything is read out of it. origin: as `provenance` has it.

    steps: the cases, in the order in which they were recorded, each timed without the recording, its ops too (rank 0).
    """

    origin: dict[str, Any]
    replays: int
    steps: tuple[DepthRecord, ...]
    ranks: tuple[RankTrace, ...]


class KernelTime(Record, frozen=True):
    """One launch of a layer: medians, in microseconds. Times are from the start of the layer's first kernel.

    op        by its kernel's name and place; a kernel that nobody knows has its own name
    gap_us    from its end to the next one's start, of the last to the next layer's first; negative: they overlap
    adds_us   from the end of the one in front to its own
    alone_us  the op timed by itself, without the recording; None: it was not
    """

    op: str
    kernel: str
    start_us: float
    end_us: float
    us: float
    gap_us: float
    adds_us: float
    alone_us: float | None
    floor_us: float | None


class LaneTrace(Record, frozen=True):
    """A layer on one rank: the median of `layers` that are alike, out of the middle of `replays`.

    layer_us   from the start of a layer's first kernel to the next layer's
    kernels    empty: nothing whole was recorded
    one        the layer in the middle of one replay as it was: op, start and end in microseconds
    left_out   why replays and layers do not count, and how many
    unknown    names of kernels that nobody knows
    overlaps   launches that begin before the one in front has ended, in the median
    ms, traced_ms, span_ms  the step: not recorded; recorded, by events; recorded, from its first kernel to its last end
    """

    rank: int
    layer_us: float
    kernels: tuple[KernelTime, ...]
    one: tuple[tuple[str, float, float], ...]
    replays: int
    layers: int
    left_out: dict[str, int]
    unknown: tuple[str, ...]
    overlaps: int
    ms: float
    traced_ms: float
    span_ms: float


class LayerCase(Record, frozen=True):
    """One number of rows. step: measured without the recording. floor_us: of a layer with experts."""

    rows: int
    floor_us: float
    step: DepthRecord
    lanes: tuple[LaneTrace, ...]

    @property
    def name(self) -> str:
        """For a reader."""
        return f"{self.rows} row{'s' if self.rows > 1 else ''}"


class LayerTrace(Record, frozen=True):
    """What is kept. notes: how to read it, in words."""

    origin: dict[str, Any]
    notes: tuple[str, ...]
    cases: tuple[LayerCase, ...]


NOTES = (
    "Each rank's layer begins at the start of its own first kernel: the clocks of GPUs differ by more than a kernel "
    "takes, so nothing here says which rank was first. Ranks meet in the sums of every layer.",
    "A kernel's start is its first block's: with dependent launches that may be before the one in front has ended. It "
    "asks for weights then and waits; so kernels' own times add up to more than the layer, and adds_us to the layer.",
    "A kernel that ends in a sum over ranks waits there for the slowest, and its time has that wait.",
    "A layer's floor is its ops' floors together, as launched: a weight that each rank reads whole counts whole.",
    "An op of two kernels (gates and choose_experts, a product and sum_ranks) was timed alone as one, without the sum.",
    "Recording costs time: ms is the same step, with the same experts, not recorded.",
)


def kernels_of(trace: dict[str, Any]) -> list[Ran]:
    """What ran on the device, of a chrome trace, whose times are microseconds; in the order of starts."""
    events = (event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in ON_DEVICE)
    found = [
        Ran(str(e["name"])[:NAME], round(1e3 * e["ts"]), round(1e3 * e["ts"]) + round(1e3 * e["dur"])) for e in events
    ]
    if not found:
        return []
    first = min(kernel.start_ns for kernel in found)
    return in_order(Ran(name, start - first, end - first) for name, start, end in found)


def in_order(kernels: Iterable[Ran]) -> list[Ran]:
    """By their starts: a launch never starts before the one in front of it has."""
    return sorted(kernels, key=lambda kernel: (kernel.start_ns, kernel.end_ns))


def cases(kernels: Sequence[Ran]) -> list[list[Ran]]:
    """The kernels behind each mark."""
    found: list[list[Ran]] = []
    for kernel in kernels:
        if MARK in kernel.name:
            found.append([])
        elif found:
            found[-1].append(kernel)
    return found


def replays(kernels: Sequence[Ran]) -> list[list[Ran]]:
    """The steps of one case, from their first kernel to their last; what was launched between them is left out."""
    found: list[list[Ran]] = []
    for kernel in kernels:
        if bare(kernel.name) == BEGINS:
            found.append([])
        if found and not (found[-1] and bare(found[-1][-1].name) == ENDS):
            found[-1].append(kernel)
    return found


class Layer(NamedTuple):
    """A layer as it ran. before: the kernel in front of it. after: the next layer's first."""

    kernels: list[Ran]
    before: Ran
    after: Ran

    @property
    def ops(self) -> tuple[str, ...]:
        """The op of each kernel."""
        products = iter(PRODUCTS)
        return tuple(next(products, DENSE) if bare(k.name) == DENSE else op_of(k.name) for k in self.kernels)


def bare(name: str) -> str:
    """A kernel's name without its arguments and the underscore that Triton's have in front."""
    return name.split("(")[0].strip().removeprefix("_")


def op_of(name: str) -> str:
    """The op of a kernel that is not DENSE; the name itself where nobody knows it."""
    plain = bare(name)
    plain = TRITONS.get(plain, plain)
    return plain if plain in OPS else name


def layers(replay: Sequence[Ran]) -> list[Layer]:
    """All layers but the last. Raises ValueError where two products are not in front of an ONCE."""
    begins: list[int] = []
    products: list[int] = []  # since the last ONCE
    for at, kernel in enumerate(replay):
        if bare(kernel.name) == DENSE or op_of(kernel.name) in ("project_a", "project_q"):
            products.append(at)
        if bare(kernel.name) == ONCE:
            if len(products) < 2:
                raise ValueError(f"fewer than two products in front of {ONCE}")
            begins.append(products[-2])
            products.clear()
    return [Layer(list(replay[a:b]), replay[a - 1], replay[b]) for a, b in pairwise(begins)]


def middle(count: int) -> range:
    """Which of so many layers count: the half in the middle."""
    return range(count // 4, count * 3 // 4)


def layer_trace(recording: Recording) -> LayerTrace:
    """What is kept of a recording. Raises ConfigError where steps have too few layers, marks are missing, or no rank
    has one whole replay."""
    found: list[LayerCase] = []
    by_rank = {rank.rank: cases(rank.kernels) for rank in recording.ranks}
    for rank, parts in by_rank.items():
        if len(parts) != len(recording.steps):
            what = f"{len(parts)} marks of {len(recording.steps)} cases" if parts else "no kernel behind a mark"
            raise ConfigError(f"rank {rank}: the profiler told of {what}, so its replays cannot be told apart")
    for place, step in enumerate(recording.steps):
        lanes = tuple(_lane(rank, by_rank[rank.rank][place], place, step, recording) for rank in recording.ranks)
        if not any(lane.kernels for lane in lanes):
            why = "; ".join(f"{what}: {count}" for what, count in lanes[0].left_out.items())
            raise ConfigError(f"{step.rows} rows: no replay was recorded whole ({why})")
        found.append(LayerCase(rows=step.rows, floor_us=floor_of(step), step=step, lanes=lanes))
    return LayerTrace(origin=recording.origin, notes=(*NOTES, *_seen(found)), cases=tuple(found))


def floor_of(step: DepthRecord) -> float:
    """Microseconds of a layer with experts at the least: the floors of its ops together; 0 where none was timed."""
    return sum(op.floor_us / op.launches for op in of_a_layer(step))


def of_a_layer(step: DepthRecord) -> list[OpRecord]:
    """The ops that a layer with experts launches, in their order."""
    return [op for op in step.ops if op.launches > 1 and not op.name.startswith(DENSE)]


def _seen(found: Sequence[LayerCase]) -> tuple[str, ...]:
    """What the profiler did to the launches, in words."""
    lanes = [lane for case in found for lane in case.lanes if lane.kernels]
    slower = max(lane.span_ms / lane.ms for lane in lanes)
    told = f"Recorded, a step takes up to {slower:.3f} times as long."
    if not any(lane.overlaps for lane in lanes):
        return (
            "No kernel began before the one in front had ended: while it records, the profiler keeps launches apart "
            f"that overlap otherwise. {told}",
        )
    least, most = (choose(lane.overlaps / len(lane.kernels) for lane in lanes) for choose in (min, max))
    return (f"Of a layer's launches {least:.0%} to {most:.0%} begin before the one in front has ended. {told}",)


def _lane(rank: RankTrace, kernels: Sequence[Ran], place: int, step: DepthRecord, recording: Recording) -> LaneTrace:
    if step.layers < FEWEST_LAYERS:
        raise ConfigError(f"layers is {step.layers}; a trace takes the middle ones: at least {FEWEST_LAYERS}")
    left_out: Counter[str] = Counter()
    ran = replays(kernels)[WARM_UP:]
    whole: list[tuple[Sequence[Ran], list[Layer]]] = []
    for replay in ran:
        why = _broken(replay, step.layers)
        if why is None:
            whole.append((replay, layers(replay)))
        else:
            left_out[f"replays with {why}"] += 1
    if len(ran) < recording.replays:
        left_out["replays that were not seen"] = recording.replays - len(ran)
    every = [found[i] for _, found in whole for i in middle(step.layers)]
    alike, usual = Counter(layer.ops for layer in every), ()
    if alike:
        usual = alike.most_common(1)[0][0]
    counted = [layer for layer in every if layer.ops == usual]
    if len(every) > len(counted):
        left_out["layers with other launches than most"] = len(every) - len(counted)
    times = _times(counted, step) if counted else ()
    return LaneTrace(
        rank=rank.rank,
        layer_us=_median(counted, lambda layer: layer.after.start_ns - layer.kernels[0].start_ns),
        kernels=times,
        one=_one(whole, step.layers),
        replays=len(whole),
        layers=len(counted),
        left_out=dict(left_out),
        unknown=tuple(sorted({op for op in usual if op not in OPS})),
        overlaps=sum(time.gap_us < 0 for time in times),
        ms=rank.ms[place],
        traced_ms=statistics.median(rank.traced_ms[place]),
        span_ms=_median([replay for replay, _ in whole], lambda replay: replay[-1].end_ns - replay[0].start_ns) / 1e3,
    )


def _broken(replay: Sequence[Ran], count: int) -> str | None:
    """Why a replay is not whole; None: it is."""
    found = sum(bare(kernel.name) == ONCE for kernel in replay)
    if found != count:
        return f"{found} of {count} layers"
    if bare(replay[-1].name) != ENDS:
        return f"no {ENDS} at its end"
    try:
        layers(replay)
    except ValueError as error:
        return str(error)
    return None


def _times(alike: Sequence[Layer], step: DepthRecord) -> tuple[KernelTime, ...]:
    timed = {op.name: op for op in step.ops}

    def place(i: int, op: str) -> KernelTime:
        def median(of: Callable[[list[Ran]], float]) -> float:
            """of: the kernel in front, the layer's, and the next layer's first."""
            return _median(alike, lambda layer: of([layer.before, *layer.kernels, layer.after]))

        one = timed.get(op)
        return KernelTime(
            op=op,
            kernel=alike[0].kernels[i].name,
            start_us=median(lambda ran: ran[i + 1].start_ns - ran[1].start_ns),
            end_us=median(lambda ran: ran[i + 1].end_ns - ran[1].start_ns),
            us=median(lambda ran: ran[i + 1].end_ns - ran[i + 1].start_ns),
            gap_us=median(lambda ran: ran[i + 2].start_ns - ran[i + 1].end_ns),
            adds_us=median(lambda ran: ran[i + 1].end_ns - ran[i].end_ns),
            alone_us=None if one is None else round(one.us / one.launches, 3),
            floor_us=None if one is None else round(one.floor_us / one.launches, 3),
        )

    return tuple(place(i, op) for i, op in enumerate(alike[0].ops))


def _one(whole: Sequence[tuple[Sequence[Ran], list[Layer]]], count: int) -> tuple[tuple[str, float, float], ...]:
    """The middle layer of the replay in the middle."""
    if not whole:
        return ()
    layer = whole[len(whole) // 2][1][count // 2]
    first = layer.kernels[0].start_ns
    return tuple(
        (op, round((kernel.start_ns - first) / 1e3, 3), round((kernel.end_ns - first) / 1e3, 3))
        for op, kernel in zip(layer.ops, layer.kernels, strict=True)
    )


def _median(of: Sequence[Any], nanoseconds: Callable[[Any], float]) -> float:
    """Microseconds; 0 of nothing."""
    return round(statistics.median([nanoseconds(each) for each in of]) / 1e3, 3) if of else 0.0
