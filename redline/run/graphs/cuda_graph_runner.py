"""Decode steps as CUDA graphs: the host sends a plan, replays the graphs, and reads the tokens one step later.

Only the device knows the current state of each slot. The host's copy of a slot is updated when a result is read;
`catch_up` brings all copies up to date, and must be called before slots are read or changed in any other way. If such a
change is made to a slot, the next plan sends it to the device (`Slot.told`).
"""

import functools
import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from redline import clock
from redline.kernels.cuda.compile_ahead import compile_ahead
from redline.kernels.cuda.faults import is_device_error
from redline.kernels.cuda.step.adjust import IN_PROMPT, MOST_BIASES, MOST_STOPS
from redline.kernels.cuda.step.step_rows import (
    ADJUSTED,
    ALTERED,
    ASKED,
    BEFORE,
    BY,
    BY_DRAFTER,
    BY_GRAMMAR,
    BY_SUFFIX,
    CELLS,
    COLUMNS,
    DRAFTED,
    DRAFTED_BY,
    DRAFTS,
    DRAFTS_GIVEN,
    GIVEN,
    GIVEN_BY,
    KEEP,
    LENGTH,
    MASKED,
    MATCH,
    MOST_DRAFTS,
    MOST_PAGES,
    MOST_POSITIONS,
    NEW,
    PAGES,
    PROPOSE,
    RAN,
    SLOT,
    SLOT_FACTS,
    TOKENS,
)
from redline.kernels.cuda.step.suffix_match import SHORTEST
from redline.messages.job import PAGE_TOKENS, Sampling
from redline.messages.step import CapturedShapes, Drafter, Row, RowResult, Shape, Step, StepResult, TokenLogprobs
from redline.ops.draws import signed
from redline.ops.sample import ODDS
from redline.ops.staged import staged
from redline.run.drafting.learned import SURE
from redline.run.graphs.decode_step import NO_CHOICE, DecodeStep, SamplingKind, SharedState
from redline.run.graphs.graph_recorder import Piece, Recorder
from redline.run.graphs.rehearsal import pieces
from redline.run.graphs.shapes import FIRST_SHAPES, shapes
from redline.run.sampling.on_device import MOST_TOP, logprobs_of_row
from redline.run.sampling.on_host import has_penalties, is_greedy, is_narrowed, odds_of, penalties_of
from redline.run.slots import NOTHING, Proposal, Slot

HOST_BUFFERS = 8  # plans or results that the host may still hold: two per step if a prompt ends in it
FOR_EVER = 1 << 62  # larger than any slot's length
_NO_MASKS: Mapping[int, Callable[[], Tensor]] = {}

_log = logging.getLogger(__name__)


class RowOutcome(NamedTuple):
    """The outcome of one row: the slot's tokens before the step, the positions that ran, the new tokens, the next
    drafts."""

    before: int
    ran: int
    by: int  # drafter of the drafts that ran (BY_*)
    tokens: list[int]
    drafts: list[int]  # drafts after the new tokens
    drafted_by: int  # drafter of these drafts (BY_*)
    no_choice: bool  # the sampling parameters excluded all tokens
    forced: int = 0  # number of tokens that the grammar forces after the new ones
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the new tokens, if requested
    error: str | None = None  # why the slot's grammar cannot continue

    @property
    def result(self) -> RowResult:
        """The row's result. A row that ran without giving a token met a logit that is not finite, unless `no_choice`
        is set."""
        if self.error is not None and not self.tokens:
            return RowResult(error=self.error, refused=True)
        if self.ran and not self.tokens:
            return RowResult(error=no_choice(self.before) if self.no_choice else not_finite(self.before - 1))
        tokens = tuple(self.tokens)
        return RowResult(
            tokens=tokens,
            proposed=self.ran - 1 if self.ran else 0,
            accepted=len(tokens) - 1 if tokens else 0,
            by=_DRAFTERS.get(self.by),
            logprobs=self.logprobs,
            waiting=len(self.drafts),
            forced=self.forced,
            error=self.error,
            refused=self.error is not None,
        )


_DRAFTERS: dict[int, Drafter] = {BY_DRAFTER: "learned", BY_SUFFIX: "suffix", BY_GRAMMAR: "grammar"}
_NUMBERS = {drafter: by for by, drafter in _DRAFTERS.items()}


def not_finite(position: int) -> str:
    """The error of a job if its logits at `position` are not all finite."""
    return f"the model returned a non-finite logit at position {position}"


def no_choice(position: int) -> str:
    """The error of a job if its sampling parameters exclude every token for `position`, although the logits are
    finite."""
    return f"no token can be sampled for position {position}: the sampling parameters leave no finite logit"


class HostBuffers(NamedTuple):
    """Host buffers of a step's plan and of its results."""

    plan: Tensor
    results: Tensor
    scores: Tensor


class _Way(NamedTuple):
    """How a slot's tokens are chosen in a captured step."""

    slot: Slot  # the job's slot
    refusal: str | None  # why a captured step cannot choose them; None: it can
    kind: SamplingKind
    until: int  # the slot's logits are adjusted while it has fewer tokens than this
    penalties: bool  # the adjustment includes penalties, which depend on the slot's tokens
    scores: bool  # log probabilities of its tokens are requested


class SamplingNeeds(NamedTuple):
    """The requirements of a step's decode rows on `settle`, all together."""

    refusal: str | None  # why the step must run eagerly, in a word or two; None: it can be replayed
    kind: SamplingKind = SamplingKind.LIKELIEST
    adjusted: bool = False  # some row's logits are adjusted
    scores: bool = False  # log probabilities of some row's tokens are requested


class GraphReplay:
    """A replayed step that may still run. Any thread may ask for its outcomes.

    The first call waits for the device, and advances the grammars of the step's slots over the new tokens. All outcomes
    of a slot's earlier replays must be requested before its matcher is used in any other way, except for `quiet`.
    """

    def __init__(
        self,
        step: Step,
        slots: Sequence[Slot],
        positions: int,
        buffers: HostBuffers,
        wait: Callable[[], None],
        before: "GraphReplay | None" = None,
        *,
        scored: bool,
    ) -> None:
        """slots: those of the step's rows, as the host has them at launch. positions: per row. before: the replay with
        outcomes that come first. scored: whether log probabilities are included.
        """
        self.step = step
        self.slots = slots
        self.landed = False
        self._buffers = buffers
        self._positions = positions
        self._wait = wait
        self._before = before
        self._scored = scored
        self._lock = threading.Lock()
        self._outcomes: list[RowOutcome] = []

    @property
    def outcomes(self) -> list[RowOutcome]:
        """The outcome of each row, in order; the first call waits for the device."""
        with self._lock:
            if not self.landed:
                if self._before is not None:
                    _ = self._before.outcomes
                    self._before = None
                self._wait()
                rows: list[list[int]] = self._buffers.results[: len(self.step.rows)].tolist()
                self._outcomes = [
                    RowOutcome(
                        row[BEFORE],
                        row[RAN],
                        row[BY],
                        row[TOKENS : TOKENS + row[NEW]],
                        row[DRAFTS : DRAFTS + row[DRAFTED]],
                        row[DRAFTED_BY],
                        row[TOKENS] == NO_CHOICE,
                        _forced(slot, row[TOKENS : TOKENS + row[NEW]]),
                        error=None if slot.matcher is None else slot.matcher.error,
                    )
                    for row, slot in zip(rows, self.slots, strict=True)
                ]
                if self._scored:
                    self._outcomes = [
                        outcome._replace(logprobs=self._logprobs(place, outcome.tokens))
                        for place, outcome in enumerate(self._outcomes)
                    ]
                self.landed = True
            return self._outcomes

    def _logprobs(self, place: int, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        count, first = self.slots[place].sampling.logprobs, place * self._positions
        if count is None:
            return ()
        rows: list[list[float]] = self._buffers.scores[first : first + len(tokens)].tolist()
        return tuple(logprobs_of_row(row, token, count) for row, token in zip(rows, tokens, strict=True))

    def result(self) -> StepResult:
        """The step's result; waits for the device as `outcomes` does."""
        rows = tuple([outcome.result for outcome in self.outcomes])
        return StepResult(number=self.step.number, rows=rows, replayed=True)


def _forced(slot: Slot, tokens: Sequence[int]) -> int:
    """Advances a slot's grammar over a row's new tokens; returns how many tokens it forces after them."""
    if slot.matcher is None:
        return 0
    slot.matcher.advance(tokens)
    return len(slot.matcher.forced())


class _Recorded(NamedTuple):
    step: DecodeStep  # owner of the tensors that the graphs read
    forward: Piece
    # by kind, and whether logits are adjusted; without those that could not be captured
    settle: Mapping[tuple[SamplingKind, bool], Piece]
    score: Piece | None  # None: could not be captured
    # all drafts that the shape verifies, the first draft, one more draft; empty without a drafter
    draft: tuple[Piece, ...]


class CudaGraphRunner:
    """The CUDA graphs of one runner, by shape. Only the thread that runs its steps calls this."""

    def __init__(self, shared: SharedState, positions: int) -> None:
        """positions: per decode row, at most."""
        self._shared = shared
        self._slots = shared.slots
        self._positions = min(positions, MOST_POSITIONS)
        self._recorder = Recorder(shared.plan.device)
        host_tensor = self._recorder.host_tensor
        self._host_buffers = [
            HostBuffers(host_tensor(shared.plan), host_tensor(shared.results), host_tensor(shared.scores))
            for _ in range(HOST_BUFFERS)
        ]
        self._nothing_new = _nothing_new(shared)
        self._count = 0
        self._replays: deque[GraphReplay] = deque()  # replays that are not yet in the host's copies of the slots
        self._recorded: dict[Shape, _Recorded] = {}
        self._ways: list[_Way | None] = [None] * len(shared.slots.at)
        self.report = CapturedShapes()  # the captured shapes; any thread may read it
        reach = shared.slots.tables.shape[1] * PAGE_TOKENS
        wanted = shapes(len(shared.slots.at), positions, reach) if shared.model.recordable else []
        # The largest first: all others reuse the memory that it has allocated between its graphs.
        self._first = sorted(wanted[:FIRST_SHAPES], key=lambda shape: (-shape.rows * shape.positions, -shape.longest))
        self._left = deque(wanted[FIRST_SHAPES:])

    def record(self, more: Sequence[Callable[[], object]] = ()) -> None:
        """Compiles the kernels of all shapes, and of what `more` calls, and captures the first shapes; `record_more`
        captures the others. A shape that cannot be captured is logged, and no step replays it.

        Raises errors of the device and, with several tensor parallel ranks, any error of a capture: all ranks must have
        the same shapes.
        """
        device = self._shared.plan.device
        if device.type == "cuda" and self._first:
            compile_ahead(chain(pieces(self._shared, [*self._first, *self._left]), more), device)
        began = clock.perf_counter()
        for shape in self._first:
            made = self._record(shape)
            if made is not None:
                self._recorded[shape] = made
        self.report = CapturedShapes(shapes=tuple(self._recorded))
        _log.info(
            "captured CUDA graphs of %d of %d decode shapes in %.1f s; %d more will be captured while idle",
            *(len(self._recorded), len(self._first), clock.perf_counter() - began, len(self._left)),
        )

    def close(self) -> None:
        """Releases all CUDA graphs; no step may be launched any more."""
        self._recorder.close()

    def record_more(self) -> bool:
        """Captures one more of the shapes that `record` has left; false if none was left.

        A shape that cannot be captured is logged and left out. Raises errors of the device.
        """
        if not self._left:
            return False
        shape, began, made = self._left.popleft(), clock.perf_counter(), None
        try:
            made = self._record(shape)
        except Exception as error:
            if self._ends_all(error):
                raise
            _log.warning("CUDA graph of %s cannot be captured: %s", shape, error)
        if made is not None:
            self._recorded[shape] = made
            self.report = CapturedShapes(shapes=tuple(self._recorded))
            _log.info(
                "captured a CUDA graph of %s in %.1f s: %d shapes captured, %d left",
                *(shape, clock.perf_counter() - began, len(self._recorded), len(self._left)),
            )
        return True

    def _ends_all(self, error: Exception) -> bool:
        """Whether the worker cannot continue: the device has failed, or other ranks may have captured a shape that
        this rank lacks, and would replay it alone."""
        return is_device_error(error) or self._shared.model.group.ranks > 1

    def _record(self, shape: Shape) -> _Recorded | None:
        """Captures a shape with all kinds of sampling or, if that fails, with greedy sampling only. Raises errors of
        the device."""
        every = [(kind, adjusted) for adjusted in (False, True) for kind in SamplingKind]
        return self._record_kinds(shape, every) or self._record_kinds(shape, every[:1], scored=False)

    def _record_kinds(
        self, shape: Shape, kinds: Sequence[tuple[SamplingKind, bool]], *, scored: bool = True
    ) -> _Recorded | None:
        step = DecodeStep(self._shared, shape)
        self.send(shape, ())
        settles = [functools.partial(step.settle, kind, adjusted=adjusted) for kind, adjusted in kinds]
        scores = [step.score] if scored else []
        drafts = [step.draft_all, step.draft, step.draft_on] if self._shared.drafter is not None else []
        try:
            forward, *rest = self._recorder.record(step.forward, *settles, *scores, *drafts)
        except Exception as error:
            if self._ends_all(error):
                raise
            _log.warning("CUDA graph of %s, %s, cannot be captured: %s", shape, [kind.name for kind, _ in kinds], error)
            return None
        step.forget()
        settled, rest = rest[: len(settles)], rest[len(settles) :]
        settle = dict(zip(kinds, settled, strict=True))
        return _Recorded(step, forward, settle, rest[0] if scored else None, tuple(rest[len(scores) :]))

    def wants(self, step: Step) -> SamplingNeeds:
        """The requirements of a step of decode rows, with a refusal unless its shape is captured here and holds it."""
        wants, shape, at = self.asked(step.rows), step.shape, self._slots.at
        if wants.refusal is not None:
            return wants
        recorded = None if shape is None else self._recorded.get(shape)
        if shape is None or recorded is None or shape.rows < len(step.rows):
            return SamplingNeeds("shape")
        if (wants.kind, wants.adjusted) not in recorded.settle or (wants.scores and recorded.score is None):
            return SamplingNeeds("shape")
        if shape.longest < PAGE_TOKENS * max([at[row.slot].pages + len(row.new_pages) for row in step.rows]):
            return SamplingNeeds("shape")
        return wants

    def asked(self, rows: Sequence[Row]) -> SamplingNeeds:
        """The requirements of the rows, found in one pass over them: at 64 rows the host's time counts."""
        at, ways = self._slots.at, self._ways
        kind, adjusted, scores = SamplingKind.LIKELIEST, False, False
        for row in rows:
            slot, way = at[row.slot], ways[row.slot]
            if way is None or way.slot is not slot:
                way = self._way(row.slot)
            if slot.error is not None:
                return SamplingNeeds("error")
            if way.refusal is not None:
                return SamplingNeeds(way.refusal)
            if row.drafting and slot.behind:
                return SamplingNeeds(
                    "a page's first row"
                )  # the drafter's row needs the feature that the last page keeps
            if way.kind > kind:
                kind = way.kind
            # The slot's length on the device may be larger than the host's copy, never smaller.
            adjusted = adjusted or slot.length < way.until or self._has_masks(slot)
            scores = scores or way.scores
        return SamplingNeeds(None, kind, adjusted, scores)

    def masks(self, rows: Sequence[Row], positions: int) -> Mapping[int, Callable[[], Tensor]]:
        """For each row with a grammar, by its place in the step: a function that returns its masks, which `launch`
        calls.

        positions: per row. The function first waits for the results of all earlier steps: while the device runs the
        forward pass of this step, the host reads the tokens of the last one and advances the grammar over them.
        """
        at = self._slots.at
        return {
            place: functools.partial(self._allowed, slot, min(row.drafts, positions - 1), self._given(row.slot))
            for place, row in enumerate(rows)
            if self._has_masks(slot := at[row.slot])
        }

    def _has_masks(self, slot: Slot) -> bool:
        """Whether a slot's next row may need masks, whatever the outcomes of the steps in flight."""
        if slot.matcher is None:
            return False
        steps = 1 + sum(any(one is slot for one in replay.slots) for replay in self._replays)
        return not slot.matcher.quiet(steps * self._positions)

    def _given(self, number: int) -> list[int] | None:
        """The drafts that a slot's next plan sends to the device; None: the device uses its own."""
        slot = self._slots.at[number]
        return slot.coming or None if slot.told else slot.proposal.tokens

    def _allowed(self, slot: Slot, most: int, given: list[int] | None) -> Tensor:
        """The masks of a slot's next positions, with at most `most` drafts."""
        self.catch_up()
        assert slot.matcher is not None, "only a job with a grammar has masks"
        drafts = (slot.proposal.tokens if given is None else given)[:most]
        slot.coming = slot.matcher.forced_behind(drafts)
        return slot.matcher.masks(drafts)

    def launch(
        self, step: Step, wants: SamplingNeeds, masks: Mapping[int, Callable[[], Tensor]] = _NO_MASKS
    ) -> GraphReplay:
        """Launches the step without waiting for it.

        wants: the step's, without a refusal. masks: by place among the step's rows, a function that returns the allowed
        tokens as `DecodeStep.allow` takes them. It is called after the forward pass is launched.
        """
        self.note_landed()
        shape = step.shape
        assert shape is not None, "only a step with a captured shape is launched"
        recorded = self._recorded[shape]
        self.send(shape, step.rows, masks)
        recorded.forward()
        for place, allowed in masks.items():
            recorded.step.allow(place, allowed())
        recorded.settle[wants.kind, wants.adjusted or bool(masks)]()
        if recorded.score is not None and wants.scores:
            recorded.score()
        if wanted := [row.propose for row in step.rows if row.drafting]:
            whole, first, further = recorded.draft
            most = max(1, min(max(wanted), MOST_DRAFTS))
            if most == max(1, shape.positions - 1):
                whole()  # one launch: with a small model several would take a tenth of a round's time
            else:
                first()
                for _ in range(1, most):
                    further()
        return self.fetch(step, shape, wants)

    def send(self, shape: Shape, rows: Sequence[Row], masks: Collection[int] = ()) -> None:
        """Copies the plan of these rows to the device without waiting. `fetch` must follow, for the same rows.

        masks: places of the rows that have masks.
        """
        plan = self._host_buffers[self._count % HOST_BUFFERS].plan
        self._plan(shape, rows, masks, plan)
        self._shared.plan.copy_(plan, non_blocking=True)

    def fetch(self, step: Step, shape: Shape, wants: SamplingNeeds) -> GraphReplay:
        """Starts the copy of the results of the rows that were sent in this shape, without waiting for it."""
        buffers = self._host_buffers[self._count % HOST_BUFFERS]
        self._count += 1
        buffers.results.copy_(self._shared.results, non_blocking=True)
        if wants.scores:
            scored = len(step.rows) * shape.positions
            buffers.scores[:scored].copy_(self._shared.scores[:scored], non_blocking=True)
        slots = [self._slots.at[row.slot] for row in step.rows]
        before = self._replays[-1] if self._replays else None
        replay = GraphReplay(step, slots, shape.positions, buffers, self.mark(), before, scored=wants.scores)
        self._replays.append(replay)
        return replay

    def mark(self) -> Callable[[], None]:
        """Records an event and returns a call that waits until the device has finished all work launched before it."""
        return self._recorder.mark()

    def catch_up(self) -> None:
        """Waits for the device, and brings the host's copies of all slots up to date."""
        while self._replays:
            self._note(self._replays.popleft())

    def note_landed(self) -> None:
        """Takes in the results that have been read already, and the one that uses the next step's buffers."""
        while self._replays and (self._replays[0].landed or len(self._replays) == HOST_BUFFERS):
            self._note(self._replays.popleft())

    def _note(self, replay: GraphReplay) -> None:
        for row, slot, outcome in zip(replay.step.rows, replay.slots, replay.outcomes, strict=True):
            if outcome.tokens and self._slots.at[row.slot] is slot:  # else another job has the slot by now
                self._slots.learn(row.slot, outcome.tokens, outcome.before)
                slot.proposal = Proposal(outcome.drafts, by=_DRAFTERS[outcome.drafted_by])

    def refuses(self, number: int) -> str | None:
        """Why the device cannot choose a slot's tokens as its job requires, in a few words; None if it can."""
        return self._way(number).refusal

    def _way(self, number: int) -> _Way:
        slot, way = self._slots.at[number], self._ways[number]
        if way is None or way.slot is not slot:
            way = self._ways[number] = _way(slot, self._shared.model.config.vocab_size)
        return way

    def _plan(self, shape: Shape, rows: Sequence[Row], masks: Collection[int], plan: Tensor) -> None:
        """Writes the plan of a step on the host. Padding rows after the step's rows repeat the shortest one.

        Most rows only continue: their columns are written for all rows at once, and changes to a slot are written
        separately. masks: places of the rows that have masks.
        """
        at, ways, suffix = self._slots.at, self._ways, self._shared.suffix
        filling = min((row.slot for row in rows), key=lambda slot: at[slot].length, default=self._shared.nobody)
        if rows and self._shared.model.group.ranks > 1:
            filling = rows[0].slot  # the same on all ranks: their copies of the lengths may lag by different amounts
        lines = plan.numpy()[: shape.rows]
        lines[:] = self._nothing_new
        lines[len(rows) :, SLOT] = filling
        most = shape.positions - 1
        lines[: len(rows), _GOES_ON] = [
            (
                row.slot,
                1 + min(row.drafts, most),
                row.propose if row.drafting else -1,
                (SURE if row.drafting else SHORTEST) if suffix and row.propose and not at[row.slot].features else 0,
            )
            for row in rows
        ] or 0
        for place, row in enumerate(rows):
            slot, way = at[row.slot], ways[row.slot]
            if way is None or way.slot is not slot:
                way = self._way(row.slot)
            adjusted = slot.length < way.until
            if row.new_pages:
                self._plan_pages(row, slot, lines[place])
            if adjusted or place in masks:
                lines[place, ALTERED] = (ADJUSTED if adjusted else 0) | (MASKED if place in masks else 0)
            if not slot.told:
                if adjusted:
                    self._tell_wishes(row.slot)
                drafts = slot.proposal.until(min(row.drafts, most))
                lines[place, LENGTH] = slot.length
                lines[place, SLOT_FACTS] = _facts(slot)
                lines[place, ASKED] = 1 + len(drafts.tokens)
                _give(drafts, lines[place])
                slot.proposal, slot.told = NOTHING, True
            elif slot.coming:
                _give(Proposal(slot.coming, by="grammar").until(min(row.drafts, most)), lines[place])
                slot.coming = []

    def _plan_pages(self, row: Row, slot: Slot, line: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
        """Sends a row's new pages to the device: in the row's line of the plan, or by a copy if there are more than
        MOST_PAGES."""
        count = len(row.new_pages)
        if count > MOST_PAGES:
            self._slots.add_pages(row.slot, row.new_pages)
            return
        first = row.slot * self._slots.tables.shape[1] + slot.pages
        line[CELLS][:count] = range(first, first + count)
        line[PAGES][:count] = row.new_pages
        slot.pages += count

    def _tell_wishes(self, number: int) -> None:
        """Sends a slot's logit adjustments to the device, with the counts of its tokens."""
        slot, wishes = self._slots.at[number], self._shared.wishes
        ids, numbers = _wishes(slot)
        wishes.tokens[number] = staged(ids, wishes.tokens.device, torch.int32)
        wishes.numbers[number] = staged(torch.tensor(numbers), wishes.numbers.device, torch.float32)
        if self._way(number).penalties:
            tokens, counts = self._slots.tokens[number], wishes.counts[number]
            counts.zero_()
            counts.index_fill_(0, self._slots.known(number, 0, slot.prompt), IN_PROMPT)
            generated = tokens[slot.prompt : slot.length]
            counts.scatter_add_(0, generated, counts.new_ones(()).expand(generated.shape))


_GOES_ON = [SLOT, ASKED, PROPOSE, MATCH]  # columns of a plan that are set for every row


def _nothing_new(shared: SharedState) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """A padding line of a plan, without its slot: its writes go to the spare page."""
    line = np.zeros(COLUMNS, np.int64)
    line[LENGTH], line[PROPOSE] = KEEP, -1
    line[CELLS], line[PAGES] = shared.nobody * shared.slots.tables.shape[1], shared.spare_page
    return line


def _give(drafts: Proposal, line: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
    """Has a row verify these drafts instead of those in its slot."""
    count = len(drafts.tokens)
    line[GIVEN], line[GIVEN_BY] = count, _NUMBERS[drafts.by]
    line[DRAFTS_GIVEN][:count] = drafts.tokens


_DOUBLES, _BITS = struct.Struct(f"{len(ODDS)}d"), struct.Struct(f"{len(ODDS)}q")


def _facts(slot: Slot) -> tuple[int, ...]:
    """A slot's sampling parameters as integers, in the order of `kernels.cuda.step.step_rows`."""
    sampling = slot.sampling
    if is_greedy(sampling):
        sampling = msgspec.structs.replace(sampling, temperature=0.0)
    return slot.limit, signed(sampling.seed), *_BITS.unpack(_DOUBLES.pack(*odds_of(sampling)))


def _wishes(slot: Slot) -> tuple[list[int], list[float]]:
    """A slot's logit adjustments, in the columns of `kernels.cuda.step.adjust`."""
    sampling = slot.sampling
    biased, biases = [token for token, _ in sampling.logit_bias], [bias for _, bias in sampling.logit_bias]
    missing, stops = MOST_BIASES - len(biased), list(sampling.stop_ids if sampling.min_tokens else ())
    stops += [-1] * (MOST_STOPS - len(stops))
    return [min(slot.prompt + sampling.min_tokens, slot.limit), *biased, *[-1] * missing, *stops], [
        *penalties_of(sampling),
        *biases,
        *[0.0] * missing,
    ]


def _way(slot: Slot, vocabulary: int) -> _Way:
    sampling = slot.sampling
    penalties = has_penalties(sampling)
    until = slot.prompt + sampling.min_tokens if sampling.stop_ids else 0
    if penalties or sampling.logit_bias:
        until = FOR_EVER
    return _Way(
        slot, _refusal(sampling, vocabulary), _kind(sampling), until, penalties, scores=sampling.logprobs is not None
    )


def _refusal(sampling: Sampling, vocabulary: int) -> str | None:
    """Why the device cannot sample with these parameters, in a few words."""
    biased = [token for token, _ in sampling.logit_bias]
    banned = sampling.stop_ids if sampling.min_tokens else ()
    if not all(0 <= token < vocabulary for token in (*biased, *banned)):
        return "sampling: a token id outside the vocabulary"
    if len(biased) > MOST_BIASES or len(set(biased)) < len(biased):
        return "sampling: too many logit biases, or two of one token"
    if len(banned) > MOST_STOPS:
        return "sampling: too many stop ids"
    return "sampling: too many log probabilities" if (sampling.logprobs or 0) > MOST_TOP else None


def _kind(sampling: Sampling) -> SamplingKind:
    if is_greedy(sampling):
        return SamplingKind.LIKELIEST
    return SamplingKind.NARROWED if is_narrowed(sampling) else SamplingKind.WHOLE
