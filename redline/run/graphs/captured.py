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
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.hopper.faults import is_device_error
from redline.kernels.hopper.step.adjust import IN_PROMPT, MOST_BIASES, MOST_STOPS
from redline.kernels.hopper.step.step_rows import (
    ADJUSTED,
    BEFORE,
    BY,
    BY_DRAFTER,
    BY_SUFFIX,
    DRAFTED,
    DRAFTED_BY,
    DRAFTS,
    FACTS,
    KEEP,
    MASKED,
    MOST_DRAFTS,
    MOST_PAGES,
    NEW,
    RAN,
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
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the new tokens, where asked for
    no_choice: bool = False  # what was asked for left nothing to choose from

    @property
    def result(self) -> RowResult:
        """The row's result. One that ran and gave no token met a logit that is not finite, unless it left no choice."""
        if self.ran and not self.tokens:
            return RowResult(error=no_choice(self.before) if self.no_choice else not_finite(self.before - 1))
        return RowResult(
            tokens=tuple(self.tokens),
            proposed=max(0, self.ran - 1),
            accepted=max(0, len(self.tokens) - 1),
            by=_DRAFTERS.get(self.by),
            logprobs=self.logprobs,
            waiting=len(self.drafts),
        )


_DRAFTERS: dict[int, Drafter] = {BY_DRAFTER: "learned", BY_SUFFIX: "suffix"}


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


class Replay:
    """A replayed step on its way. Any thread may ask for its outcomes; the first to ask waits for the device."""

    def __init__(
        self, step: Step, slots: Sequence[Slot], positions: int, buffers: HostBuffers, wait: Callable[[], None]
    ) -> None:
        """slots: those of the step's rows, as the host has them at the launch. positions: of each row."""
        self.step = step
        self.slots = slots
        self.landed = False
        self._buffers = buffers
        self._positions = positions
        self._wait = wait
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcome of each row, in their order; the first call waits for the device."""
        with self._lock:
            if not self.landed:
                self._wait()
                rows: list[list[int]] = self._buffers.results[: len(self.step.rows)].tolist()
                self._outcomes = [
                    Outcome(
                        *(row[BEFORE], row[RAN], row[BY], row[TOKENS : TOKENS + row[NEW]]),
                        drafts=row[DRAFTS : DRAFTS + row[DRAFTED]],
                        drafted_by=row[DRAFTED_BY],
                        logprobs=self._scored(place, row[TOKENS : TOKENS + row[NEW]]),
                        no_choice=row[TOKENS] == NO_CHOICE,
                    )
                    for place, row in enumerate(rows)
                ]
                self.landed = True
            return self._outcomes

    def _scored(self, place: int, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        count, first = self.slots[place].sampling.logprobs, place * self._positions
        if count is None:
            return ()
        rows: list[list[float]] = self._buffers.scores[first : first + len(tokens)].tolist()
        return tuple(logprobs_of_row(row, token, count) for row, token in zip(rows, tokens, strict=True))

    def result(self) -> StepResult:
        """The step's result; waits for the device as `outcomes` does."""
        rows = tuple(outcome.result for outcome in self.outcomes)
        return StepResult(number=self.step.number, rows=rows, replayed=True)


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
        self._recorder = Recorder(shared.plan.device)
        host_tensor = self._recorder.host_tensor
        self._host_buffers = [
            HostBuffers(host_tensor(shared.plan), host_tensor(shared.results), host_tensor(shared.scores))
            for _ in range(HOST_BUFFERS)
        ]
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
        every = [(kind, adjusted) for adjusted in (False, True) for kind in SamplingKind]
        return self._record_kinds(shape, every) or self._record_kinds(shape, every[:1], scored=False)

    def _record_kinds(
        self, shape: Shape, kinds: Sequence[tuple[SamplingKind, bool]], *, scored: bool = True
    ) -> _Recorded | None:
        step = DecodeStep(self._shared, shape)
        self._plan(shape, (), (), {}, self._shared.plan)
        settles = [functools.partial(step.settle, kind, adjusted=adjusted) for kind, adjusted in kinds]
        scores = [step.score] if scored else []
        drafts = [step.draft_all, step.draft, step.draft_on] if self._shared.drafter is not None else []
        try:
            forward, *rest = self._recorder.record(step.forward, *settles, *scores, *drafts)
        except Exception as error:
            if is_device_error(error):  # nothing that follows would work
                raise
            _log.warning(
                "decode steps of %s, %s, cannot be recorded: %s", shape, [kind.name for kind, _ in kinds], error
            )
            return None
        step.forget()
        settled, rest = rest[: len(settles)], rest[len(settles) :]
        settle = dict(zip(kinds, settled, strict=True))
        return _Recorded(step, forward, settle, rest[0] if scored else None, tuple(rest[len(scores) :]))

    def refusal(self, step: Step) -> str | None:
        """Why the host must lead this step of decode rows, in a word or two; None where it can be replayed."""
        for row in step.rows:
            slot = self._slots.at[row.slot]
            if slot.error is not None:
                return "error"
            if (refusal := self.refuses(row.slot)) is not None:
                return refusal
            if row.drafting and slot.behind:
                return "a page's first row"  # the drafter's, which comes with the feature that the last page keeps
        return None if self._holds(step) else "shape"

    def launch(self, step: Step, masks: Mapping[int, Callable[[], Tensor]] = _NO_MASKS) -> Replay:
        """Gives the step to the device without waiting for it. `refusal` must have given None.

        masks: by place among the step's rows, what gives the tokens that the row may choose from, as `DecodeStep.allow`
        takes them. It is called when the device has the forward to do.
        """
        self.note_landed()
        shape = step.shape
        assert shape is not None, "only a step that is ours is launched"
        recorded = self._recorded[shape]
        kind, adjusted = self.settling(step)
        self.send(shape, step.rows, [self._drafts(row, shape.positions - 1) for row in step.rows], masks)
        recorded.forward()
        for place, allowed in masks.items():
            recorded.step.allow(place, allowed())
        recorded.settle[kind, adjusted or bool(masks)]()
        if recorded.score is not None and self.scores(step):
            recorded.score()
        if any(row.drafting for row in step.rows):
            whole, first, further = recorded.draft
            wanted = max(1, *(min(row.propose, MOST_DRAFTS) for row in step.rows if row.drafting))
            if wanted == max(1, shape.positions - 1):
                whole()  # one call of the host, where several cost a small model's round a tenth of its time
            else:
                first()
                for _ in range(1, wanted):
                    further()
        return self.fetch(step, shape)

    def send(
        self,
        shape: Shape,
        rows: Sequence[Row],
        asked: Sequence[tuple[int, Sequence[int]]],
        masks: Container[int] = (),
    ) -> None:
        """Sends the plan of these rows to the device, without waiting for it. `fetch` must follow, for the same rows.

        asked: of each row, how many drafts it verifies at most, and the tokens that the host gives it. masks: which
        rows have masks.
        """
        plan = self._host_buffers[self._count % HOST_BUFFERS].plan
        self._plan(shape, rows, asked, masks, plan)
        self._shared.plan.copy_(plan, non_blocking=True)

    def fetch(self, step: Step, shape: Shape) -> Replay:
        """Asks the device for what came of the rows that were sent in this shape, and does not wait for it."""
        buffers = self._host_buffers[self._count % HOST_BUFFERS]
        self._count += 1
        buffers.results.copy_(self._shared.results, non_blocking=True)
        if self.scores(step):
            scored = len(step.rows) * shape.positions
            buffers.scores[:scored].copy_(self._shared.scores[:scored], non_blocking=True)
        slots = [self._slots.at[row.slot] for row in step.rows]
        replay = Replay(step, slots, shape.positions, buffers, self.mark())
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

    def _holds(self, step: Step) -> bool:
        """Whether the shape that the step names is recorded here, and holds its rows and their contexts."""
        shape, at = step.shape, self._slots.at
        recorded = None if shape is None else self._recorded.get(shape)
        if shape is None or recorded is None or shape.rows < len(step.rows):
            return False
        if self.settling(step) not in recorded.settle or (recorded.score is None and self.scores(step)):
            return False
        return shape.longest >= PAGE_TOKENS * max(at[row.slot].pages + len(row.new_pages) for row in step.rows)

    def settling(self, step: Step) -> tuple[SamplingKind, bool]:
        """What the step's rows need at most, and whether the logits of any are adjusted."""
        kind = max(self._way(row.slot).kind for row in step.rows)
        return kind, any(self._is_adjusted(row.slot) for row in step.rows)

    def scores(self, step: Step) -> bool:
        """Whether log probabilities of any row's tokens are asked for."""
        return any(self._slots.at[row.slot].sampling.logprobs is not None for row in step.rows)

    def refuses(self, number: int) -> str | None:
        """Why the device cannot choose a slot's tokens as its job asks for, in a few words; None where it can."""
        return self._way(number).refusal

    def _is_adjusted(self, number: int) -> bool:
        # The slot may be further than its account here, never less far.
        return self._slots.at[number].length < self._way(number).until

    def _way(self, number: int) -> _Way:
        slot, way = self._slots.at[number], self._ways[number]
        if way is None or way.slot is not slot:
            way = self._ways[number] = _way(slot, self._shared.model.config.vocab_size)
        return way

    def _plan(
        self,
        shape: Shape,
        rows: Sequence[Row],
        asked: Sequence[tuple[int, Sequence[int]]],
        masks: Container[int],
        plan: Tensor,
    ) -> None:
        """Writes the plan of a step. Behind its rows stand rows that repeat the shortest one.

        asked: as `_drafts` gives it for each row. masks: which rows have masks.
        """
        tables, nobody = self._slots.tables, self._shared.nobody
        at = self._slots.at
        filling = min((row.slot for row in rows), key=lambda slot: at[slot].length, default=nobody)
        spare = (nobody * tables.shape[1],) * MOST_PAGES, (self._shared.spare_page,) * MOST_PAGES
        lines: list[list[int]] = []
        for place, (row, (most, given)) in enumerate(zip(rows, asked, strict=True)):
            slot, altered = at[row.slot], MASKED if place in masks else 0
            if self._is_adjusted(row.slot):
                altered |= ADJUSTED
                if not slot.told:
                    self._tell_wishes(row.slot)
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
            lines.append([row.slot, 1 + most, *news, *cells, *pages, propose, match, len(given), *padded, altered])
        filler = [filling, 0, *_NO_NEWS, *spare[0], *spare[1], -1, 0, 0, *(0,) * MOST_DRAFTS, 0]
        lines += [filler] * (shape.rows - len(rows))
        plan[: shape.rows] = plan.new_tensor(lines)

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
    return _Way(slot, _refusal(sampling, vocabulary), _kind(sampling), until, penalties)


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
