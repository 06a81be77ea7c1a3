"""Runs the engine's steps in order.

A step is one forward pass over all rows, then settling: verify each row's drafts, append the accepted tokens to its
slot, and draft the tokens that the slot's next row will verify. The next step reads them from the slot.

On a GPU a thread runs the steps without waiting between them: the scheduler plans the next step while the device
computes one. Decode rows are captured in CUDA graphs and replayed (`captured.py`), a step's prompts are launched after
them (`prompt_chunk.py`), and all other work runs eagerly, with the host waiting for it. On a CPU the kernels use every
core, so a step runs in the thread that waits for it: a second thread would take cores and the GIL from it. That thread
enters `torch.inference_mode` once for all steps, as the GPU's thread does.
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
from redline.kernels.cpu.blocks.transformer import TransformerOutput
from redline.kernels.group import START_S, STEP_S, Group, barrier
from redline.kernels.hopper.faults import is_device_error
from redline.messages.job import Grammar, Sampling
from redline.messages.step import Begin, CapturedShapes, RowResult, Step, StepResult, TokenLogprobs
from redline.model.eagle3.module import Eagle3
from redline.model.k2.cpu import K2
from redline.run.drafting.learned import Drafting
from redline.run.drafting.verify import Verified, is_chosen_alone, verify, verify_chosen, verify_synthetic
from redline.run.fit import Layout
from redline.run.grammar.matcher import Matchers, masked
from redline.run.graphs.cuda_graph_runner import CudaGraphRunner, SamplingNeeds, no_choice, not_finite
from redline.run.graphs.decode_step import SharedState
from redline.run.graphs.prompt_chunk import PromptChunks
from redline.run.kv import KvPool
from redline.run.layer_marks import LayerMarks, Meanwhile
from redline.run.sampling.on_host import SCORED_ROWS, is_greedy, logprobs_of, sample_each, sample_token, uniform
from redline.run.slots import Proposal, Slot, Slots, Span

if TYPE_CHECKING:
    from llguidance import LLTokenizer

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Pending(Protocol):
    """A launched step."""

    def watch(self, meanwhile: Meanwhile) -> None:
        """Calls `meanwhile` repeatedly until all layers of the step's prompts are computed; not at all if this
        runner does not report progress. Errors of the step are left for `wait` to raise."""
        ...

    def wait(self) -> StepResult:
        """Blocks until the step has run. Re-raises the step's exception."""
        ...


class Launched:
    """A step that the runner's thread will run. `wait` re-raises the step's exception."""

    def __init__(self, future: "Future[WaitForStep]", group: Group, marks: LayerMarks | None = None) -> None:
        """marks: layer marks of its prompts; None disables progress reports."""
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
        """The step's result; blocks until the thread has run it. Re-raises the step's exception, or raises RankLost."""
        try:
            return self._future.result()()
        finally:
            self._group.check()  # if a rank is down, raise RankLost instead of an error that it caused


class Queued:
    """A step that runs in the thread that waits for it, after all steps launched before it."""

    def __init__(self, step: Step, runner: "Runner", queued: "deque[Queued]") -> None:
        self._step = step
        self._runner = runner
        self._queued = queued
        self._ran: StepResult | Exception | None = None
        queued.append(self)

    def watch(self, meanwhile: Meanwhile) -> None:
        """Does nothing: the step does not run before `wait`."""

    def wait(self) -> StepResult:
        """The step's result. Runs it here, after the steps launched before it. Re-raises the step's exception."""
        while self._ran is None:
            self._queued.popleft().run()
        if isinstance(self._ran, Exception):
            raise self._ran
        return self._ran

    def run(self) -> None:
        """Runs the step and keeps its result, or its exception, for `wait`."""
        try:
            self._ran = self._runner.run(self._step)
        except Exception as error:
            self._ran = error


WaitForStep = Callable[[], StepResult]
"""Waits for the device if the step is still running; returns the step's result."""


def nobody(part: str) -> None:
    """Default step profiler: does nothing."""


class Runner:
    """Runs one model with its KV pages and slots, optionally with a drafter prepared for the model, and suffix matches.

    `replays` counts the steps with decode rows replayed from CUDA graphs, `chunks` the steps with prompts launched
    without waiting for the device, and `led` the eager steps, which the host waited for, by reason. One step may be
    counted twice: for its decode rows and for its prompts.
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
        """slots    number of jobs that run at once
        drafts   draft tokens per row, at most
        rates    synthetic acceptance rates (`tune.synthetic.rates_of`); empty: drafts are compared with the target's
                 tokens
        captured whether decode steps are captured in CUDA graphs, and a thread runs all steps; None: on a GPU only
        tokens   makes the vocabulary that grammars are compiled with; None: jobs with a grammar fail

        Re-raises errors of the capture, and raises ConfigError if the machine has too little memory for the pages.
        """
        self.model = model
        self.drafter = drafter
        self.kv = KvPool(model, layout, drafter)
        recorded = model.device.type == "cuda" if captured is None else captured
        # Captured steps find suffix matches on the device. The eager steps of such a runner find none.
        of_host = suffix and not (recorded and model.recordable)
        vocabulary, on_gpu = model.config.vocab_size, model.device.type == "cuda"
        # With synthetic acceptance, drafts are accepted that a grammar would refuse.
        self._matchers = None if tokens is None or rates else Matchers(tokens, vocabulary, pinned=on_gpu)
        self._held: dict[int, object] = {}  # grammars that rank 0 may need, on a rank that follows rank 0
        self.slots = Slots(
            slots, layout.max_model_len, vocabulary, model.device, suffix=of_host, matchers=self._matchers
        )
        self._rates = rates
        self.drafting = Drafting(drafter, self.slots, self.kv, certain=recorded or bool(rates))
        self._layers = drafter.config.layer_ids if drafter is not None else ()
        self.replays = 0
        self.led: Counter[str] = Counter()
        self.chunks = 0
        self.marks_layers = False  # whether `watch` of a step reports how many layers of its prompts are computed
        # Called with the name of each part of a step as it begins, in the thread that runs it; with "" when the step's
        # work ends.
        self.begins: Callable[[str], object] = nobody
        self._captured: CudaGraphRunner | None = None
        self._chunks: PromptChunks | None = None
        if recorded:
            shared = SharedState(model, self.slots, self.kv, drafter, suffix=suffix, rates=rates)
            self._captured = CudaGraphRunner(shared, 1 + drafts)
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
        """Whether a launched step starts before its result is waited for."""
        return self._thread is not None

    @property
    def recorded(self) -> CapturedShapes:
        """The shapes of decode steps that have a CUDA graph now."""
        return CapturedShapes() if self._captured is None else self._captured.report

    def launch(self, step: Step) -> Pending:
        """Queues the step; `wait` of the returned object gives its result. The same thread must launch and wait."""
        if self._captured is None:
            return Queued(step, self, self._queued)
        # Decode rows come before all other rows.
        reads = self.marks_layers and bool(step.rows) and step.rows[-1].start is not None
        marks = LayerMarks() if reads and self.model.device.type == "cuda" else None
        start = functools.partial(self._start, step, self._captured, marks)
        return Launched(self._by_thread(start), self.model.group, marks)

    def record_more(self) -> bool:
        """Captures one more of the shapes that were not captured at startup; false if none is left.

        Takes seconds with a large model; steps launched during the capture wait. Any thread may call it until the
        runner is closed. Raises errors of the device.
        """
        captured = self._captured
        return captured is not None and self._by_thread(functools.partial(self._record_more, captured)).result()

    def _record_more(self, captured: CudaGraphRunner) -> bool:
        """With tensor parallelism each rank compiles its kernels at its own pace: all ranks have to finish the
        capture before a step waits for one of them."""
        group = self.model.group
        group.set_timeout(START_S)
        if not captured.record_more():
            group.set_timeout(STEP_S)
            return False
        barrier(group, self.model.device, START_S, STEP_S)
        return True

    def hold(self, grammar: Grammar) -> Callable[[], bool]:
        """Has a grammar compiled on every rank. The returned function reports whether all ranks have compiled it, so
        that no step has to wait for that.

        As long as the returned function is referenced, no rank drops the grammar."""
        if self._matchers is None or not grammar.text:
            return lambda: True
        return self._matchers.hold(grammar.text).done

    def compile(self, number: int, text: str, done: Callable[[], object]) -> None:
        """Has a grammar compiled, as rank 0 does, and keeps it until `forget` is called with its number. A thread
        calls `done` when it is compiled, in the order of these calls."""
        if self._matchers is None:
            done()
        else:
            self._held[number] = self._matchers.compile(text, done)

    def forget(self, numbers: Sequence[int]) -> None:
        """Releases grammars that rank 0 no longer needs. The most recently used ones may stay cached."""
        for number in numbers:
            self._held.pop(number, None)

    def hurry(self) -> None:
        """Waits until every rank is ready for steps; from then on the timeout for a rank is short (STEP_S).

        The runner must be idle. Raises RankLost if a rank does not respond.
        """
        ready = functools.partial(barrier, self.model.group, self.model.device, START_S, STEP_S)
        if self._thread is None:
            ready()
        else:
            self._by_thread(ready).result()

    def _by_thread(self, work: Callable[[], T]) -> "Future[T]":
        """Queues `work` for the thread, after all earlier work."""
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
            _log.info("%d steps replayed from CUDA graphs; eager steps by reason: %s", self.replays, dict(self.led))
        if self._captured is not None:
            self._captured.close()
        if self._matchers is not None:
            self._matchers.close()

    def place(self, number: int, length: int, drafts: Sequence[int]) -> None:
        """Sets a slot's length in tokens and the drafts that its next row verifies. For measurements.

        The runner must be idle.
        """
        if self._captured is not None:
            self._captured.catch_up()
        slot = self.slots.at[number]
        slot.length, slot.proposal, slot.told = length, Proposal(list(drafts)), False

    def forget_text(self, number: int) -> None:
        """Disables suffix matching for a slot, for measurements: matches would replace the drafts."""
        self.slots.at[number].suffix = None

    def _serve(self) -> None:
        """The thread's loop: captures the graphs first, then runs work until `close`. Ends if the capture fails."""
        captured = self._captured
        assert captured is not None, "the thread exists only if steps are captured"
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)  # the current device is set per thread
        with torch.inference_mode():
            try:
                captured.record()
            except BaseException as error:
                self._recorded.set_exception(error)
                return
            self._recorded.set_result(None)
            while (work := self._work.get()) is not None:
                work()

    def _start(self, step: Step, captured: CudaGraphRunner, marks: LayerMarks | None) -> WaitForStep:
        """Launches the step's decode rows, then its prompts, and waits for neither unless a row needs the host."""
        self.begins("begin")
        try:
            return self._launch(step, captured, marks)
        finally:
            if marks is not None:
                marks.end()
            self.begins("")

    def _launch(self, step: Step, captured: CudaGraphRunner, marks: LayerMarks | None) -> WaitForStep:
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
        wants = captured.wants(decode) if decoding else SamplingNeeds(None)
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

    def _replay(self, step: Step, wants: SamplingNeeds, captured: CudaGraphRunner) -> WaitForStep:
        """Launches a step of decode rows as a CUDA graph."""
        self.begins("replay")
        self.replays += 1
        assert step.shape is not None, "only a step with a captured shape is replayed"
        return captured.launch(step, wants, captured.masks(step.rows, step.shape.positions)).result

    def _read(self, step: Step, marks: LayerMarks | None) -> WaitForStep:
        """Launches a step of prompts after their jobs have begun. If a row needs the host, the step runs eagerly and
        is waited for."""
        assert self._chunks is not None, "prompt chunks exist if steps are captured"
        assert self._captured is not None, "steps are captured"
        self.begins("prompts")
        if self._chunks.refused(step.rows):
            self.led["prompt"] += 1
            return _once_done(self.run(step), self._captured.mark())
        self.chunks += 1
        return self._chunks.launch(step, marks)

    def run(self, step: Step) -> StepResult:
        """Runs the step now, in this thread, and returns its result.

        Rows of a slot that has an error get that error and do not run. If the step raises, the slots of its rows are
        marked with an error, because the next step may be launched already.
        """
        for begin in step.begins:
            self.slots.empty(begin.slot)
        try:
            return self._run(step)
        except Exception as error:
            self._fail(step, error)
            raise

    def _fail(self, step: Step, error: Exception) -> None:
        """Marks the slots of the step's rows as failed. Raises RankLost if tensor parallel ranks share the model:
        this rank has skipped all-reduces that the others wait for, or it cannot be known whether it has."""
        for row in step.rows:
            self.slots.at[row.slot].error = "an earlier step of this slot failed"
        if self.model.group.ranks > 1 and not isinstance(error, WorkerLost):
            raise RankLost(
                f"rank {self.model.group.rank} has failed in step {step.number:,}: {type(error).__name__}: {error}"
            ) from error

    def _is_ours_alone(self, error: Exception) -> bool:
        """Whether an error may have occurred on this rank only, or leaves the worker unusable: such an error is not
        one row's."""
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
            self.slots.at[begin.slot].error = f"the job could not begin: {error}"  # fails this job only

    def _compute(self, spans: Sequence[Span]) -> list[RowResult]:
        asked: list[int] = []  # tokens with logits: all of a decode row, the last one of a prompt row that samples
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
        # A row with tokens and an error continues like any other: its error may be on this rank only.
        sound = [i for i, result in enumerate(results) if result.tokens or result.error is None]
        if any(spans[i].row.drafting or spans[i].row.propose for i in sound):
            self.drafting.follow(
                [spans[i] for i in sound],
                [firsts[i] for i in sound],
                [spans[i].count - spans[i].proposed + results[i].accepted for i in sound],
                features,
            )

    def _verify(self, spans: Sequence[Span], out: TransformerOutput) -> list[RowResult]:
        """The result of each row. Logits exist for all positions of a decode row, and for one of any other row."""
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
            # Drafts may leave the range that the model handles: from the first position with non-finite logits on, they
            # are dropped.
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
                results.append(_stuck(slot) or RowResult(error=reason))  # fails this row only
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

    def _chosen(self, spans: Sequence[Span], out: TransformerOutput) -> list[int]:
        """The token of each row of logits for which `is_chosen_alone` holds; all random draws go in one call.

        For other rows it is the argmax. -1 if the logits are not finite, or if nothing can be drawn.
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
        self,
        number: int,
        drafts: Sequence[int],
        out: TransformerOutput,
        first: int,
        chosen: Sequence[int],
        position: int,
    ) -> Verified:
        """The drafts that the synthetic draw accepts, and the target model's own token after them. first: index of
        the slot's first row of logits."""
        slot, tokens = self.slots.at[number], self.slots.tokens[number]
        held = verify_synthetic(self._rates, slot.sampling.seed, position, len(drafts))
        if is_chosen_alone(slot.sampling, position - slot.prompt, None):
            return Verified([*drafts[:held], chosen[first + held]], held)
        # The slot's tensor holds the drafts after its tokens.
        generated = tokens[slot.prompt : position + held]
        logits_V = out.logits()[first + held]
        token = sample_token(logits_V, slot.sampling, tokens[: slot.prompt], generated, position + held)
        return Verified([*drafts[:held], token], held)

    def _with_prompts(self, spans: Sequence[Span], sampled: Sequence[RowResult], hidden: Tensor) -> list[RowResult]:
        """A result for each row: its sampled tokens, and log probabilities of prompt tokens if requested."""
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
    """The result of a row for which the slot's grammar allows no token, if the grammar has reached a limit; else
    None."""
    if slot.matcher is None or slot.matcher.error is None:
        return None
    return RowResult(error=slot.matcher.error, refused=True)


def _once_done(result: StepResult, done: Callable[[], None]) -> WaitForStep:
    """A result that the host has already, returned once the device has finished the step: the computed pages are
    also read by other streams (`worker/parcel_memory.py`)."""

    def wait() -> StepResult:
        done()
        return result

    return wait


def _together(step: Step, decoded: WaitForStep, read: WaitForStep) -> StepResult:
    """Merges the results of a step's decode rows and of its prompts."""
    of_decoding, of_prompts = iter(decoded().rows), iter(read().rows)
    rows = tuple(next(of_decoding if row.start is None else of_prompts) for row in step.rows)
    return StepResult(number=step.number, rows=rows, replayed=True)


_NOTHING = RowResult()
