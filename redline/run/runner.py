"""Runs the engine's steps in order.

A step is one forward pass over all rows, then settling: verify each row's drafts, append the accepted tokens to its
slot, and draft the tokens that the slot's next row will verify. The next step reads them from the slot.

On a GPU a thread runs the steps without waiting between them: the scheduler plans the next step while the device
computes one. Decode rows are captured in CUDA graphs and replayed (`cuda_graph_runner.py`), a step's prompts are
launched after them (`prompt_chunk.py`), and all other work runs eagerly, with the host waiting for it. On a CPU the
kernels use every core, so a step runs in the thread that waits for it: a second thread would take cores and the GIL
from it. That thread enters `torch.inference_mode` once for all steps, as the GPU's thread does.
"""

import functools
import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

from redline.errors import RankLost, WorkerLost
from redline.kernels.group import START_S, STEP_S, barrier
from redline.messages.job import PAGE_TOKENS, Grammar, PageId, Sampling
from redline.messages.media import ImageData
from redline.messages.step import Begin, CapturedShapes, Row, Step, StepResult
from redline.model.drafter import Drafter
from redline.model.k2.cpu import K2
from redline.run.drafting.learned import SlotDrafters
from redline.run.eager_step import EagerSteps
from redline.run.fit import Layout
from redline.run.grammar.matcher import Matchers
from redline.run.graphs.cuda_graph_runner import CudaGraphRunner, SamplingNeeds
from redline.run.graphs.decode_step import SharedState
from redline.run.graphs.prompt_chunk import PromptChunks
from redline.run.kv import KvPool
from redline.run.layer_marks import LayerMarks
from redline.run.pending import LaunchedStep, Pending, QueuedStep, WaitForStep
from redline.run.slots import Proposal, Slots
from redline.run.vision import VisionEncoder

if TYPE_CHECKING:
    from llguidance import LLTokenizer

T = TypeVar("T")
FIRST_PROMPT = 9 * PAGE_TOKENS, 24  # tokens of its chunks: matmuls of the library and of our kernels, a prefix, a part

_log = logging.getLogger(__name__)


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
        drafter: Drafter | None = None,
        *,
        suffix: bool = False,
        drafts: int = 0,
        rates: Sequence[float] = (),
        captured: bool | None = None,
        tokens: "Callable[[], LLTokenizer] | None" = None,
        vision: VisionEncoder | None = None,
    ) -> None:
        """slots    number of jobs that run at once
        drafts   draft tokens per row, at most
        rates    synthetic acceptance rates (`policy.synthetic.rates_of`); empty: drafts are compared with the target's
                 tokens
        captured whether decode steps are captured in CUDA graphs, and a thread runs all steps; None: on a GPU only
        tokens   makes the vocabulary that grammars are compiled with; None: jobs with a grammar fail
        vision   encodes images; None: the model reads none

        Re-raises errors of the capture, and raises ConfigError if the machine has too little memory for the pages.
        """
        self.model = model
        self.drafter = drafter
        self._vision = vision
        self.kv = KvPool(model, layout, drafter)
        recorded = model.device.type == "cuda" if captured is None else captured
        # Captured steps find suffix matches on the device. The eager steps of such a runner find none.
        of_host = suffix and not (recorded and model.recordable)
        vocabulary, on_gpu = model.config.vocab_size, model.device.type == "cuda"
        # With synthetic acceptance, drafts are accepted that a grammar would refuse.
        self._matchers = None if tokens is None or rates else Matchers(tokens, vocabulary, pinned=on_gpu)
        self._held: dict[int, object] = {}  # grammars that rank 0 may need, on a rank that follows rank 0
        self.slots = Slots(
            slots,
            layout.max_model_len,
            vocabulary,
            model.device,
            suffix=of_host,
            matchers=self._matchers,
            image_token=0 if vision is None else vision.tower.config.token,
        )
        self.drafting = SlotDrafters(drafter, self.slots, self.kv, certain=recorded or bool(rates))
        self.replays = 0
        self.led: Counter[str] = Counter()
        self.chunks = 0
        self.marks_layers = False  # whether `watch` of a step reports how many layers of its prompts are computed
        # Called with the name of each part of a step as it begins, in the thread that runs it; with "" when the step's
        # work ends.
        self.begins: Callable[[str], object] = nobody
        layers = drafter.config.layer_ids if drafter is not None else ()
        self._eager = EagerSteps(
            model, self.kv, self.slots, self.drafting, layers, rates, lambda part: self.begins(part)
        )
        self._captured: CudaGraphRunner | None = None
        self._chunks: PromptChunks | None = None
        if recorded:
            shared = SharedState(model, self.slots, self.kv, drafter, suffix=suffix, rates=rates)
            self._captured = CudaGraphRunner(shared, 1 + drafts)
            self._chunks = PromptChunks(shared, self._captured, self.drafting)
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._queued: deque[QueuedStep] = deque()
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
            return QueuedStep(step, self.run, self._queued)
        # Decode rows come before all other rows.
        reads = self.marks_layers and bool(step.rows) and step.rows[-1].start is not None
        marks = LayerMarks() if reads and self.model.device.type == "cuda" else None
        start = functools.partial(self._start, step, self._captured, marks)
        return LaunchedStep(self._by_thread(start), self.model.group, marks)

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

    def put_image(self, image: ImageData) -> None:
        """Takes the pixels of an image that later steps encode. Any thread may call it."""
        assert self._vision is not None, "the model reads no images"
        self._vision.put(image)

    def _encode(self, step: Step) -> float | None:
        if not step.encodes:
            return None
        assert self._vision is not None, "the model reads no images"
        self.begins("encode")
        return self._vision.run(step.encodes)

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
                captured.record([] if self._vision is None else [self._vision.tower.rehearse])
                if self.model.device.type == "cuda":
                    self._run_first_prompt(captured)
                    if self._vision is not None:
                        self._vision.tower.rehearse()
            except BaseException as error:
                self._recorded.set_exception(error)
                return
            self._recorded.set_result(None)
            while (work := self._work.get()) is not None:
                work()

    def _run_first_prompt(self, captured: CudaGraphRunner) -> None:
        """Runs a prompt in two chunks, of which nothing is kept: libraries load kernels at their first call, for which
        a client would wait. The pages are not allocated yet, and are written again before they are read.
        """
        most = min(self.slots.tokens.shape[1] - 1, PAGE_TOKENS * self.kv.pages)
        counts = FIRST_PROMPT if sum(FIRST_PROMPT) <= most else (most,)
        tokens, drafting = (0,) * sum(counts), self.drafter is not None
        begins = (Begin(0, tokens, len(tokens), (), Sampling(max_tokens=1, temperature=0), len(tokens) + 1, drafting),)
        start = 0
        for count in counts:
            first, end = (-(-place // PAGE_TOKENS) for place in (start, start + count))
            pages = tuple(PageId(page) for page in range(first, end))
            row = Row(0, start, count, drafting=drafting, new_pages=pages, samples=start + count == len(tokens))
            self._launch(Step(number=0, begins=begins, rows=(row,)), captured, None)()
            begins, start = (), start + count
        captured.catch_up()
        self.slots.empty(0)
        self.chunks = 0

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
            encode_s = self._encode(step)
            for begin in step.begins:
                self._eager.begin(begin)
        except Exception as error:
            self._fail(step, error)
            raise
        if step.encodes:
            launched = self._launch(msgspec.structs.replace(step, begins=(), encodes=()), captured, marks)
            return lambda: msgspec.structs.replace(launched(), encode_s=encode_s)
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
            self.begins("begin")
            self.drafting.drafted = ()
            if self._captured is not None:
                self._captured.catch_up()
            encode_s = self._encode(step)
            result = self._eager.run(step)
            return result if encode_s is None else msgspec.structs.replace(result, encode_s=encode_s)
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
