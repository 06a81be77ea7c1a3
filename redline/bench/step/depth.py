"""Milliseconds of a decode step at its true depth, and of each of its ops, with random weights and forced routing.

The bytes that a step reads do not depend on the values of the weights, so a step of 61 layers is measured without the
checkpoint. If memory is too small, several layers share one physical layer (`physical`), and their experts are drawn
again for each layer. A `Build` creates a step for its chip; this file defines the interface of a step and times it.

T tokens of a step (rows x tokens per row), k experts per token.
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

WARM_UP = 5  # warm-up replays before the timed ones
OP_LAUNCHES = 24  # launches of one op per CUDA graph, at least, so that the graph's own overhead is small
NOTHING = Cost(0)
Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class DepthCase:
    """One case: the sizes of the step, and the routing of experts.

    config    of the whole step: all its layers, and the number of experts in memory
    physical  layers in memory, dense layers included
    tokens    tokens per row that the step computes
    context   tokens per row in the KV cache before the step
    kv_dtype  of the KV pages
    overlap   of the experts of a row's tokens (`routing.draw`); None: the model's router decides
    ranks     tensor parallel ranks; bytes and operations are counted for one rank
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
        """The geometry of one rank's part, except for the head."""
        return part_of(self.config, self.ranks)

    @property
    def dense(self) -> int:
        """Number of dense layers in the step."""
        return dense_layers(self.config)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one rank's part of one routed expert."""
        return round(self.part.expert_parameters * self.config.bits_per_routed_parameter / 8)

    def physical_layer(self, layer: int, rotation: int = 0) -> int:
        """The physical layer that a layer of the step uses (`place_of`)."""
        return place_of(self.config, self.physical, layer, rotation)

    def cost(self, experts: float, *, divided: bool = True) -> Cost:
        """Bytes and operations of the step, computed from the model's sizes; the embedding, a gather, is not counted.

        Counted for one rank: each weight is read once; each row's context and the projections into attention are read
        once by all ranks together; `experts` routed experts are read, over all layers together. divided=False: each
        rank reads all contexts and projections.
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
class DepthStage:
    """One op of the step.

    run          enqueues one launch on the current stream with the weights of the given physical layer; capturable
    cost         of one launch, without the experts that it reads
    count        launches per step
    layers       physical layers with this op; empty: the op has no layer, or all MoE layers have it
    expert_cost  of each distinct expert that a launch reads
    """

    name: str
    run: Callable[[int], object]
    cost: Cost
    count: int
    layers: Sequence[int] = ()
    expert_cost: Cost = NOTHING


class DepthStep(Protocol):
    """One decode step over random weights and KV pages. It can be run repeatedly: its inputs do not change."""

    @property
    def routing(self) -> Tensor:
        """The experts, int32 [layers, T, k] on the step's device; the rows of dense layers are unused. A step with
        forced routing reads it; otherwise the step writes the router's choice into it."""
        ...

    @property
    def ops(self) -> Sequence[DepthStage]:
        """The ops to time one by one; empty if the step uses kernels that cannot be timed alone."""
        ...

    @property
    def captures(self) -> Sequence[Work]:
        """Captured CUDA graphs of the step, each with its layers on other physical layers.

        Empty: `run` is captured instead.
        """
        ...

    def run(self) -> object:
        """Enqueues the step on the current stream; capturable."""
        ...


Progress = Callable[[int, int], object]  # (bytes of weights created, total bytes)


Build = Callable[[DepthCase, Progress], DepthStep]


class StageTime(NamedTuple):
    """us: microseconds per launch. cost: of one launch. launches: per step."""

    name: str
    launches: int
    us: float
    cost: Cost


@dataclass(frozen=True)
class Timing:
    """A measured step, in milliseconds.

    experts: distinct experts of all layers together, mean over the timed steps.
    """

    ms: float
    p10_ms: float
    p90_ms: float
    experts: float
    ops: tuple[StageTime, ...]


def measure_step(step: DepthStep, depth: DepthCase, repeats: int, seed: int = 0, did: Work = lambda: None) -> Timing:
    """Times the whole step `repeats` times, with new experts and other physical layers each time, then its ops.

    did: called after the step and after each op.
    """
    with torch.inference_mode():
        device = step.routing.device
        turn = itertools.cycle(step.captures or (captured(step.run, device),))
        fresh_experts = reroute(step, depth, seed)
        chosen = torch.zeros(depth.config.num_hidden_layers - depth.dense, dtype=torch.int64, device=device)

        def count() -> None:
            chosen.add_(distinct(step.routing[depth.dense :], depth.config.n_routed_experts))

        times = sorted(times_of(lambda: next(turn)(), repeats, device, fresh_experts, count))
        experts = int(chosen.sum()) / (repeats + WARM_UP)
        did()

        def fresh() -> None:
            fresh_experts()
            next(turn)()

        per_layer = experts / max(len(chosen), 1)
        ops: list[StageTime] = []
        for stage in step.ops:
            ops.append(_op_time(stage, depth, per_layer, fresh, max(repeats // 3, 3), device))
            did()
    p10, p90 = times[len(times) // 10], times[len(times) * 9 // 10]
    return Timing(statistics.median(times), p10, p90, experts, tuple(ops))


def captured(work: Work, device: torch.device) -> Work:
    """Captures `work` as a CUDA graph, after one eager run that compiles its kernels, and returns the replay.

    On a CPU, returns `work`.
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


def reroute(step: DepthStep, depth: DepthCase, seed: int = 0) -> Work:
    """A callable that draws new experts for a step, in stream order; does nothing if the model's router decides.

    seed: the same seed gives the same sequence of draws.
    """
    overlap, config = depth.overlap, depth.config
    if overlap is None:
        return lambda: None
    generator = torch.Generator(step.routing.device).manual_seed(seed)
    sizes = config.num_hidden_layers, depth.rows, depth.tokens, config.n_routed_experts, config.num_experts_per_tok
    return lambda: step.routing.copy_(draw(generator, *sizes, overlap))


def _op_time(
    stage: DepthStage, depth: DepthCase, experts: float, fresh: Work, repeats: int, device: torch.device
) -> StageTime:
    """Times launches of one op, over the physical layers in turn, so that no weights are in the L2 cache. A step runs
    before each timing: the op reads the activations and the experts of the step's last layer.

    experts: mean distinct experts per layer.
    """
    layers = stage.layers or range(min(depth.dense, depth.physical - 1), depth.physical)
    order = [*layers] * -(-OP_LAUNCHES // len(layers))

    def chain() -> None:
        for layer in order:
            stage.run(layer)

    ms = statistics.median(times_of(captured(chain, device), repeats, device, fresh))
    each = stage.expert_cost
    cost = stage.cost + Cost(round(experts * each.bytes), round(experts * each.flops))
    return StageTime(stage.name, stage.count, 1e3 * ms / len(order), cost)


def times_of(
    work: Work, repeats: int, device: torch.device, before: Work = lambda: None, after: Work = lambda: None
) -> list[float]:
    """Milliseconds of each timed run of `work`, without `before` and `after`, after WARM_UP runs. On a GPU by CUDA
    events, with all work enqueued ahead, so that the GPU never waits for Python."""
    spans: list[tuple[TimeMark, TimeMark]] = []
    for _ in range(WARM_UP + repeats):
        before()
        start = TimeMark(device)
        work()
        spans.append((start, TimeMark(device)))
        after()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [start.until(end) for start, end in spans[WARM_UP:]]


class TimeMark:
    """A time mark: a CUDA event on the current stream, or the CPU's clock."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._seconds = clock.perf_counter()

    def until(self, end: "TimeMark") -> float:
        """Milliseconds from this mark to `end`."""
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
) -> DepthCase:
    """The case of a config with `layers` layers. experts: per layer; None: the number in the config."""
    changed = replace(config, num_hidden_layers=layers, n_routed_experts=experts or config.n_routed_experts)
    return DepthCase(
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
