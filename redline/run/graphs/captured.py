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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from redline import clock
from redline.kernels.hopper.faults import is_device_error
from redline.kernels.hopper.step.adjust import IN_PROMPT, MOST_BIASES, MOST_STOPS
from redline.kernels.hopper.step.step_rows import (
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
from redline.kernels.hopper.step.suffix_match import SHORTEST
from redline.ops.draws import signed
from redline.ops.staged import staged
from redline.run.drafting.learned import SURE
from redline.run.graphs.decode_step import NO_CHOICE, DecodeStep, SamplingKind, SharedState
from redline.run.graphs.graph import Piece, Recorder
from redline.run.graphs.shapes import FIRST_SHAPES, shapes
from redline.run.sampling.on_device import MOST_TOP, logprobs_of_row
from redline.run.sampling.on_host import is_greedy, is_narrowed
from redline.run.slots import NOTHING, Proposal, Slot
from redline.wire.job import PAGE_TOKENS, Sampling
from redline.wire.step import Drafter, Recorded, Row, RowResult, Shape, Step, StepResult, TokenLogprobs

HOST_BUFFERS = 8  # plans or results that the host may still hold: two of a step, where a prompt ends in it
FOR_EVER = 1 << 62  # a length that no slot has
_NO_MASKS: Mapping[int, Callable[[], Tensor]] = {}

_log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What came of one row: tokens of its slot before the step, positions that ran, the new tokens, the next drafts."""

    before: int
    ran: int
    by: int  # who made the drafts that ran (BY_*)
    tokens: list[int]
    drafts: list[int]  # what was drafted behind them
    drafted_by: int  # and by whom
    no_choice: bool  # what was asked for left nothing to choose from
    forced: int = 0  # tokens that come behind the new ones in any case
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the new tokens, where asked for
    error: str | None = None  # why the slot's grammar cannot go on

    @property
    def result(self) -> RowResult:
        """The row's result. One that ran and gave no token met a logit that is not finite, unless it left no choice."""
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
    """The error of a job whose logits at `position` are not all finite."""
    return f"the model gave a logit that is not finite at position {position}"


def no_choice(position: int) -> str:
    """The error of a job that leaves itself no token to choose for `position`, where the logits are finite."""
    return f"no token can be chosen for position {position}: what was asked for leaves no finite logit"


class HostBuffers(NamedTuple):
    """Where a step's plan leaves the host, and its result arrives."""

    plan: Tensor
    results: Tensor
    scores: Tensor


class _Way(NamedTuple):
    """How the tokens of a slot's job are chosen in recorded steps."""

    slot: Slot  # the job's
    refusal: str | None  # why they cannot be chosen there
    kind: SamplingKind
    until: int  # the slot's logits are adjusted while it has fewer tokens
    penalties: bool  # which hang on the tokens that it has
    scores: bool  # log probabilities of its tokens are asked for


class Wants(NamedTuple):
    """What the decode rows of a step ask of settle, all together."""

    refusal: str | None  # why the host must lead the step, in a word or two; None: it can be replayed
    kind: SamplingKind = SamplingKind.LIKELIEST
    adjusted: bool = False  # some row's logits are
    scores: bool = False  # log probabilities of some row's tokens are told


class Replay:
    """A replayed step on its way. Any thread may ask for its outcomes.

    The first to ask waits for the device, and has the grammars of the step's slots follow what came. Whoever uses a
    slot's matcher otherwise, but for `quiet`, has asked for the outcomes of all its replays before.
    """

    def __init__(
        self,
        step: Step,
        slots: Sequence[Slot],
        positions: int,
        buffers: HostBuffers,
        wait: Callable[[], None],
        before: "Replay | None" = None,
        *,
        scored: bool,
    ) -> None:
        """slots: those of the step's rows, as the host has them at the launch. positions: of each row. before: the
        replay whose outcomes come first. scored: whether log probabilities come too.
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
        self._outcomes: list[Outcome] = []

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcome of each row, in their order; the first call waits for the device."""
        with self._lock:
            if not self.landed:
                if self._before is not None:
                    _ = self._before.outcomes
                    self._before = None
                self._wait()
                rows: list[list[int]] = self._buffers.results[: len(self.step.rows)].tolist()
                self._outcomes = [
                    Outcome(
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
    """Has a slot's grammar follow what came of a row; gives how many tokens it forces behind that."""
    if slot.matcher is None:
        return 0
    slot.matcher.advance(tokens)
    return len(slot.matcher.forced())


class _Recorded(NamedTuple):
    step: DecodeStep  # whose tensors the pieces read
    forward: Piece
    settle: Mapping[tuple[SamplingKind, bool], Piece]  # by kind, and whether logits are adjusted; those that could be
    score: Piece | None  # recorded, as this one
    draft: tuple[Piece, ...]  # as many drafts as the shape verifies, the first one, one more; none without a drafter


class CapturedSteps:
    """The recorded shapes of one runner. Only the thread that runs its steps calls this."""

    def __init__(self, shared: SharedState, positions: int) -> None:
        """positions: of a decode row, at most."""
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
        self._replays: deque[Replay] = deque()  # those that the host's account of the slots lacks
        self._recorded: dict[Shape, _Recorded] = {}
        self._ways: list[_Way | None] = [None] * len(shared.slots.at)
        self.report = Recorded()  # of these; any thread may read it
        reach = shared.slots.tables.shape[1] * PAGE_TOKENS
        wanted = shapes(len(shared.slots.at), positions, reach) if shared.model.recordable else []
        # The largest first: all others find the memory between their pieces in what it has taken.
        self._first = sorted(wanted[:FIRST_SHAPES], key=lambda shape: (-shape.rows * shape.positions, -shape.longest))
        self._left = deque(wanted[FIRST_SHAPES:])

    def record(self) -> None:
        """Records the first shapes; `record_more` records the others. A shape that cannot be recorded is logged, and no
        step replays it.

        Raises what the device's own failure raised, and where ranks share the model whatever kept a shape from being
        recorded: all of them have the same shapes.
        """
        began = clock.perf_counter()
        for shape in self._first:
            made = self._record(shape)
            if made is not None:
                self._recorded[shape] = made
        self.report = Recorded(shapes=tuple(self._recorded))
        _log.info(
            "%d of %d shapes of decode steps are recorded, in %.1f s; %d more will be while nothing runs",
            *(len(self._recorded), len(self._first), clock.perf_counter() - began, len(self._left)),
        )

    def close(self) -> None:
        """Lets go of all recorded shapes: no step may come any more."""
        self._recorder.close()

    def record_more(self) -> bool:
        """Records one more of the shapes that `record` has left; false where there was none.

        One that cannot be recorded is logged and left out. Raises what the device's own failure raised.
        """
        if not self._left:
            return False
        shape, began, made = self._left.popleft(), clock.perf_counter(), None
        try:
            made = self._record(shape)
        except Exception as error:
            if self._ends_all(error):
                raise
            _log.warning("%s cannot be recorded: %s", shape, error)
        if made is not None:
            self._recorded[shape] = made
            self.report = Recorded(shapes=tuple(self._recorded))
            _log.info(
                "%s is recorded, in %.1f s: %d shapes by now, and %d to come",
                *(shape, clock.perf_counter() - began, len(self._recorded), len(self._left)),
            )
        return True

    def _ends_all(self, error: Exception) -> bool:
        """Whether nothing that follows would work: the device has failed, or other ranks have a shape that this one
        lacks, and would replay it alone."""
        return is_device_error(error) or self._shared.model.group.ranks > 1

    def _record(self, shape: Shape) -> _Recorded | None:
        """Better one kind of sampling than none. Raises what the device's own failure raised."""
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
            _log.warning(
                "decode steps of %s, %s, cannot be recorded: %s", shape, [kind.name for kind, _ in kinds], error
            )
            return None
        step.forget()
        settled, rest = rest[: len(settles)], rest[len(settles) :]
        settle = dict(zip(kinds, settled, strict=True))
        return _Recorded(step, forward, settle, rest[0] if scored else None, tuple(rest[len(scores) :]))

    def wants(self, step: Step) -> Wants:
        """What a step of decode rows asks for, and whether the shape that it names is recorded here and holds it."""
        wants, shape, at = self.asked(step.rows), step.shape, self._slots.at
        if wants.refusal is not None:
            return wants
        recorded = None if shape is None else self._recorded.get(shape)
        if shape is None or recorded is None or shape.rows < len(step.rows):
            return Wants("shape")
        if (wants.kind, wants.adjusted) not in recorded.settle or (wants.scores and recorded.score is None):
            return Wants("shape")
        if shape.longest < PAGE_TOKENS * max([at[row.slot].pages + len(row.new_pages) for row in step.rows]):
            return Wants("shape")
        return wants

    def asked(self, rows: Sequence[Row]) -> Wants:
        """What rows ask for, found in one look at them: at 64 of them the host's time counts."""
        at, ways = self._slots.at, self._ways
        kind, adjusted, scores = SamplingKind.LIKELIEST, False, False
        for row in rows:
            slot, way = at[row.slot], ways[row.slot]
            if way is None or way.slot is not slot:
                way = self._way(row.slot)
            if slot.error is not None:
                return Wants("error")
            if way.refusal is not None:
                return Wants(way.refusal)
            if row.drafting and slot.behind:
                return Wants("a page's first row")  # the drafter's: it comes with the feature that the last page keeps
            if way.kind > kind:
                kind = way.kind
            # The slot may be further than its account here, never less far.
            adjusted = adjusted or slot.length < way.until or self._has_masks(slot)
            scores = scores or way.scores
        return Wants(None, kind, adjusted, scores)

    def masks(self, rows: Sequence[Row], positions: int) -> Mapping[int, Callable[[], Tensor]]:
        """By place among rows of a step, what gives the masks of a row whose job has a grammar: `launch` takes them.

        positions: of each row. What gives them first waits for the results of all steps before: while the device does
        the forward of this one, the host reads what came of the last, and follows it in the grammar.
        """
        at = self._slots.at
        return {
            place: functools.partial(self._allowed, slot, min(row.drafts, positions - 1), self._given(row.slot))
            for place, row in enumerate(rows)
            if self._has_masks(slot := at[row.slot])
        }

    def _has_masks(self, slot: Slot) -> bool:
        """Whether a slot's next row needs masks, whatever comes of the steps that are on their way."""
        if slot.matcher is None:
            return False
        steps = 1 + sum(any(one is slot for one in replay.slots) for replay in self._replays)
        return not slot.matcher.quiet(steps * self._positions)

    def _given(self, number: int) -> list[int] | None:
        """The drafts that a slot's next plan tells the device; None: the device has its own."""
        slot = self._slots.at[number]
        return slot.coming or None if slot.told else slot.proposal.tokens

    def _allowed(self, slot: Slot, most: int, given: list[int] | None) -> Tensor:
        """The masks of a slot's next positions, for so many drafts at most."""
        self.catch_up()
        assert slot.matcher is not None, "only a job with a grammar has masks"
        drafts = (slot.proposal.tokens if given is None else given)[:most]
        slot.coming = slot.matcher.forced_behind(drafts)
        return slot.matcher.masks(drafts)

    def launch(self, step: Step, wants: Wants, masks: Mapping[int, Callable[[], Tensor]] = _NO_MASKS) -> Replay:
        """Gives the step to the device without waiting for it.

        wants: the step's, without a refusal. masks: by place among the step's rows, what gives the tokens that the row
        may choose from, as `DecodeStep.allow` takes them. It is called when the device has the forward to do.
        """
        self.note_landed()
        shape = step.shape
        assert shape is not None, "only a step that is ours is launched"
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
                whole()  # one call of the host, where several cost a small model's round a tenth of its time
            else:
                first()
                for _ in range(1, most):
                    further()
        return self.fetch(step, shape, wants)

    def send(self, shape: Shape, rows: Sequence[Row], masks: Collection[int] = ()) -> None:
        """Sends the plan of these rows to the device, without waiting for it. `fetch` must follow, for the same rows.

        masks: which rows have masks.
        """
        plan = self._host_buffers[self._count % HOST_BUFFERS].plan
        self._plan(shape, rows, masks, plan)
        self._shared.plan.copy_(plan, non_blocking=True)

    def fetch(self, step: Step, shape: Shape, wants: Wants) -> Replay:
        """Asks the device for what came of the rows that were sent in this shape, and does not wait for it."""
        buffers = self._host_buffers[self._count % HOST_BUFFERS]
        self._count += 1
        buffers.results.copy_(self._shared.results, non_blocking=True)
        if wants.scores:
            scored = len(step.rows) * shape.positions
            buffers.scores[:scored].copy_(self._shared.scores[:scored], non_blocking=True)
        slots = [self._slots.at[row.slot] for row in step.rows]
        before = self._replays[-1] if self._replays else None
        replay = Replay(step, slots, shape.positions, buffers, self.mark(), before, scored=wants.scores)
        self._replays.append(replay)
        return replay

    def mark(self) -> Callable[[], None]:
        """A call that waits until the device has done all that it was given before this one."""
        return self._recorder.mark()

    def catch_up(self) -> None:
        """Waits for the device, and brings the host's account of every slot to the present."""
        while self._replays:
            self._note(self._replays.popleft())

    def note_landed(self) -> None:
        """Takes in the results that have been read already, and the one whose buffers the next step needs."""
        while self._replays and (self._replays[0].landed or len(self._replays) == HOST_BUFFERS):
            self._note(self._replays.popleft())

    def _note(self, replay: Replay) -> None:
        for row, slot, outcome in zip(replay.step.rows, replay.slots, replay.outcomes, strict=True):
            if outcome.tokens and self._slots.at[row.slot] is slot:  # else another job has it by now
                self._slots.learn(row.slot, outcome.tokens, outcome.before)
                slot.proposal = Proposal(outcome.drafts, by=_DRAFTERS[outcome.drafted_by])

    def refuses(self, number: int) -> str | None:
        """Why the device cannot choose a slot's tokens as its job asks for, in a few words; None where it can."""
        return self._way(number).refusal

    def _way(self, number: int) -> _Way:
        slot, way = self._slots.at[number], self._ways[number]
        if way is None or way.slot is not slot:
            way = self._ways[number] = _way(slot, self._shared.model.config.vocab_size)
        return way

    def _plan(self, shape: Shape, rows: Sequence[Row], masks: Collection[int], plan: Tensor) -> None:
        """Writes the plan of a step on the host. Behind its rows stand rows that repeat the shortest one.

        Most rows only go on: of them a column at a time is written, and what is new of a slot is written by itself.
        masks: which rows have masks.
        """
        at, ways, suffix = self._slots.at, self._ways, self._shared.suffix
        filling = min((row.slot for row in rows), key=lambda slot: at[slot].length, default=self._shared.nobody)
        if rows and self._shared.model.group.ranks > 1:
            filling = rows[0].slot  # the same on all ranks, whose accounts of lengths may lag differently
        lines = plan.numpy()[: shape.rows]
        lines[:] = self._nothing_new
        lines[len(rows) :, SLOT] = filling
        most = shape.positions - 1
        lines[: len(rows), _GOES_ON] = [
            (
                row.slot,
                1 + min(row.drafts, most),
                row.propose if row.drafting else -1,
                (SURE if row.drafting else SHORTEST) if suffix and row.propose else 0,
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
        """Tells the device of a row's new pages: in the row's line of the plan, or by a copy where they are many."""
        count = len(row.new_pages)
        if count > MOST_PAGES:
            self._slots.add_pages(row.slot, row.new_pages)
            return
        first = row.slot * self._slots.tables.shape[1] + slot.pages
        line[CELLS][:count] = range(first, first + count)
        line[PAGES][:count] = row.new_pages
        slot.pages += count

    def _tell_wishes(self, number: int) -> None:
        """Tells the device what a slot asks of its logits, and counts the tokens that it has."""
        slot, wishes = self._slots.at[number], self._shared.wishes
        ids, numbers = _wishes(slot)
        wishes.tokens[number] = staged(ids, wishes.tokens.device, torch.int32)
        wishes.numbers[number] = staged(torch.tensor(numbers), wishes.numbers.device, torch.float32)
        if self._way(number).penalties:
            tokens, counts = self._slots.tokens[number], wishes.counts[number]
            counts.zero_()
            counts.index_fill_(0, tokens[: slot.prompt], IN_PROMPT)
            generated = tokens[slot.prompt : slot.length]
            counts.scatter_add_(0, generated, counts.new_ones(()).expand(generated.shape))


_GOES_ON = [SLOT, ASKED, PROPOSE, MATCH]  # columns of a plan that every row has its own of


def _nothing_new(shared: SharedState) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The line of a plan that fills a shape up, but for its slot: what it writes goes to a page that is nobody's."""
    line = np.zeros(COLUMNS, np.int64)
    line[LENGTH], line[PROPOSE] = KEEP, -1
    line[CELLS], line[PAGES] = shared.nobody * shared.slots.tables.shape[1], shared.spare_page
    return line


def _give(drafts: Proposal, line: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
    """Has a row verify these drafts, whatever waits in its slot."""
    count = len(drafts.tokens)
    line[GIVEN], line[GIVEN_BY] = count, _NUMBERS[drafts.by]
    line[DRAFTS_GIVEN][:count] = drafts.tokens


def _facts(slot: Slot) -> tuple[int, ...]:
    """A slot's facts as integers, in the order of `kernels.hopper.step.step_rows`."""
    sampling = slot.sampling
    temperature = 0.0 if is_greedy(sampling) else sampling.temperature
    bits = struct.unpack("3q", struct.pack("3d", temperature, sampling.top_p, sampling.min_p))
    return slot.limit, *bits, sampling.top_k, signed(sampling.seed)


def _wishes(slot: Slot) -> tuple[list[int], list[float]]:
    """What a slot asks of its logits, in the columns of `kernels.hopper.step.adjust`."""
    sampling = slot.sampling
    biased, biases = [token for token, _ in sampling.logit_bias], [bias for _, bias in sampling.logit_bias]
    missing, stops = MOST_BIASES - len(biased), list(sampling.stop_ids if sampling.min_tokens else ())
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    stops += [-1] * (MOST_STOPS - len(stops))
    return [min(slot.prompt + sampling.min_tokens, slot.limit), *biased, *[-1] * missing, *stops], [
        *penalties,
        *biases,
        *[0.0] * missing,
    ]


def _way(slot: Slot, vocabulary: int) -> _Way:
    sampling = slot.sampling
    penalties = not (sampling.presence_penalty == sampling.frequency_penalty == 0 and sampling.repetition_penalty == 1)
    until = slot.prompt + sampling.min_tokens if sampling.stop_ids else 0
    if penalties or sampling.logit_bias:
        until = FOR_EVER
    return _Way(
        slot, _refusal(sampling, vocabulary), _kind(sampling), until, penalties, scores=sampling.logprobs is not None
    )


def _refusal(sampling: Sampling, vocabulary: int) -> str | None:
    """Why the device cannot choose as it is asked to, in a few words."""
    biased = [token for token, _ in sampling.logit_bias]
    banned = sampling.stop_ids if sampling.min_tokens else ()
    if not all(0 <= token < vocabulary for token in (*biased, *banned)):
        return "sampling: a token beyond the vocabulary"
    if len(biased) > MOST_BIASES or len(set(biased)) < len(biased):
        return "sampling: more biases than a slot holds, or two of one token"
    if len(banned) > MOST_STOPS:
        return "sampling: more stop ids than a slot holds"
    return "sampling: more log probabilities than are kept" if (sampling.logprobs or 0) > MOST_TOP else None


def _kind(sampling: Sampling) -> SamplingKind:
    if is_greedy(sampling):
        return SamplingKind.LIKELIEST
    return SamplingKind.NARROWED if is_narrowed(sampling) else SamplingKind.WHOLE
