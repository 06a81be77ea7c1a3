"""The interfaces of planner and runner that the loop uses; real, fake (tests) and profiled ones implement them."""

from collections.abc import Callable
from typing import Protocol

from redline.messages.delta import Delta
from redline.messages.step import CapturedShapes, Step, StepResult
from redline.run.pending import Pending


class Plans(Protocol):
    """A scheduler: plans steps and settles them, in the same order."""

    @property
    def ahead(self) -> bool:
        """Whether a step may be planned before the previous one is settled."""
        ...

    def report(self, recorded: CapturedShapes) -> None:
        """Updates the list of captured CUDA graphs that decode steps can use from now on."""
        ...

    def next_step(self) -> Step | None:
        """The next step to launch; None if nothing can be scheduled now."""
        ...

    def settle(self, step: Step, result: StepResult, seconds: float | None = None) -> list[Delta]:
        """Processes a step's result. seconds: the step's time. -> the deltas of its jobs."""
        ...


class StepLauncher(Protocol):
    """Runs steps, one after another, in the order of their launches."""

    begins: Callable[[str], object]
    """Callback for each part of a step as it begins, in the thread that runs it; "" at the end of the step's work."""

    @property
    def recorded(self) -> CapturedShapes:
        """The shapes of decode steps for which CUDA graphs are captured."""
        ...

    def record_more(self) -> bool:
        """Captures one more CUDA graph; False if none is left. Raises a device's own error."""
        ...

    def launch(self, step: Step) -> Pending:
        """Starts a step; on a GPU it returns immediately. The result's `wait` returns the step's result. Raises if the
        step cannot be started."""
        ...
