"""Records a profile of a worker over a few seconds, on request (`Profile`).

While it records, wrappers of planner and runner time each call, so a loop that is not being profiled has no overhead.
The details of a step come from the runner (its parts) and from the device: on a CPU the kernels record each op, on a
GPU torch.profiler records each kernel.
"""

from collections.abc import Callable

from redline.kernels.cpu import native
from redline.kernels.cpu.watch import OpTimes
from redline.messages.channel import Outbox
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.profile import Profile, Profiled, Span, packed
from redline.messages.step import CapturedShapes, Step, StepResult
from redline.run.layer_marks import Meanwhile
from redline.run.pending import Pending
from redline.run.runner import Runner, nobody
from redline.worker.kernel_trace import KernelTrace
from redline.worker.ports import Plans, StepLauncher
from redline.worker.service import Service

PIECE = 2000  # spans per message: packing them takes half a millisecond of the loop's time
_NS = 1_000_000_000


class SpanBuffer:
    """A bounded list of spans. `left_out`: number of spans that were dropped."""

    def __init__(self, most: int) -> None:
        self._room = most
        self._spans: list[Span] = []
        self.left_out = 0

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, lane: str, name: str, began_ns: int, ended_ns: int, **facts: int | float | str) -> None:
        """Add a span. Any thread may call this."""
        self.put(Span(lane, name, began_ns, ended_ns, facts))

    def put(self, span: Span) -> None:
        """As `add`."""
        if self._room <= 0:
            self.left_out += 1
            return
        self._room -= 1
        self._spans.append(span)

    def take(self, count: int) -> list[Span]:
        """Remove and return the first `count` spans."""
        taken, self._spans[:count] = self._spans[:count], []
        return taken


class ProfileRecording:
    """One profile, from its request to its last message. Until it ends, the loop uses its `planner` and `runner`."""

    def __init__(
        self,
        asked: Profile,
        planner: Plans,
        runner: StepLauncher,
        outbox: Outbox,
        clock: Callable[[], int],
    ) -> None:
        """clock: the host's monotonic clock, in nanoseconds. Like all methods, called in the loop's thread."""
        self._asked, self._outbox, self._clock = asked, outbox, clock
        self._until = clock() + round(asked.seconds * _NS)
        self._spans = SpanBuffer(asked.most)
        self._real = runner
        self._notes: list[str] = []
        self._ops: OpTimes | None = None
        self._kernels: KernelTrace | None = None
        on_gpu = isinstance(runner, Runner) and runner.model.device.type == "cuda"
        if on_gpu:
            self._kernels = KernelTrace(asked.seconds)
        elif isinstance(runner, Runner) and native.library() is not None and not runner.overlaps:
            self._ops = OpTimes()
        self._parts = _Parts(self._spans, clock)
        runner.begins = self._parts.begins
        self._watching = True
        self.planner: Plans = _WatchedPlanner(planner, self._spans, clock)
        self.runner: StepLauncher = _WatchedRunner(runner, self._spans, clock, self._step_ended)

    def due_in(self) -> float:
        """Most seconds until `work` has to be called by an idle loop."""
        return max(0.0, min(0.1, (self._until - self._clock()) / _NS))

    def work(self) -> bool:
        """Sends recorded spans, and ends the recording in time; called in each loop iteration. False once everything is
        sent."""
        over = self._clock() >= self._until
        if over and self._watching:
            self._stop()
        if len(self._spans) >= PIECE:
            self._outbox.put(Profiled(number=self._asked.number, data=packed(self._spans.take(PIECE))))
            return True
        if not over or (self._kernels is not None and not self._kernels.done):
            return True
        if self._kernels is not None:
            for span in self._kernels.spans:
                self._spans.put(span)
            self._notes += self._kernels.notes
            self._kernels = None
            return True
        self._outbox.put(
            Profiled(
                number=self._asked.number,
                data=packed(self._spans.take(PIECE)),
                left_out=self._spans.left_out,
                notes=tuple(self._notes),
                last=True,
            )
        )
        return False

    def close(self) -> None:
        """Stop recording without sending the rest. Safe to call twice."""
        if self._watching:
            self._stop()

    def _stop(self) -> None:
        self._watching = False
        self._real.begins = nobody
        if self._ops is not None:
            self._ops.close()
        if self._kernels is not None:
            self._kernels.stop()

    def _step_ended(self) -> None:
        """Called after each step; on a CPU in the thread that ran it."""
        self._parts.begins("")
        if self._ops is not None and self._watching:
            times, missed = self._ops.taken()
            self._spans.left_out += missed
            for op in times:
                self._spans.add("kernels", op.name, op.began_ns, op.ended_ns)


class ProfileService(Service):
    """Records profiles on request, one at a time: a new request ends the one before."""

    def __init__(self, planner: Plans, runner: StepLauncher, outbox: Outbox, clock: Callable[[], int]) -> None:
        """clock: as in `ProfileRecording`."""
        self._planner, self._runner, self._outbox, self._clock = planner, runner, outbox, clock
        self._current: ProfileRecording | None = None

    def hear(self, message: Wire) -> list[Delta] | None:
        if not isinstance(message, Profile):
            return None
        self.stop()
        self._current = ProfileRecording(message, self._planner, self._runner, self._outbox, self._clock)
        return []

    def due_in(self) -> float | None:
        return None if self._current is None else self._current.due_in()

    def watched(self, planner: Plans, launcher: StepLauncher) -> tuple[Plans, StepLauncher]:
        return (planner, launcher) if self._current is None else (self._current.planner, self._current.runner)

    def work(self) -> None:
        if self._current is not None and not self._current.work():
            self._current = None

    def stop(self) -> None:
        if self._current is not None:
            self._current.close()


class _Parts:
    """Records the parts of steps, each from its beginning to the beginning of the next one."""

    def __init__(self, spans: SpanBuffer, clock: Callable[[], int]) -> None:
        self._spans, self._clock = spans, clock
        self._name, self._began = "", 0

    def begins(self, name: str) -> None:
        now = self._clock()
        if self._name:
            self._spans.add("runner", self._name, self._began, now)
        self._name, self._began = name, now


class _WatchedPlanner:
    def __init__(self, planner: Plans, spans: SpanBuffer, clock: Callable[[], int]) -> None:
        self._planner, self._spans, self._clock = planner, spans, clock

    @property
    def ahead(self) -> bool:
        return self._planner.ahead

    def report(self, recorded: CapturedShapes) -> None:
        self._planner.report(recorded)

    def next_step(self) -> Step | None:
        began = self._clock()
        step = self._planner.next_step()
        if step is not None:
            self._spans.add("planner", "next_step", began, self._clock(), step=step.number)
        return step

    def settle(self, step: Step, result: StepResult, seconds: float | None = None) -> list[Delta]:
        began = self._clock()
        deltas = self._planner.settle(step, result, seconds)
        self._spans.add("planner", "settle", began, self._clock(), step=step.number, deltas=len(deltas))
        return deltas


class _WatchedRunner:
    def __init__(
        self, runner: StepLauncher, spans: SpanBuffer, clock: Callable[[], int], step_ended: Callable[[], object]
    ) -> None:
        self._runner, self._spans, self._clock, self._step_ended = runner, spans, clock, step_ended
        self._last_ended = 0
        self.begins = runner.begins

    @property
    def recorded(self) -> CapturedShapes:
        return self._runner.recorded

    def record_more(self) -> bool:
        return self._runner.record_more()

    def launch(self, step: Step) -> Pending:
        began = self._clock()
        pending = self._runner.launch(step)
        ended = self._clock()
        self._spans.add("loop", "launch", began, ended, step=step.number)
        return _WatchedStep(step, pending, began, self)

    def wait(self, step: Step, pending: Pending, launched: int) -> StepResult:
        began = self._clock()
        try:
            return pending.wait()
        finally:
            ended = self._clock()
            self._step_ended()
            self._spans.add("loop", "wait", began, ended, step=step.number)
            # A device runs one step after another, even if they are launched earlier.
            self._spans.add(
                "steps", f"step {step.number}", max(launched, self._last_ended), ended, **_facts(step),
                launched_before_ms=round(max(0, self._last_ended - launched) / 1e6, 3),
                waited_ms=round((ended - began) / 1e6, 3),
            )  # fmt: skip
            self._last_ended = ended


class _WatchedStep:
    def __init__(self, step: Step, pending: Pending, launched: int, runner: _WatchedRunner) -> None:
        self._step, self._pending, self._launched, self._runner = step, pending, launched, runner

    def watch(self, meanwhile: Meanwhile) -> None:
        self._pending.watch(meanwhile)

    def wait(self) -> StepResult:
        return self._runner.wait(self._step, self._pending, self._launched)


def _facts(step: Step) -> dict[str, int | str]:
    prompts = [row for row in step.rows if row.start is not None]
    shape = step.shape
    return {
        "rows": len(step.rows),
        "positions": sum(row.count for row in step.rows),
        "drafts": sum(row.drafts for row in step.rows),
        "begins": len(step.begins),
        "prompts": len(prompts),
        "prompt_positions": sum(row.count for row in prompts),
        "shape": "none" if shape is None else f"{shape.rows} x {shape.positions}, to {shape.longest:,}",
    }
