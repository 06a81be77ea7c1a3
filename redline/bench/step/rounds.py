"""Milliseconds of a round of speculative decoding at a model's true depth: 1 + k tokens per row verified, k drafted.

Uses the engine's own decode step (`run.graphs.decode_step`), captured as CUDA graphs as in serving, with random
weights, random KV pages and forced routing; acceptance is synthetic. Each round continues from the tokens that the
previous one accepted, as in serving. Steps without drafts alternate with the rounds, so that both see the same state of
the machine.

B rows, T = B (1 + k) tokens of a round.
"""

import functools
import math
import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline import clock
from redline.bench.step.depth import WARM_UP, DepthCase, TimeMark
from redline.bench.step.drafters import draft_costs
from redline.bench.step.trace import ON_DEVICE, idle_share, intervals, joined, traced
from redline.kernels.cuda.step.step_rows import (
    ASKED,
    BY_DRAFTER,
    CELLS,
    KEEP,
    LENGTH,
    LIMIT,
    NEW,
    PAGES,
    PROPOSE,
    RAN,
    SEED,
    SLOT,
    TOKENS,
)
from redline.messages.job import PAGE_TOKENS
from redline.messages.step import Shape
from redline.model.block.config import BlockConfig
from redline.model.block.module import BlockDrafter
from redline.model.drafter import Drafter, DrafterConfig
from redline.model.eagle3.module import Eagle3
from redline.model.k2.cpu import K2
from redline.model.k2.forced_routing import distinct, draw
from redline.model.k2.random_weights import ForcedK2
from redline.ops.op import PeakRates
from redline.policy.synthetic import length_of
from redline.run.fit import Layout
from redline.run.graphs.decode_step import DecodeStep, SamplingKind, SharedState
from redline.run.graphs.graph_recorder import Recorder
from redline.run.graphs.shapes import CONTEXTS
from redline.run.kv import KvPool
from redline.run.slots import Slots

TRACED = 8  # rounds in a trace, back to back


@dataclass(frozen=True, kw_only=True)
class RoundCase:
    """The sizes of one round.

    depth      the verifying step, with 1 + k tokens per row
    rates      k rates of synthetic acceptance
    head_bits  bits per weight of the drafter's head: 16, or 8 (chains)
    whole      whether each rank has the drafter's whole body and a part of its head, as in the rounds over several
               ranks that were measured up to 2026-11-26
    """

    depth: DepthCase
    drafter: DrafterConfig
    rates: tuple[float, ...]
    head_bits: int = 16
    whole: bool = False

    @property
    def k(self) -> int:
        """Draft tokens per row."""
        return self.depth.tokens - 1

    @property
    def accept(self) -> float:
        """Mean tokens per row and round."""
        return length_of(self.rates)

    def reach(self, repeats: int) -> int:
        """The longest a row may become: tokens after `repeats` timed rounds, the warm-up and the traced rounds."""
        return self.depth.context + 2 + self.depth.tokens * (WARM_UP + repeats + TRACED + 1)


def random_drafter(model: K2, config: DrafterConfig, head_bits: int = 16, seed: int = 0) -> Drafter:
    """A drafter of these sizes for the model, prepared, with random weights created on the model's device.

    head_bits: see `Eagle3.prepare`.
    """
    generator = torch.Generator(model.device).manual_seed(seed)

    def made(like: Tensor) -> Tensor:
        weight = torch.empty(like.shape, dtype=torch.bfloat16, device=model.device)
        if like.dim() == 1:  # a norm, or a bias
            return weight.uniform_(0.5, 1.5, generator=generator)
        return weight.normal_(0, like.shape[-1] ** -0.5, generator=generator)

    with torch.device("meta"):
        drafter = BlockDrafter(config) if isinstance(config, BlockConfig) else Eagle3(config)
    drafter.load_state_dict({name: made(like) for name, like in drafter.state_dict().items()}, assign=True)
    drafter.prepare(model, head_bits)
    return drafter.to("meta")  # the serving layout has copies of the weights


class RoundTiming(NamedTuple):
    """A measured round, in milliseconds: medians, and p10 and p90 of the whole round.

    experts: distinct experts of all layers together, mean over rounds; on a CPU, where the model's router decides, the
    mean of independent routing. tokens: accepted tokens per row and round. host_ms: time to enqueue a round. trace:
    None on a CPU.
    """

    ms: float
    p10_ms: float
    p90_ms: float
    verify_ms: float
    draft_ms: float
    baseline_ms: float
    host_ms: float
    experts: float
    tokens: float
    trace: dict[str, Any] | None

    @property
    def idle_share(self) -> float | None:
        """The share of the traced time in which the device was idle; None on a CPU."""
        return None if self.trace is None else idle_share(joined(intervals(self.trace, ON_DEVICE, "cat")))


def floors(case: RoundCase, experts: float, machine: PeakRates) -> tuple[float, float]:
    """The floors of (verifying, drafting) in milliseconds. experts: distinct experts of all layers together."""
    parts = draft_costs(case.drafter, case.depth, head_bits=case.head_bits, whole=case.whole)
    return 1e3 * case.depth.cost(experts).seconds(machine), 1e3 * sum(part.seconds(machine) for part in parts)


def measure_round(model: K2, drafter: Drafter, case: RoundCase, repeats: int, seed: int = 0) -> RoundTiming:
    """Times `repeats` rounds and `repeats` steps without drafts, alternating, with newly drawn experts each time.

    model: a ForcedK2 if experts are forced. drafter: prepared for it. Raises AssertionError if a row verified another
    number of drafts than in the case, or if the acceptance deviates from the case's rates.
    """
    depth, device = case.depth, model.device
    with torch.inference_mode():
        kv, tables = _pages(model, drafter, case, repeats)
        recorder = Recorder(device)
        plain, rounds = (_Rows(model, kv, case, tables, repeats, recorder, of) for of in (None, drafter))
        reroute = _Reroute(model, depth, seed)
        spans: dict[_Rows, list[tuple[float, list[TimeMark]]]] = {plain: [], rounds: []}
        for number in range(WARM_UP + repeats):
            for one in (plain, rounds) if number % 2 else (rounds, plain):
                reroute(one.tokens)
                began = clock.perf_counter()
                marks = one.run()
                spans[one].append((1e3 * (clock.perf_counter() - began), marks))
                if one is rounds:
                    one.note()
                    reroute.count(one.tokens)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        trace = traced(lambda: [rounds.run() for _ in range(TRACED)]) if device.type == "cuda" else None
        timed = spans[rounds][WARM_UP:]
        whole = sorted(marks[0].until(marks[-1]) for _, marks in timed)
        return RoundTiming(
            ms=statistics.median(whole),
            p10_ms=whole[len(whole) // 10],
            p90_ms=whole[len(whole) * 9 // 10],
            verify_ms=statistics.median(marks[0].until(marks[1]) for _, marks in timed),
            draft_ms=statistics.median(marks[1].until(marks[-1]) for _, marks in timed),
            baseline_ms=statistics.median(marks[0].until(marks[-1]) for _, marks in spans[plain][WARM_UP:]),
            host_ms=statistics.median(host for host, _ in timed),
            experts=reroute.experts(rounds.tokens, WARM_UP + repeats),
            tokens=rounds.accepted(case.rates),
            trace=trace,
        )


def _pages(model: K2, drafter: Drafter, case: RoundCase, repeats: int) -> tuple[KvPool, Tensor]:
    """KV pages with random values, and each row's page table, int32 [B, pages]."""
    depth, config = case.depth, model.config
    each = -(-case.reach(repeats) // PAGE_TOKENS)
    of_draft = PAGE_TOKENS * drafter.config.kv_bytes_per_token(depth.kv_dtype)
    page_bytes = PAGE_TOKENS * config.kv_bytes_per_token(depth.kv_dtype) + of_draft
    kv = KvPool(
        model, Layout(depth.rows * each, _longest(case, repeats), depth.kv_dtype, page_bytes, of_draft), drafter
    )
    for plane in (*kv.planes, kv.draft, kv.tails):
        plane.copy_(torch.randn(plane.shape, device=model.device))
    return kv, torch.randperm(kv.pages, device=model.device).to(torch.int32).view(depth.rows, each)


def _longest(case: RoundCase, repeats: int) -> int:
    """The longest context of the CUDA graph shape that serves these rows."""
    reach = case.reach(repeats)
    return next((context for context in sorted(CONTEXTS) if context >= reach), -(-reach // PAGE_TOKENS) * PAGE_TOKENS)


class _Rows:
    """Greedy rows that decode without end, with a drafter or without: `run` enqueues one round."""

    def __init__(
        self,
        model: K2,
        kv: KvPool,
        case: RoundCase,
        tables: Tensor,
        repeats: int,
        recorder: Recorder,
        drafter: Drafter | None,
    ) -> None:
        depth, self._rows = case.depth, case.depth.rows
        self._k = case.k if drafter is not None else 0
        longest = _longest(case, repeats)
        slots = Slots(self._rows, longest, model.config.vocab_size, model.device)
        slots.tokens.random_(model.config.vocab_size)
        slots.tables[: self._rows, : tables.shape[1]] = tables
        self._shared = SharedState(model, slots, kv, drafter, rates=case.rates if drafter is not None else ())
        self._plan = recorder.host_tensor(self._shared.plan[: self._rows])
        self._plan[:, SLOT], self._plan[:, ASKED], self._plan[:, LENGTH] = torch.arange(self._rows), 1 + self._k, KEEP
        self._plan[:, CELLS], self._plan[:, PAGES] = self._shared.nobody * slots.tables.shape[1], kv.pages
        self._plan[:, PROPOSE] = self._k or -1
        self._results = recorder.host_tensor(self._shared.results[: self._rows])
        self._noted = torch.zeros(TOKENS, dtype=torch.int64, device=model.device)  # sums of the results' columns
        self._runs = 0
        shape = Shape(rows=self._rows, positions=1 + self._k, longest=longest)
        self._step = step = DecodeStep(self._shared, shape)
        pieces = [step.forward, functools.partial(step.settle, SamplingKind.LIKELIEST)]
        self._begin(depth.context + 1, longest)
        self._shared.plan[: self._rows] = self._plan.to(model.device)
        self._pieces = recorder.record(*pieces, *([step.draft_all] if drafter is not None else []))
        step.forget()
        self._begin(depth.context + 1, longest)

    @property
    def tokens(self) -> int:
        """Positions per row and round."""
        return 1 + self._k

    def _begin(self, length: int, limit: int) -> None:
        """Sets the state of rows with all their drafts. Their facts contain temperature 0, greedy."""
        at, rows = self._shared.standing, self._rows
        at.lengths[:rows], at.drafted[:rows], at.by[:rows] = length, self._k, BY_DRAFTER
        at.facts[:rows] = 0
        at.facts[:rows, LIMIT], at.facts[:rows, SEED] = limit, 1 + torch.arange(rows, device=at.facts.device)
        at.drafts.random_(self._shared.model.config.vocab_size)

    def run(self) -> list[TimeMark]:
        """Enqueues a round: copies the plan from the host, replays the CUDA graphs, copies the results to the host.

        Returns marks before the round, after the tokens are accepted, and after the round.
        """
        shared, device = self._shared, self._noted.device
        marks = [TimeMark(device)]
        shared.plan[: self._rows].copy_(self._plan, non_blocking=True)
        forward, settle, *draft = self._pieces
        forward()
        settle()
        marks.append(TimeMark(device))
        for piece in draft:
            piece()
        self._results.copy_(shared.results[: self._rows], non_blocking=True)
        marks.append(TimeMark(device))
        return marks

    def note(self) -> None:
        """Adds the results of the last round to the sums for `accepted`."""
        self._noted += self._shared.results[: self._rows, :TOKENS].sum(0)
        self._runs += 1

    def accepted(self, rates: tuple[float, ...]) -> float:
        """Mean tokens per row and round over the noted rounds. Raises AssertionError if they contradict the rates."""
        count = self._runs * self._rows
        ran, new = (int(self._noted[column]) / count for column in (RAN, NEW))
        asked = length_of(rates)
        assert ran == self.tokens, f"rows verified {ran:g} positions instead of {self.tokens}"
        squares = sum((2 * place + 1) * rate for place, rate in enumerate(rates))  # mean square of accepted drafts
        spread = math.sqrt(max(0.0, squares - (asked - 1) ** 2) / count)
        assert abs(new - asked) <= 5 * spread + 1e-9, f"{new:g} tokens per round, but the rates give {asked:g}"
        return new


class _Reroute:
    """Draws new experts for each step if they are forced, and counts the distinct ones."""

    def __init__(self, model: K2, depth: DepthCase, seed: int) -> None:
        self._model, self._depth = model, depth
        self._generator = torch.Generator(model.device).manual_seed(seed)
        moe_layers = depth.config.num_hidden_layers - depth.dense
        self._chosen = torch.zeros(moe_layers, dtype=torch.int64, device=model.device)

    def __call__(self, tokens: int) -> None:
        """Draws the experts of a step with `tokens` tokens per row."""
        c, depth = self._depth.config, self._depth
        if isinstance(self._model, ForcedK2) and depth.overlap is not None:
            sizes = c.num_hidden_layers, depth.rows, tokens, c.n_routed_experts, c.num_experts_per_tok
            self._model.routing[:, : depth.rows * tokens] = draw(self._generator, *sizes, depth.overlap)

    def count(self, tokens: int) -> None:
        """Adds the step's distinct experts to the counts, layer by layer."""
        if isinstance(self._model, ForcedK2):
            routing = self._model.routing[self._depth.dense :, : self._depth.rows * tokens]
            self._chosen += distinct(routing, self._depth.config.n_routed_experts)

    def experts(self, tokens: int, steps: int) -> float:
        """Distinct experts of all layers together, mean over the `steps` counted steps."""
        if isinstance(self._model, ForcedK2):
            return int(self._chosen.sum()) / steps
        c = self._depth.config
        missed = (1 - c.num_experts_per_tok / c.n_routed_experts) ** (self._depth.rows * tokens)
        return len(self._chosen) * c.n_routed_experts * (1 - missed)
