"""Decode steps that the host only starts: it sends a plan, replays two pieces, and reads the tokens a step later.

The device knows where each slot stands. The host's own account of a slot follows when a result is read, and `catch_up`
brings it to the present: whoever reads or changes slots otherwise calls it first. Where such work has changed a slot,
the next plan tells the device (`Slot.told`).
"""

import functools
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from redline.kernels.hopper.faults import is_device_error
from redline.kernels.hopper.step.step_rows import (
    BEFORE,
    BY,
    BY_DRAFTER,
    BY_SUFFIX,
    DRAFTED,
    DRAFTED_BY,
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
from redline.run.drafting.learned import SURE
from redline.run.graphs.decode_step import DecodeStep, SamplingKind, SharedState
from redline.run.graphs.graph import Piece, Recorder
from redline.run.graphs.shapes import FIRST_SHAPES, shapes
from redline.run.sampling.on_device import signed
from redline.run.sampling.on_host import is_greedy, is_narrowed, is_unadjusted
from redline.run.slots import NOTHING, Proposal, Slot
from redline.wire.job import PAGE_TOKENS, Sampling
from redline.wire.step import Drafter, Recorded, Row, RowResult, Shape, Step, StepResult

HOST_BUFFERS = 4  # steps whose plan or result the host may still hold

_log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What came of one row: tokens of its slot before the step, positions that ran, the new tokens, the next drafts."""

    before: int
    ran: int
    by: int  # who made the drafts that ran (BY_*)
    tokens: list[int]
    drafts: list[int]  # what was drafted behind them
    drafted_by: int  # and by whom

    @property
    def result(self) -> RowResult:
        """The row's result. A row that ran and gave no token met a logit that is not finite."""
        if self.ran and not self.tokens:
            return RowResult(error=not_finite(self.before - 1))
        return RowResult(
            tokens=tuple(self.tokens),
            proposed=max(0, self.ran - 1),
            accepted=max(0, len(self.tokens) - 1),
            by=_DRAFTERS.get(self.by),
            waiting=len(self.drafts),
        )


_DRAFTERS: dict[int, Drafter] = {BY_DRAFTER: "learned", BY_SUFFIX: "suffix"}


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
                        *(row[BEFORE], row[RAN], row[BY], row[TOKENS : TOKENS + row[NEW]]),
                        drafts=row[DRAFTS : DRAFTS + row[DRAFTED]],
                        drafted_by=row[DRAFTED_BY],
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
    step: DecodeStep  # whose tensors the pieces read
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
        self._recorded: dict[Shape, _Recorded] = {}
        self.report = Recorded()  # of these; any thread may read it
        reach = shared.slots.tables.shape[1] * PAGE_TOKENS
        wanted = shapes(len(shared.slots.at), positions, reach) if shared.model.recordable else []
        # The largest first: all others find the memory between their pieces in what it has taken.
        self._first = sorted(wanted[:FIRST_SHAPES], key=lambda shape: (-shape.rows * shape.positions, -shape.longest))
        self._left = deque(wanted[FIRST_SHAPES:])

    def record(self) -> None:
        """Records the first shapes; `record_more` records the others. A shape that cannot be recorded is logged, and no
        step replays it.

        Raises what the device's own failure raised.
        """
        began = time.perf_counter()
        for shape in self._first:
            made = self._record(shape)
            if made is not None:
                self._recorded[shape] = made
        self.report = Recorded(shapes=tuple(self._recorded))
        _log.info(
            "%d of %d shapes of decode steps are recorded, in %.1f s; %d more will be while nothing runs",
            *(len(self._recorded), len(self._first), time.perf_counter() - began, len(self._left)),
        )

    def record_more(self) -> bool:
        """Records one more of the shapes that `record` has left; false where there was none.

        One that cannot be recorded is logged and left out. Raises what the device's own failure raised.
        """
        if not self._left:
            return False
        shape, began, made = self._left.popleft(), time.perf_counter(), None
        try:
            made = self._record(shape)
        except Exception as error:
            if is_device_error(error):
                raise
            _log.warning("%s cannot be recorded: %s", shape, error)
        if made is not None:
            self._recorded[shape] = made
            self.report = Recorded(shapes=tuple(self._recorded))
            _log.info(
                "%s is recorded, in %.1f s: %d shapes by now, and %d to come",
                *(shape, time.perf_counter() - began, len(self._recorded), len(self._left)),
            )
        return True

    def _record(self, shape: Shape) -> _Recorded | None:
        """Better one kind of sampling than none. Raises what the device's own failure raised."""
        return self._record_kinds(shape, list(SamplingKind)) or self._record_kinds(shape, [SamplingKind.LIKELIEST])

    def _record_kinds(self, shape: Shape, kinds: Sequence[SamplingKind]) -> _Recorded | None:
        step = DecodeStep(self._shared, shape)
        self._plan(shape, (), (), _HostBuffers(self._shared.plan, self._shared.results))
        settles = [functools.partial(step.settle, kind) for kind in kinds]
        drafts = [step.draft_all, step.draft, step.draft_on] if self._shared.drafter is not None else []
        try:
            forward, *rest = self._recorder.record(step.forward, *settles, *drafts)
        except Exception as error:
            if is_device_error(error):  # nothing that follows would work
                raise
            _log.warning("decode steps of %s, %s, cannot be recorded: %s", shape, [kind.name for kind in kinds], error)
            return None
        step.forget()
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
        return None if self._holds(step) else "shape"

    def launch(self, step: Step) -> Replay:
        """Gives the step to the device without waiting for it. `refusal` must have given None."""
        self._note_landed()
        shape = step.shape
        assert shape is not None, "only a step that is ours is launched"
        asked = [self._drafts(row, shape.positions - 1) for row in step.rows]
        recorded, buffers = self._recorded[shape], self._host_buffers[self._count % HOST_BUFFERS]
        self._count += 1
        self._plan(shape, step.rows, asked, buffers)
        self._shared.plan.copy_(buffers.plan, non_blocking=True)
        recorded.forward()
        recorded.settle[self._kind(step)]()
        if any(row.drafting for row in step.rows):
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
        return replay

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
                by = _DRAFTERS[outcome.drafted_by]
                self._slots.at[row.slot].proposal = Proposal(outcome.drafts, by=by)

    def _holds(self, step: Step) -> bool:
        """Whether the shape that the step names is recorded here, and holds its rows and their contexts."""
        shape, at = step.shape, self._slots.at
        recorded = None if shape is None else self._recorded.get(shape)
        if shape is None or recorded is None or shape.rows < len(step.rows) or self._kind(step) >= len(recorded.settle):
            return False
        return shape.longest >= PAGE_TOKENS * max(at[row.slot].pages + len(row.new_pages) for row in step.rows)

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

    def _drafts(self, row: Row, most: int) -> tuple[int, Sequence[int]]:
        """How many drafts the row verifies, `most` at most, and those of the host's own.

        What the host has proposed counts where it has changed the slot; else the drafts are those that wait on the
        device.
        """
        slot, drafts = self._slots.at[row.slot], min(row.drafts, most)
        if slot.told:
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
