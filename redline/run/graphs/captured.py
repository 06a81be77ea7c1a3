"""Decode steps that the host only starts: it sends a plan, replays two pieces, and reads the tokens a step later.

The device knows where each slot stands. The host's own account of a slot follows when a result is read, and `catch_up`
brings it to the present: whoever reads or changes slots otherwise calls it first. Where such work has changed a slot,
the next plan tells the device (`Slot.told`).
"""

import functools
import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from redline.kernels.hopper.faults import is_device_error
from redline.kernels.hopper.step.step_rows import (
    BEFORE,
    DRAFTED,
    DRAFTS,
    FACTS,
    KEEP,
    MOST_DRAFTS,
    MOST_PAGES,
    NEW,
    RAN,
    TOKENS,
)
from redline.kernels.hopper.step.suffix_match import SHORTEST
from redline.ops.draws import signed
from redline.run.drafting.learned import SURE
from redline.run.graphs.decode_step import DecodeStep, SamplingKind, SharedState
from redline.run.graphs.graph import Piece, Recorder
from redline.run.graphs.shapes import Shape, shapes
from redline.run.sampling.on_host import is_greedy, is_narrowed, is_unadjusted
from redline.run.slots import NOTHING, Proposal, Slot, Span
from redline.wire.job import PAGE_TOKENS, Sampling
from redline.wire.step import Row, RowResult, Step, StepResult

HOST_BUFFERS = 4  # steps whose plan or result the host may still hold

_log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What came of one row: tokens of its slot before the step, positions that ran, the new tokens, the next drafts."""

    before: int
    ran: int
    tokens: list[int]
    drafts: list[int]  # what was drafted behind them

    def span(self, row: Row) -> Span:
        """The row with the positions that ran."""
        return Span(row, row.slot, self.before - 1, self.ran)

    @property
    def result(self) -> RowResult:
        """The row's result. A row that ran and gave no token met a logit that is not finite."""
        if self.ran and not self.tokens:
            return RowResult(error=not_finite(self.before - 1))
        return RowResult(
            tokens=tuple(self.tokens),
            proposed=max(0, self.ran - 1),
            accepted=max(0, len(self.tokens) - 1),
            waiting=len(self.drafts),
        )


def not_finite(position: int) -> str:
    """The error of a job whose logits at `position` are not all finite."""
    return f"the model gave a logit that is not finite at position {position}"


class _HostBuffers(NamedTuple):
    """Where a step's plan leaves the host, and its result arrives."""

    plan: Tensor
    results: Tensor


class Replay:
    """A replayed step on its way. Any thread may ask for its outcomes; the first to ask waits for the device."""

    def __init__(self, step: Step, results: Tensor, wait: Callable[[], None]) -> None:
        self.step = step
        self.landed = False
        self._results = results
        self._wait = wait
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcome of each row, in their order; the first call waits for the device."""
        with self._lock:
            if not self.landed:
                self._wait()
                rows: list[list[int]] = self._results[: len(self.step.rows)].tolist()
                self._outcomes = [
                    Outcome(
                        *(row[BEFORE], row[RAN], row[TOKENS : TOKENS + row[NEW]]),
                        drafts=row[DRAFTS : DRAFTS + row[DRAFTED]],
                    )
                    for row in rows
                ]
                self.landed = True
            return self._outcomes

    def result(self) -> StepResult:
        """The step's result; waits for the device as `outcomes` does."""
        rows = tuple(outcome.result for outcome in self.outcomes)
        return StepResult(number=self.step.number, rows=rows, replayed=True)


class _Recorded(NamedTuple):
    step: DecodeStep
    forward: Piece
    settle: tuple[Piece, ...]  # in the order of SamplingKind; those that could be recorded
    draft: tuple[Piece, ...]  # as many drafts as the shape verifies, the first one, one more; none without a drafter


class CapturedSteps:
    """The recorded shapes of one runner. Only the thread that runs its steps calls this."""

    def __init__(self, shared: SharedState, positions: int) -> None:
        """positions: of a decode row, at most."""
        self._shared = shared
        self._slots = shared.slots
        self._recorder = Recorder(shared.plan.device)
        host_tensor = self._recorder.host_tensor
        self._host_buffers = [
            _HostBuffers(host_tensor(*shared.plan.shape), host_tensor(*shared.results.shape))
            for _ in range(HOST_BUFFERS)
        ]
        self._count = 0
        self._replays: deque[Replay] = deque()  # those that the host's account of the slots lacks
        self._recorded: dict[Shape, _Recorded] = {}  # the cheapest first
        reach = shared.slots.tables.shape[1] * PAGE_TOKENS
        self.drafts = shared.drafter is not None and shared.drafter.served.recordable
        self._wanted = shapes(len(shared.slots.at), positions, reach) if shared.model.recordable else []

    def record(self) -> None:
        """Records every shape. A shape that cannot be recorded is logged, and the host leads its steps.

        Raises what the device's own failure raised.
        """
        recorded: dict[Shape, _Recorded] = {}
        for shape in self._wanted:
            made = self._record(shape, list(SamplingKind)) or self._record(shape, [SamplingKind.LIKELIEST])
            if made is not None:  # better one kind than none
                recorded[shape] = made
            elif self.drafts:
                self.drafts = False  # the host leads the drafter of all shapes, or of none
                return self.record()
        self._recorded = {shape: recorded[shape] for shape in sorted(recorded, key=_cost)}
        _log.info("%d of %d shapes of decode steps are recorded", len(recorded), len(self._wanted))

    def _record(self, shape: Shape, kinds: Sequence[SamplingKind]) -> _Recorded | None:
        step = DecodeStep(self._shared, shape)
        self._plan(shape, (), (), _HostBuffers(self._shared.plan, self._shared.results))
        settles = [functools.partial(step.settle, kind) for kind in kinds]
        drafts = [step.draft_all, step.draft, step.draft_on] if self.drafts else []
        try:
            forward, *rest = self._recorder.record(step.forward, *settles, *drafts)
        except Exception as error:
            if is_device_error(error):  # nothing that follows would work
                raise
            _log.warning("decode steps of %s, %s, cannot be recorded: %s", shape, [kind.name for kind in kinds], error)
            return None
        step.forget(features=self.drafts or self._shared.drafter is None)
        return _Recorded(step, forward, tuple(rest[: len(settles)]), tuple(rest[len(settles) :]))

    def refusal(self, step: Step) -> str | None:
        """Why the host must lead this step, in a word or two; None where the step can be replayed."""
        if not step.rows or step.begins or any(row.start is not None for row in step.rows):
            return "prompt"
        for row in step.rows:
            slot = self._slots.at[row.slot]
            if slot.error is not None:
                return "error"
            # The slot may be further than its account here, never less far.
            if slot.sampling.logprobs is not None or not is_unadjusted(slot.sampling, slot.length - slot.prompt):
                return "sampling"
            if row.drafting and slot.behind:
                return "a page's first row"  # the drafter's, which comes with the feature that the last page keeps
        shape = self._shape(step.rows, min(MOST_DRAFTS, max(row.drafts for row in step.rows)))
        return None if shape is not None and self._kind(step) < len(self._recorded[shape].settle) else "shape"

    def launch(self, step: Step) -> tuple[Replay, DecodeStep]:
        """Gives the step to the device without waiting for it. `refusal` must have given None."""
        self._note_landed()
        asked = [self._drafts(row) for row in step.rows]
        shape = self._shape(step.rows, max(most for most, _ in asked))
        assert shape is not None, "only a step that is ours is launched"
        recorded, buffers = self._recorded[shape], self._host_buffers[self._count % HOST_BUFFERS]
        self._count += 1
        self._plan(shape, step.rows, asked, buffers)
        self._shared.plan.copy_(buffers.plan, non_blocking=True)
        recorded.forward()
        recorded.settle[self._kind(step)]()
        if self.drafts and any(row.drafting for row in step.rows):
            whole, first, further = recorded.draft
            wanted = max(1, *(min(row.propose, MOST_DRAFTS) for row in step.rows if row.drafting))
            if wanted == max(1, shape.positions - 1):
                whole()  # one call of the host, where several cost a small model's round a tenth of its time
            else:
                first()
                for _ in range(1, wanted):
                    further()
        buffers.results.copy_(self._shared.results, non_blocking=True)
        replay = Replay(step, buffers.results, self._recorder.mark())
        self._replays.append(replay)
        return replay, recorded.step

    def catch_up(self) -> None:
        """Waits for the device, and brings the host's account of every slot to the present."""
        while self._replays:
            self._note(self._replays.popleft())

    def _note_landed(self) -> None:
        """Takes in the results that have been read already, and the one whose buffers the next step needs."""
        while self._replays and (self._replays[0].landed or len(self._replays) == HOST_BUFFERS):
            self._note(self._replays.popleft())

    def _note(self, replay: Replay) -> None:
        for row, outcome in zip(replay.step.rows, replay.outcomes, strict=True):
            if outcome.tokens:
                self._slots.learn(row.slot, outcome.tokens, outcome.before)
                self._slots.at[row.slot].proposal = Proposal(outcome.drafts)

    def _shape(self, rows: Sequence[Row], drafts: int) -> Shape | None:
        """The cheapest recorded one that holds these rows, each with so many drafts, if there is one."""
        at, count, positions = self._slots.at, len(rows), 1 + drafts
        longest = PAGE_TOKENS * max(at[row.slot].pages + len(row.new_pages) for row in rows)
        for shape in self._recorded:
            if shape.rows >= count and shape.positions >= positions and shape.longest >= longest:
                return shape
        return None

    def _kind(self, step: Step) -> SamplingKind:
        return max(_kind(self._slots.at[row.slot].sampling) for row in step.rows)

    def _plan(
        self, shape: Shape, rows: Sequence[Row], asked: Sequence[tuple[int, Sequence[int]]], buffers: _HostBuffers
    ) -> None:
        """Writes the plan of a step. Behind its rows stand rows that repeat the shortest one.

        asked: as `_drafts` gives it for each row.
        """
        tables, nobody = self._slots.tables, self._shared.nobody
        at = self._slots.at
        filling = min((row.slot for row in rows), key=lambda slot: at[slot].length, default=nobody)
        spare = (nobody * tables.shape[1],) * MOST_PAGES, (self._shared.spare_page,) * MOST_PAGES
        lines: list[list[int]] = []
        for row, (most, given) in zip(rows, asked, strict=True):
            slot = at[row.slot]
            news = _NO_NEWS if slot.told else (slot.length, *_facts(slot))
            slot.told = True
            cells, pages = spare
            if row.new_pages and len(row.new_pages) <= MOST_PAGES:
                first, count = row.slot * tables.shape[1] + slot.pages, len(row.new_pages)
                cells, pages = (*range(first, first + count), *cells[count:]), (*row.new_pages, *pages[count:])
                slot.pages += count
            else:
                self._slots.add_pages(row.slot, row.new_pages)
            propose = row.propose if row.drafting else -1
            match = (SURE if row.drafting else SHORTEST) if row.propose and self._shared.suffix else 0
            padded = (*given, *(0,) * (MOST_DRAFTS - len(given)))
            lines.append([row.slot, 1 + most, *news, *cells, *pages, propose, match, len(given), *padded])
        filler = [filling, 0, *_NO_NEWS, *spare[0], *spare[1], -1, 0, 0, *(0,) * MOST_DRAFTS]
        lines += [filler] * (shape.rows - len(rows))
        buffers.plan[: shape.rows] = buffers.plan.new_tensor(lines)

    def _drafts(self, row: Row) -> tuple[int, Sequence[int]]:
        """How many drafts the row verifies at most, and those of the host's own.

        What the host has proposed counts where it has changed the slot, or leads the drafter; else the drafts are those
        that wait on the device.
        """
        slot, drafts = self._slots.at[row.slot], min(row.drafts, MOST_DRAFTS)
        if slot.told and not (row.drafting and not self.drafts):
            return drafts, ()
        tokens = slot.proposal.until(drafts).tokens
        slot.proposal = NOTHING
        return len(tokens), tokens


_NO_NEWS = KEEP, *(0,) * FACTS


def _facts(slot: Slot) -> tuple[int, ...]:
    """A slot's facts as integers, in the order of `kernels.hopper.step.step_rows`."""
    sampling = slot.sampling
    temperature = 0.0 if is_greedy(sampling) else sampling.temperature
    bits = struct.unpack("3q", struct.pack("3d", temperature, sampling.top_p, sampling.min_p))
    return slot.limit, *bits, sampling.top_k, signed(sampling.seed)


def _kind(sampling: Sampling) -> SamplingKind:
    if is_greedy(sampling):
        return SamplingKind.LIKELIEST
    return SamplingKind.NARROWED if is_narrowed(sampling) else SamplingKind.WHOLE


def _cost(shape: Shape) -> tuple[int, int]:
    """What a step costs is its positions, then the contexts that attention may have to combine."""
    return shape.rows * shape.positions, shape.longest
