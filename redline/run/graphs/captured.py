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
from redline.kernels.hopper.step.step_rows import BEFORE, FACTS, KEEP, MOST_PAGES, MOST_POSITIONS, NEW, RAN, TOKENS
from redline.run.graphs.decode_step import DecodeStep, SamplingKind, SharedState
from redline.run.graphs.graph import Piece, Recorder
from redline.run.graphs.shapes import Shape, shapes
from redline.run.sampling.on_device import signed
from redline.run.sampling.on_host import is_greedy, is_narrowed, is_unadjusted
from redline.run.slots import NOTHING, Slot, Span
from redline.wire.job import PAGE_TOKENS, Sampling
from redline.wire.step import Row, RowResult, Step, StepResult

HOST_BUFFERS = 4  # steps whose plan or result the host may still hold

_log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What came of one row: tokens of its slot before the step, positions that ran, and the new tokens."""

    before: int
    ran: int
    tokens: list[int]

    def span(self, row: Row) -> Span:
        """The row with the positions that ran."""
        return Span(row, row.slot, self.before - 1, self.ran)

    @property
    def result(self) -> RowResult:
        """The row's result. A row that ran and gave no token met a logit that is not finite."""
        if self.ran and not self.tokens:
            return RowResult(error=not_finite(self.before - 1))
        return RowResult(
            tokens=tuple(self.tokens), proposed=max(0, self.ran - 1), accepted=max(0, len(self.tokens) - 1)
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
                self._outcomes = [Outcome(row[BEFORE], row[RAN], row[TOKENS : TOKENS + row[NEW]]) for row in rows]
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
        self._wanted = shapes(len(shared.slots.at), positions, reach) if shared.model.recordable else []

    def record(self) -> None:
        """Records every shape. A shape that cannot be recorded is logged, and the host leads its steps.

        Raises what the device's own failure raised.
        """
        recorded: dict[Shape, _Recorded] = {}
        for shape in self._wanted:
            made = self._record(shape, list(SamplingKind)) or self._record(
                shape, [SamplingKind.LIKELIEST]
            )  # better one kind than none
            if made is not None:
                recorded[shape] = made
        self._recorded = {shape: recorded[shape] for shape in sorted(recorded, key=_cost)}
        _log.info("%d of %d shapes of decode steps are recorded", len(recorded), len(self._wanted))

    def _record(self, shape: Shape, kinds: Sequence[SamplingKind]) -> _Recorded | None:
        step = DecodeStep(self._shared, shape)
        self._plan(shape, (), _HostBuffers(self._shared.plan, self._shared.results))
        settles = [functools.partial(step.settle, kind) for kind in kinds]
        try:
            forward, *settle = self._recorder.record(step.forward, *settles)
        except Exception as error:
            if is_device_error(error):  # nothing that follows would work
                raise
            _log.warning("decode steps of %s, %s, cannot be recorded: %s", shape, [kind.name for kind in kinds], error)
            return None
        step.forget()
        return _Recorded(step, forward, tuple(settle))

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
            if row.drafts and slot.proposal.q is not None:
                return "drawn drafts"  # block verification
        shape = self._shape(step.rows)
        return None if shape is not None and self._kind(step) < len(self._recorded[shape].settle) else "shape"

    def launch(self, step: Step) -> tuple[Replay, DecodeStep]:
        """Gives the step to the device without waiting for it. `refusal` must have given None."""
        self._note_landed()
        shape = self._shape(step.rows)
        assert shape is not None, "only a step that is ours is launched"
        recorded, buffers = self._recorded[shape], self._host_buffers[self._count % HOST_BUFFERS]
        self._count += 1
        self._plan(shape, step.rows, buffers)
        self._shared.plan.copy_(buffers.plan, non_blocking=True)
        recorded.forward()
        recorded.settle[self._kind(step)]()
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

    def _shape(self, rows: Sequence[Row]) -> Shape | None:
        """The cheapest recorded one that holds these rows, if there is one."""
        at, count = self._slots.at, len(rows)
        positions = 1 + max(min(row.drafts, len(at[row.slot].proposal.tokens)) for row in rows)
        longest = PAGE_TOKENS * max(at[row.slot].pages + len(row.new_pages) for row in rows)
        for shape in self._recorded:
            if shape.rows >= count and shape.positions >= positions and shape.longest >= longest:
                return shape
        return None

    def _kind(self, step: Step) -> SamplingKind:
        return max(_kind(self._slots.at[row.slot].sampling) for row in step.rows)

    def _plan(self, shape: Shape, rows: Sequence[Row], buffers: _HostBuffers) -> None:
        """Writes the plan of a step. Behind its rows stand rows that repeat the shortest one."""
        tables, nobody = self._slots.tables, self._shared.nobody
        at = self._slots.at
        filling = min((row.slot for row in rows), key=lambda slot: at[slot].length, default=nobody)
        spare = (nobody * tables.shape[1],) * MOST_PAGES, (self._shared.spare_page,) * MOST_PAGES
        lines: list[list[int]] = []
        for row in rows:
            slot = at[row.slot]
            drafts = slot.proposal.until(min(row.drafts, shape.positions - 1)).tokens
            slot.proposal = NOTHING
            news = _NO_NEWS if slot.told else (slot.length, *_facts(slot))
            slot.told = True
            cells, pages = spare
            if row.new_pages and len(row.new_pages) <= MOST_PAGES:
                first, count = row.slot * tables.shape[1] + slot.pages, len(row.new_pages)
                cells, pages = (*range(first, first + count), *cells[count:]), (*row.new_pages, *pages[count:])
                slot.pages += count
            else:
                self._slots.add_pages(row.slot, row.new_pages)
            padded = (*drafts, *(0,) * (MOST_POSITIONS - 1 - len(drafts)))
            lines.append([row.slot, 1 + len(drafts), *news, *cells, *pages, *padded])
        filler = [filling, 0, *_NO_NEWS, *spare[0], *spare[1], *(0,) * (MOST_POSITIONS - 1)]
        lines += [filler] * (shape.rows - len(rows))
        buffers.plan[: shape.rows] = buffers.plan.new_tensor(lines)


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
