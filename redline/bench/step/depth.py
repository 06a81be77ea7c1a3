"""Milliseconds of a decode step at its true depth and of each of its ops: random weights, forced routing.

What a step reads does not depend on what the weights say, so a step of 61 layers is measured without the checkpoint;
where memory is short, several layers are one in memory (`physical`), and their experts are chosen anew each time. What
builds a step knows the chip (`Build`); this file says what a step must offer, and takes the times.

T tokens of a step (rows x tokens of each), k experts of a token.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from redline import clock
from redline.model.k2.config import K2Config
from redline.model.k2.forced_routing import distinct, draw
from redline.model.k2.random_weights import dense_layers, place_of
from redline.model.k2.shard import head_left_out, part_of
from redline.ops.op import Cost

WARM_UP = 5  # replays before those that count
OP_LAUNCHES = 24  # of one op in a graph, at least: its start and end are then a small part
NOTHING = Cost(0)
Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Depth:
    """One case: what is built, and how experts are chosen.

    config    of the whole step: all its layers, and as many experts as are there
    physical  layers that lie in memory, the dense ones among them
    tokens    of each row, computed in the step
    context   tokens of each row that are there before the step
    kv_dtype  of the pages
    overlap   of the experts of a row's tokens (`routing.draw`); None: the model routes
    ranks     that share the model: bytes and operations are those of one
    """

    shape: str
    config: K2Config
    physical: int
    rows: int
    tokens: int
    context: int
    kv_dtype: torch.dtype
    overlap: float | None
    ranks: int = 1

    @property
    def part(self) -> K2Config:
        """The geometry of what one rank holds, but for the head."""
        return part_of(self.config, self.ranks)

    @property
    def dense(self) -> int:
        """How many layers of the step have no experts."""
        return dense_layers(self.config)

    @property
    def expert_bytes(self) -> int:
        """Bytes of a rank's part of one routed expert."""
        return round(self.part.expert_parameters * self.config.bits_per_routed_parameter / 8)

    def physical_layer(self, layer: int, rotation: int = 0) -> int:
        """The physical layer on which a layer of the step lies (`place_of`)."""
        return place_of(self.config, self.physical, layer, rotation)

    def cost(self, experts: float, *, divided: bool = True) -> Cost:
        """Bytes and operations of the step, from the model's sizes alone; the embedding is a gather, and is left out.

        Of one rank: each weight is read once, each row's context and the projections into attention once by all ranks
        together, and of the routed experts `experts`, over all layers together. divided: false: each rank reads all
        contexts and projections.
        """
        c, tokens = self.part, self.rows * self.tokens
        elsewhere = c.vocab_size * c.hidden_size + head_left_out(self.config, self.ranks)
        seen = self.context + self.tokens
        shared_by = self.ranks if divided else 1
        kv = self.rows * seen * c.kv_width * self.kv_dtype.itemsize * c.num_hidden_layers // shared_by
        projections = c.num_hidden_layers * c.hidden_size * (c.q_lora_rank + c.kv_width)
        elsewhere += projections - projections // shared_by
        pairs = self.rows * sum(range(self.context + 1, seen + 1)) * c.num_hidden_layers
        attention = 2 * pairs * c.num_attention_heads * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
        read = 2 * (c.dense_parameters - elsewhere) + round(experts * self.expert_bytes) + kv
        return Cost(read, 2 * tokens * (c.active_parameters - elsewhere) + attention)


@dataclass(frozen=True)
class Stage:
    """One op of the step.

    run          enqueues one launch on the current stream, capturable, with the weights of that physical layer
    cost         of one launch; where experts are read, of all but them
    count        launches of a step
    layers       physical layers that have this op; empty: the op has no layer, or all that have experts have it
    expert_cost  of each distinct expert that a launch reads
    """

    name: str
    run: Callable[[int], object]
    cost: Cost
    count: int
    layers: Sequence[int] = ()
    expert_cost: Cost = NOTHING


class Step(Protocol):
    """One decode step over random weights and pages. It may be run again and again: its inputs stay."""

    @property
    def routing(self) -> Tensor:
        """int32 [layers, T, k] on the step's device: the experts, dense layers' rows unused. A step whose model
        routes writes it, any other reads it."""
        ...

    @property
    def ops(self) -> Sequence[Stage]:
        """The ops that are timed one by one; empty where the step has forms that are not."""
        ...

    @property
    def captures(self) -> Sequence[Work]:
        """Each enqueues the step, its layers on other physical layers: captured graphs.

        Empty: `run` is captured instead.
        """
        ...

    def run(self) -> object:
        """Enqueues the step on the current stream, capturable."""
        ...


Progress = Callable[[int, int], object]  # (bytes of weights made, bytes in all)


Build = Callable[[Depth, Progress], Step]


class OpTime(NamedTuple):
    """us: microseconds of one launch. cost: of one launch. launches: of a step."""

    name: str
    launches: int
    us: float
    cost: Cost


@dataclass(frozen=True)
class Timing:
    """A measured step, in milliseconds.

    experts: distinct ones of all layers together, the mean over the timed steps.
    """

    ms: float
    p10_ms: float
    p90_ms: float
    experts: float
    ops: tuple[OpTime, ...]


def measure_step(step: Step, depth: Depth, repeats: int, seed: int = 0, did: Work = lambda: None) -> Timing:
    """Times the whole step `repeats` times, with fresh experts and other physical layers each time, then its ops.

    did: called after the step and after each op.
    """
    with torch.inference_mode():
        device = step.routing.device
        turn = itertools.cycle(step.captures or (captured(step.run, device),))
        fresh_experts = reroute(step, depth, seed)
        chosen = torch.zeros(depth.config.num_hidden_layers - depth.dense, dtype=torch.int64, device=device)

        def count() -> None:
            chosen.add_(distinct(step.routing[depth.dense :], depth.config.n_routed_experts))

        times = sorted(_times(lambda: next(turn)(), fresh_experts, count, repeats, device))
        experts = int(chosen.sum()) / (repeats + WARM_UP)
        did()

        def fresh() -> None:
            fresh_experts()
            next(turn)()

        per_layer = experts / max(len(chosen), 1)
        ops: list[OpTime] = []
        for stage in step.ops:
            ops.append(_op_time(stage, depth, per_layer, fresh, max(repeats // 3, 3), device))
            did()
    p10, p90 = times[len(times) // 10], times[len(times) * 9 // 10]
    return Timing(statistics.median(times), p10, p90, experts, tuple(ops))


def captured(work: Work, device: torch.device) -> Work:
    """A call that replays what `work` enqueues, after one run of it that compiles what is to be compiled.

    On a CPU, `work`.
    """
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def reroute(step: Step, depth: Depth, seed: int = 0) -> Work:
    """A call that draws all experts of a step anew, in the stream's order; nothing where the model routes.

    seed: of all its draws, which are the same for the same seed.
    """
    overlap, config = depth.overlap, depth.config
    if overlap is None:
        return lambda: None
    generator = torch.Generator(step.routing.device).manual_seed(seed)
    sizes = config.num_hidden_layers, depth.rows, depth.tokens, config.n_routed_experts, config.num_experts_per_tok
    return lambda: step.routing.copy_(draw(generator, *sizes, overlap))


def _op_time(stage: Stage, depth: Depth, experts: float, fresh: Work, repeats: int, device: torch.device) -> OpTime:
    """One launch after another, over the physical layers in turn, so that each finds its weights cold. A step runs
    before: the op finds the activations and the experts that its last layer left.

    experts: distinct ones of a layer, the mean.
    """
    layers = stage.layers or range(min(depth.dense, depth.physical - 1), depth.physical)
    order = [*layers] * -(-OP_LAUNCHES // len(layers))

    def chain() -> None:
        for layer in order:
            stage.run(layer)

    ms = statistics.median(_times(captured(chain, device), fresh, lambda: None, repeats, device))
    each = stage.expert_cost
    cost = stage.cost + Cost(round(experts * each.bytes), round(experts * each.flops))
    return OpTime(stage.name, stage.count, 1e3 * ms / len(order), cost)


def _times(work: Work, before: Work, after: Work, repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of each timed run of `work`. On a GPU by its own clock, everything enqueued ahead, so that it never
    waits for Python; `before` and `after` are not timed."""
    spans: list[tuple[Mark, Mark]] = []
    for _ in range(WARM_UP + repeats):
        before()
        start = Mark(device)
        work()
        spans.append((start, Mark(device)))
        after()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [start.until(end) for start, end in spans[WARM_UP:]]


class Mark:
    """A moment: of the GPU's stream, or of the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._seconds = clock.perf_counter()

    def until(self, end: "Mark") -> float:
        """Milliseconds from this moment to `end`."""
        if self._event is not None and end._event is not None:
            return self._event.elapsed_time(end._event)
        return 1e3 * (end._seconds - self._seconds)


def depth_of(
    shape: str,
    config: K2Config,
    *,
    layers: int,
    physical: int,
    experts: int | None,
    rows: int,
    tokens: int,
    context: int,
    kv_dtype: torch.dtype,
    overlap: float | None,
    ranks: int = 1,
) -> Depth:
    """The case whose config has so many layers and experts. experts: in each layer; None: as many as the config has."""
    changed = replace(config, num_hidden_layers=layers, n_routed_experts=experts or config.n_routed_experts)
    return Depth(
        shape=shape,
        config=changed,
        physical=physical,
        rows=rows,
        tokens=tokens,
        context=context,
        kv_dtype=kv_dtype,
        overlap=overlap,
        ranks=ranks,
    )
