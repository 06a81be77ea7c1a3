"""Runs steps, one after another.

A step is: forward over all rows, then settle: verify each row's drafts, append what is certain to its slot, and draft
what the slot's next row will verify. The next step finds it there.

On a GPU a thread runs them, and nothing is awaited between two: the planner plans the next while one computes. Decode
rows are recorded and replayed (`captured.py`), a step's prompts are launched behind them (`prompt_chunk.py`), and the
thread leads the rest. On a CPU the kernels have every core, and a step runs in the thread that waits for it: a second
thread would take cores and Python from it. That thread enters `torch.inference_mode` once for all steps, as the GPU's
does.
"""

import functools
import itertools
import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from redline.errors import RankLost, WorkerLost
from redline.kernels.cpu.blocks.transformer import Predicted
from redline.kernels.group import START_S, STEP_S, Group, meet
from redline.kernels.hopper.faults import is_device_error
from redline.model.eagle3.module import Eagle3
from redline.model.k2.cpu import K2
from redline.run.drafting.learned import Drafting
from redline.run.drafting.verify import Verified, is_chosen_alone, verify, verify_chosen, verify_synthetic
from redline.run.fit import Layout
from redline.run.grammar.matcher import Matchers, masked
from redline.run.graphs.captured import CapturedSteps, Wants, no_choice, not_finite
from redline.run.graphs.decode_step import SharedState
from redline.run.graphs.prompt_chunk import PromptChunks
from redline.run.kv import KvPool
from redline.run.layer_marks import LayerMarks, Meanwhile
from redline.run.sampling.on_host import SCORED_ROWS, is_greedy, logprobs_of, sample_each, sample_token, uniform
from redline.run.slots import Proposal, Slot, Slots, Span
from redline.wire.job import Grammar, Sampling
from redline.wire.step import Begin, Recorded, RowResult, Step, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from llguidance import LLTokenizer

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Pending(Protocol):
    """A launched step."""

    def watch(self, meanwhile: Meanwhile) -> None:
        """Calls `meanwhile` again and again until all layers of the step's prompts are computed; where nobody can know
        how far they are, not at all. What goes wrong with the step is for `wait` to raise."""
        ...

    def wait(self) -> StepResult:
        """Blocks until the step has run; raises what it raised."""
        ...


class Launched:
    """A step that a thread will run. `wait` raises what the step raised."""

    def __init__(self, future: "Future[WaitForStep]", group: Group, marks: LayerMarks | None = None) -> None:
        """marks: of the layers of its prompts; None: nobody asks for them."""
        self._future = future
        self._group = group
        self._marks = marks

    def watch(self, meanwhile: Meanwhile) -> None:
        """As `Pending.watch`."""
        marks = self._marks
        while marks is not None and not marks.over:
            try:
                self._group.check()
                layers = marks.passed()
            except (RankLost, RuntimeError):
                return
            meanwhile(layers)

    def wait(self) -> StepResult:
        """The step's result; blocks until the thread has run it. Raises what the step raised, and RankLost."""
        try:
            return self._future.result()()
        finally:
            self._group.check()  # what a lost rank has led to is not the reason


class Queued:
    """A step that runs in the thread that waits for it, behind those that were launched before it."""

    def __init__(self, step: Step, runner: "Runner", queued: "deque[Queued]") -> None:
        self._step = step
        self._runner = runner
        self._queued = queued
        self._ran: StepResult | Exception | None = None
        queued.append(self)

    def watch(self, meanwhile: Meanwhile) -> None:
        """Nothing runs before `wait`."""

    def wait(self) -> StepResult:
        """The step's result; runs it here, after those launched before it. Raises what the step raised."""
        while self._ran is None:
            self._queued.popleft().run()
        if isinstance(self._ran, Exception):
            raise self._ran
        return self._ran

    def run(self) -> None:
        """Runs the step, and keeps its result or what it raised for `wait`."""
        try:
            self._ran = self._runner.run(self._step)
        except Exception as error:
            self._ran = error


WaitForStep = Callable[[], StepResult]
"""Waits for the device, where a step is still on its way."""


def nobody(part: str) -> None:
    """Who is told of the parts of steps where nobody wants to know."""


class Runner:
    """One model, its pages and its slots; perhaps a drafter, prepared for the model, and suffix matches.

    `replays` counts the steps whose decode rows were replayed, `chunks` those whose prompts were launched without
    waiting for the device, `led` those that the host waited for, by why. One step may be counted twice: for its decode
    rows, and for its prompts.
    """

    def __init__(
        self,
        model: K2,
        layout: Layout,
        slots: int,
        drafter: Eagle3 | None = None,
        *,
        suffix: bool = False,
        drafts: int = 0,
        rates: Sequence[float] = (),
        captured: bool | None = None,
        tokens: "Callable[[], LLTokenizer] | None" = None,
    ) -> None:
        """slots    how many jobs run at once
        drafts   of a row, at most
        rates    of synthetic acceptance (`tune.synthetic.rates_of`); none: drafts are compared with the target's tokens
        captured whether decode steps are recorded, and a thread runs all steps; None: on a GPU
        tokens   makes the vocabulary that grammars are compiled with; None: no job may have a grammar

        Raises what the recording raised, and ConfigError where the machine does not give the memory for pages.
        """
        self.model = model
        self.drafter = drafter
        self.kv = KvPool(model, layout, drafter)
        recorded = model.device.type == "cuda" if captured is None else captured
        # Recorded steps have the device look for matches. Of the steps that the host leads among them, none does.
        of_host = suffix and not (recorded and model.recordable)
        vocabulary, on_gpu = model.config.vocab_size, model.device.type == "cuda"
        # Where acceptance is synthetic, drafts hold that a grammar would refuse.
        self._matchers = None if tokens is None or rates else Matchers(tokens, vocabulary, pinned=on_gpu)
        self._held: dict[int, object] = {}  # grammars that rank 0 may need, where this rank follows it
        self.slots = Slots(
            slots, layout.max_model_len, vocabulary, model.device, suffix=of_host, matchers=self._matchers
        )
        self._rates = rates
        self.drafting = Drafting(drafter, self.slots, self.kv, certain=recorded or bool(rates))
        self._layers = drafter.config.layer_ids if drafter is not None else ()
        self.replays = 0
        self.led: Counter[str] = Counter()
        self.chunks = 0
        self.marks_layers = False  # whether `watch` of a step tells how many layers of its prompts are computed
        # Told of each part of a step as it begins, by the thread that runs it; "" where the step's work ends.
        self.begins: Callable[[str], object] = nobody
        self._captured: CapturedSteps | None = None
        self._chunks: PromptChunks | None = None
        if recorded:
            shared = SharedState(model, self.slots, self.kv, drafter, suffix=suffix, rates=rates)
            self._captured = CapturedSteps(shared, 1 + drafts)
            self._chunks = PromptChunks(shared, self._captured, self.drafting)
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._queued: deque[Queued] = deque()
        self._thread: threading.Thread | None = None
        self._recorded: Future[None] = Future()
        if self._captured is not None:
            self._thread = threading.Thread(target=self._serve, name="steps", daemon=True)
            self._thread.start()
            self._recorded.result()

    @property
    def overlaps(self) -> bool:
        """Whether a launched step runs before it is waited for."""
        return self._thread is not None

    @property
    def recorded(self) -> Recorded:
        """The shapes of decode steps that can be replayed now."""
        return Recorded() if self._captured is None else self._captured.report

    def launch(self, step: Step) -> Pending:
        """Queues the step; `wait` of what comes back gives its result. One and the same thread must launch and wait."""
        if self._captured is None:
            return Queued(step, self, self._queued)
        # Decode rows stand before all others.
        reads = self.marks_layers and bool(step.rows) and step.rows[-1].start is not None
        marks = LayerMarks() if reads and self.model.device.type == "cuda" else None
        start = functools.partial(self._start, step, self._captured, marks)
        return Launched(self._by_thread(start), self.model.group, marks)

    def record_more(self) -> bool:
        """Records one more of the shapes that were not recorded at the start; false where none is left.

        Takes seconds with a large model; what is launched meanwhile waits. Any thread may call it, until the runner is
        closed. Raises what the device's own failure raised.
        """
        captured = self._captured
        return captured is not None and self._by_thread(functools.partial(self._record_more, captured)).result()

    def _record_more(self, captured: CapturedSteps) -> bool:
        """Where ranks share the model, each compiles what it records at its own pace: all have to be done with it
        before one is waited for in a step."""
        group = self.model.group
        group.allow(START_S)
        if not captured.record_more():
            group.allow(STEP_S)
            return False
        meet(group, self.model.device, START_S, STEP_S)
        return True

    def hold(self, grammar: Grammar) -> Callable[[], bool]:
        """Has a grammar compiled on every rank. The result tells whether all have, so that no step waits for it.

        As long as the result is referenced, no rank forgets the grammar."""
        if self._matchers is None or not grammar.text:
            return lambda: True
        return self._matchers.hold(grammar.text).done

    def compile(self, number: int, text: str, done: Callable[[], object]) -> None:
        """Has a grammar compiled, as rank 0 does, and keeps it until `forget` names its number. A thread calls `done`
        once it is compiled, in the order of these calls."""
        if self._matchers is None:
            done()
        else:
            self._held[number] = self._matchers.compile(text, done)

    def forget(self, numbers: Sequence[int]) -> None:
        """Rank 0 does not need these grammars any more. Those that were used last may be kept all the same."""
        for number in numbers:
            self._held.pop(number, None)

    def hurry(self) -> None:
        """Waits until every rank is ready for steps; from now on one is waited for a short time only.

        The runner must be idle. Raises RankLost where a rank does not come.
        """
        ready = functools.partial(meet, self.model.group, self.model.device, START_S, STEP_S)
        if self._thread is None:
            ready()
        else:
            self._by_thread(ready).result()

    def _by_thread(self, work: Callable[[], T]) -> "Future[T]":
        """Has the thread do it, behind all that it was given before."""
        future: Future[T] = Future()

        def done() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._work.put(done)
        return future

    def close(self) -> None:
        """Lets launched steps finish, and ends the thread."""
        while self._queued:
            self._queued.popleft().run()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            _log.info("%d steps were replayed; led by the host: %s", self.replays, dict(self.led))
        if self._captured is not None:
            self._captured.close()
        if self._matchers is not None:
            self._matchers.close()

    def place(self, number: int, length: int, drafts: Sequence[int]) -> None:
        """Sets a slot's length in tokens and the drafts that its next row verifies, for measurements.

        The runner must be idle.
        """
        if self._captured is not None:
            self._captured.catch_up()
        slot = self.slots.at[number]
        slot.length, slot.proposal, slot.told = length, Proposal(list(drafts)), False

    def forget_text(self, number: int) -> None:
        """Has the host look for no matches in a slot's text any more, for measurements: they would be the drafts."""
        self.slots.at[number].suffix = None

    def _serve(self) -> None:
        """Until `close`; or until the recording has failed, which is the thread's first work."""
        captured = self._captured
        assert captured is not None, "a thread runs steps where they are recorded"
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)  # which each thread has to be told
        with torch.inference_mode():
            try:
                captured.record()
            except BaseException as error:
                self._recorded.set_exception(error)
                return
            self._recorded.set_result(None)
            while (work := self._work.get()) is not None:
                work()

    def _start(self, step: Step, captured: CapturedSteps, marks: LayerMarks | None) -> WaitForStep:
        """Launches the step's decode rows, and behind them its prompts. Waits for neither, where it need not."""
        self.begins("begin")
        try:
            return self._launch(step, captured, marks)
        finally:
            if marks is not None:
                marks.end()
            self.begins("")

    def _launch(self, step: Step, captured: CapturedSteps, marks: LayerMarks | None) -> WaitForStep:
        for begin in step.begins:
            self.slots.empty(begin.slot)
        try:
            for begin in step.begins:
                self._begin(begin)
        except Exception as error:
            self._fail(step, error)
            raise
        step = msgspec.structs.replace(step, begins=()) if step.begins else step
        prompts = tuple(row for row in step.rows if row.start is not None)
        decoding = tuple(row for row in step.rows if row.start is None) if prompts else step.rows
        decode = msgspec.structs.replace(step, rows=decoding) if prompts else step
        wants = captured.wants(decode) if decoding else Wants(None)
        if wants.refusal is not None or not step.rows:
            if wants.refusal is not None:
                self.led[wants.refusal] += 1
            return _once_done(self.run(step), captured.mark())
        try:
            replayed = self._replay(decode, wants, captured) if decoding else None
            if not prompts:
                assert replayed is not None, "a step has rows"
                return replayed
            read = self._read(msgspec.structs.replace(step, rows=prompts), marks)
        except Exception as error:
            self._fail(step, error)
            raise
        return read if replayed is None else functools.partial(_together, step, replayed, read)

    def _replay(self, step: Step, wants: Wants, captured: CapturedSteps) -> WaitForStep:
        """Launches a step of decode rows that can be replayed."""
        self.begins("replay")
        self.replays += 1
        assert step.shape is not None, "only a step that is recorded is replayed"
        return captured.launch(step, wants, captured.masks(step.rows, step.shape.positions)).result

    def _read(self, step: Step, marks: LayerMarks | None) -> WaitForStep:
        """Launches a step of prompts whose jobs have begun; where a row needs the host, it is led, and awaited."""
        assert self._chunks is not None, "there are chunks where steps are recorded"
        assert self._captured is not None, "likewise"
        self.begins("prompts")
        if self._chunks.refused(step.rows):
            self.led["prompt"] += 1
            return _once_done(self.run(step), self._captured.mark())
        self.chunks += 1
        return self._chunks.launch(step, marks)

    def run(self, step: Step) -> StepResult:
        """Runs the step now, in this thread, and gives its result.

        Rows of a slot that has an error get that error and do not run. Where the step raises, the slots of its rows
        have an error from then on, since the next step may be launched already.
        """
        for begin in step.begins:
            self.slots.empty(begin.slot)
        try:
            return self._run(step)
        except Exception as error:
            self._fail(step, error)
            raise

    def _fail(self, step: Step, error: Exception) -> None:
        """Raises RankLost where ranks share the model: this one has left sums out that the others wait for, or none has
        and nobody can tell."""
        for row in step.rows:
            self.slots.at[row.slot].error = "the step before failed"
        if self.model.group.ranks > 1 and not isinstance(error, WorkerLost):
            raise RankLost(
                f"rank {self.model.group.rank} has failed in step {step.number:,}: {type(error).__name__}: {error}"
            ) from error

    def _is_ours_alone(self, error: Exception) -> bool:
        """Whether an error may have met this rank and no other, or leaves nothing that works: no row's affair then."""
        short = isinstance(error, MemoryError | torch.OutOfMemoryError) and self.model.group.ranks > 1
        return short or isinstance(error, WorkerLost) or is_device_error(error)

    def _run(self, step: Step) -> StepResult:
        self.begins("begin")
        self.drafting.drafted = ()
        if self._captured is not None:
            self._captured.catch_up()
        for begin in step.begins:
            self._begin(begin)
        results: list[RowResult] = []
        spans: list[Span] = []
        places: list[int] = []
        for row in step.rows:
            if row.new_pages:
                self.slots.add_pages(row.slot, row.new_pages)
            error = self.slots.at[row.slot].error
            results.append(_NOTHING if error is None else RowResult(error=error))
            if error is None and (span := self.slots.span(row)).count:
                spans.append(span)
                places.append(len(results) - 1)
        if spans:
            for place, result in zip(places, self._compute(spans), strict=True):
                results[place] = result
        return StepResult(number=step.number, rows=tuple(results), drafted=self.drafting.drafted)

    def _begin(self, begin: Begin) -> None:
        try:
            self.slots.begin(begin)
        except Exception as error:
            if self._is_ours_alone(error):
                raise
            self.slots.at[begin.slot].error = f"the job could not begin: {error}"  # this job's alone

    def _compute(self, spans: Sequence[Span]) -> list[RowResult]:
        asked: list[int] = []  # tokens of the step: all of a decode row, the last of a prompt, where the row samples
        sampling: list[Span] = []
        layers: Sequence[int] = ()
        end, prompts, drafts = 0, False, False
        for span in spans:
            row, first, end = span.row, end, end + span.count
            if row.samples:
                sampling.append(span)
                asked.extend(range(first if row.start is None else end - 1, end))
            prompts = prompts or row.start is not None
            drafts = drafts or row.drafting or row.propose > 0
            if row.drafting:
                layers = self._layers
        self.begins("inputs")
        inputs = self.slots.inputs(spans, self.model)
        self.begins("forward")
        out = self.model.predict(inputs, self.kv.planes, layers, asked)
        self.begins("choose")
        results = self._verify(sampling, out)
        if prompts:
            results = self._with_prompts(spans, results, out.hidden())
        if drafts:
            self.begins("draft")
            self._draft(spans, results, out.features)
        self.begins("")
        return results

    def _draft(self, spans: Sequence[Span], results: Sequence[RowResult], features: Tensor | None) -> None:
        firsts = list(itertools.accumulate((span.count for span in spans), initial=0))
        # A row with tokens and an error goes on as any other: its error may be this rank's alone.
        sound = [i for i, result in enumerate(results) if result.tokens or result.error is None]
        if any(spans[i].row.drafting or spans[i].row.propose for i in sound):
            self.drafting.follow(
                [spans[i] for i in sound],
                [firsts[i] for i in sound],
                [spans[i].count - spans[i].proposed + results[i].accepted for i in sound],
                features,
            )

    def _verify(self, spans: Sequence[Span], out: Predicted) -> list[RowResult]:
        """The result of each row. All positions of a decode row were asked for, and one of any other row."""
        chosen = self._chosen(spans, out)
        tokens = range(self.model.config.vocab_size)
        all_finite = -1 not in chosen
        results: list[RowResult] = []
        end = 0
        for span in spans:
            proposed = span.proposed
            first, end = end, end + 1 + proposed
            slot, position = self.slots.at[span.slot], span.end - proposed
            sound = end - first if all_finite else [*chosen[first:end], -1].index(-1)
            if not sound:
                results.append(RowResult(error=not_finite(position - 1)))
                continue
            # Drafts may go where no answer would have gone: where the numbers end, so do the drafts.
            drafts = span.drafts.until(sound)
            try:
                if self._rates:
                    given = self._verify_synthetic(span.slot, drafts.tokens[: sound - 1], out, first, chosen, position)
                elif is_chosen_alone(slot.choosing, position - slot.prompt, span.drafts.q):
                    given = verify_chosen(chosen[first : first + sound], drafts.tokens)
                else:
                    given = self._verify_drawn(span.slot, drafts, out.logits()[first : first + sound], position)
            except Exception as error:
                if self._is_ours_alone(error):
                    raise
                reason = f"the next token could not be chosen: {error}"
                results.append(_stuck(slot) or RowResult(error=reason))  # this row's alone
                continue
            if not given.tokens or not all(token in tokens for token in given.tokens):
                results.append(_stuck(slot) or RowResult(error=no_choice(position)))
                continue
            self.slots.append(span.slot, given.tokens, position)
            asked = slot.sampling.logprobs
            logprobs = (
                ()
                if asked is None
                else tuple(
                    logprobs_of(row_V, token, asked)
                    for row_V, token in zip(out.logits()[first:end], given.tokens, strict=False)
                )
            )
            why = None if slot.matcher is None else slot.matcher.error
            results.append(
                RowResult(
                    tokens=tuple(given.tokens),
                    proposed=proposed,
                    accepted=given.accepted,
                    by=span.drafts.by if proposed else None,
                    forced=len(slot.proposal.tokens),
                    logprobs=logprobs,
                    error=why,
                    refused=why is not None,
                )
            )
        return results

    def _chosen(self, spans: Sequence[Span], out: Predicted) -> list[int]:
        """The token of each row of logits for which `is_chosen_alone` holds; all draws go in one call.

        For other rows it is the likeliest. -1 where the logits are not finite, or give nothing to draw.
        """
        rows: list[int] = []
        asked: list[Sampling] = []
        us: list[float] = []
        end = 0
        for span in spans:
            first, end = end, end + 1 + span.proposed
            slot = self.slots.at[span.slot]
            sampling = slot.choosing
            if is_greedy(sampling):
                continue
            position = span.end - span.proposed
            if not is_chosen_alone(sampling, position - slot.prompt, span.drafts.q):
                continue
            rows.extend(range(first, end))
            asked.extend([sampling] * (end - first))
            us.extend(uniform(sampling.seed, position + i) for i in range(end - first))
        if not rows:
            return out.likeliest
        chosen, logits_RV = out.likeliest.copy(), out.logits()
        for row, token in zip(
            rows, sample_each(logits_RV if len(rows) == len(chosen) else logits_RV[rows], asked, us), strict=True
        ):
            if chosen[row] >= 0:
                chosen[row] = token
        return chosen

    def _verify_drawn(self, number: int, drafts: Proposal, logits_NV: Tensor, position: int) -> Verified:
        slot, tokens = self.slots.at[number], self.slots.tokens[number]
        prompt, generated = tokens[: slot.prompt], tokens[slot.prompt : position]
        sampling = slot.choosing
        if slot.matcher is not None and sampling.grammar is not None:
            masks_NW = slot.matcher.masks(drafts.tokens)[: len(logits_NV)]
            logits_NV, drafts = masked(logits_NV[: len(masks_NW)], masks_NW), drafts.until(len(masks_NW))
        return verify(logits_NV, drafts.tokens, drafts.q, sampling, prompt, generated, position)

    def _verify_synthetic(
        self, number: int, drafts: Sequence[int], out: Predicted, first: int, chosen: Sequence[int], position: int
    ) -> Verified:
        """The drafts that a draw says hold, and the target's own token behind them. first: of the slot's positions."""
        slot, tokens = self.slots.at[number], self.slots.tokens[number]
        held = verify_synthetic(self._rates, slot.sampling.seed, position, len(drafts))
        if is_chosen_alone(slot.sampling, position - slot.prompt, None):
            return Verified([*drafts[:held], chosen[first + held]], held)
        # The slot has the drafts behind its tokens.
        generated = tokens[slot.prompt : position + held]
        logits_V = out.logits()[first + held]
        token = sample_token(logits_V, slot.sampling, tokens[: slot.prompt], generated, position + held)
        return Verified([*drafts[:held], token], held)

    def _with_prompts(self, spans: Sequence[Span], sampled: Sequence[RowResult], hidden: Tensor) -> list[RowResult]:
        """A result for each row: what it sampled, and log probabilities of prompt tokens where they are asked for."""
        results: list[RowResult] = []
        left, end = iter(sampled), 0
        for span in spans:
            first, end = end, end + span.count
            result = next(left) if span.row.samples else _NOTHING
            logprobs = self._prompt_logprobs(span, hidden[first:end])
            results.append(msgspec.structs.replace(result, prompt_logprobs=logprobs) if logprobs else result)
        return results

    def _prompt_logprobs(self, span: Span, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        slot = self.slots.at[span.slot]
        asked, count = slot.sampling.prompt_logprobs, min(span.end, slot.prompt - 1) - span.start
        if asked is None or count <= 0:
            return ()
        tokens = self.slots.tokens[span.slot, span.start + 1 : span.start + 1 + count]
        return tuple(
            logprobs_of(row_V, token, asked)
            for some, of_some in zip(hidden[:count].split(SCORED_ROWS), tokens.split(SCORED_ROWS), strict=True)
            for row_V, token in zip(self.model.logits(some), of_some.tolist(), strict=True)
        )


def _stuck(slot: Slot) -> RowResult | None:
    """The result of a row that its slot's grammar left no token, where the grammar has met a bound; else None."""
    if slot.matcher is None or slot.matcher.error is None:
        return None
    return RowResult(error=slot.matcher.error, refused=True)


def _once_done(result: StepResult, done: Callable[[], None]) -> WaitForStep:
    """A result that the host has by now, once the device has done all of its step: what is told to be computed is read
    by others than its stream, too (`worker/parcel_memory.py`)."""

    def wait() -> StepResult:
        done()
        return result

    return wait


def _together(step: Step, decoded: WaitForStep, read: WaitForStep) -> StepResult:
    """The result of a step from that of its decode rows and that of its prompts."""
    of_decoding, of_prompts = iter(decoded().rows), iter(read().rows)
    rows = tuple(next(of_decoding if row.start is None else of_prompts) for row in step.rows)
    return StepResult(number=step.number, rows=rows, replayed=True)


_NOTHING = RowResult()
