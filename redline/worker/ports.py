"""What the loop asks of a planner and of a runner: a real one, a test's, or one whose calls are written down."""

from collections.abc import Callable
from typing import Protocol

from redline.run.runner import Pending
from redline.wire.delta import Delta
from redline.wire.step import Recorded, Step, StepResult


class Plans(Protocol):
    """Plans steps and settles them, in the same order."""

    @property
    def ahead(self) -> bool:
        """Whether a step may be planned while another is not settled."""
        ...

    def report(self, recorded: Recorded) -> None:
        """Takes in which shapes of decode steps can be replayed from now on."""
        ...

    def next_step(self) -> Step | None:
        """The next step to launch; None when nothing can be planned now."""
        ...

    def settle(self, step: Step, result: StepResult, seconds: float | None = None) -> list[Delta]:
        """Takes in what a step gave, and how long it took: the deltas of its jobs."""
        ...


class Runner(Protocol):
    """Runs steps, one after another, in the order of their launches."""

    begins: Callable[[str], object]
    """Told of each part of a step as it begins, by the thread that runs it; "" where the step's work ends."""

    @property
    def recorded(self) -> Recorded:
        """The shapes of decode steps that it can replay now."""
        ...

    def record_more(self) -> bool:
        """Records one more shape; false where none is left. Raises a device's own error."""
        ...

    def launch(self, step: Step) -> Pending:
        """Starts a step and returns, on a GPU at once; `wait` gives what came of it. Raises where it cannot begin."""
        ...
