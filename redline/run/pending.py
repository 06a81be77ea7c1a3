"""Launched steps, as the caller of a runner sees them: each is waited for once, in the order of the launches."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from redline.errors import RankLost
from redline.kernels.group import Group
from redline.messages.step import Step, StepResult
from redline.run.layer_marks import LayerMarks, Meanwhile

WaitForStep = Callable[[], StepResult]
"""Waits for the device if the step is still running; returns the step's result."""


class Pending(Protocol):
    """A launched step."""

    def watch(self, meanwhile: Meanwhile) -> None:
        """Calls `meanwhile` repeatedly until all layers of the step's prompts are computed; not at all if this
        runner does not report progress. Errors of the step are left for `wait` to raise."""
        ...

    def wait(self) -> StepResult:
        """Blocks until the step has run. Re-raises the step's exception."""
        ...


class LaunchedStep:
    """A step that the runner's thread will run. `wait` re-raises the step's exception."""

    def __init__(self, future: Future[WaitForStep], group: Group, marks: LayerMarks | None = None) -> None:
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


class QueuedStep:
    """A step that runs in the thread that waits for it, after all steps launched before it."""

    def __init__(self, step: Step, run: Callable[[Step], StepResult], queued: "deque[QueuedStep]") -> None:
        self._step = step
        self._run = run
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
            self._ran = self._run(self._step)
        except Exception as error:
            self._ran = error
