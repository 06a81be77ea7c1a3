"""One iteration of the worker's loop: launch the next step, then settle the last one while the device runs.

An error in one job ends that job; an error in one step ends the jobs of that step. After a device error, or after
several failed steps in a row, no further step is tried (`WorkerLost`).
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from redline import clock
from redline.errors import WorkerLost
from redline.kernels.cuda.faults import is_device_error
from redline.messages.delta import Delta
from redline.messages.step import RowResult, Step, StepResult
from redline.run.layer_marks import Meanwhile
from redline.run.pending import Pending
from redline.worker.ports import Plans, StepLauncher

MOST_FAILURES = 3  # number of consecutive failed steps after which the worker ends

_log = logging.getLogger(__name__)


class StepInFlight(NamedTuple):
    """A step that was launched, or failed to launch, and is not settled yet."""

    step: Step
    pending: Pending
    begun: float  # the later of its launch and the end of the previous step, in seconds (time.monotonic)

    @property
    def launched(self) -> bool:
        """Whether the launcher could launch the step."""
        return not isinstance(self.pending, _NotLaunched)


class EndedStep(NamedTuple):
    """A step that has run or failed; if it failed, each row of its result has an error."""

    result: StepResult
    at: float  # when it ended, in seconds (time.monotonic)
    error: Exception | None  # why the step failed; None: it succeeded


class Failures:
    """Counts consecutive failed steps."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def count(self, ended: EndedStep) -> None:
        """Raises WorkerLost, with one line for the operator, if no further step should be tried."""
        error = ended.error
        if isinstance(error, WorkerLost):
            raise error
        self._in_a_row = self._in_a_row + 1 if error else 0
        if is_device_error(error):
            raise WorkerLost(f"device error: {one_line(error)}") from error
        if self._in_a_row == MOST_FAILURES:
            raise WorkerLost(f"{MOST_FAILURES} steps in a row failed, the last one with {one_line(error)}") from error


def one_line(error: BaseException | None) -> str:
    """Formats an error for a log line: the name of its class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def turn(
    planner: Plans,
    launcher: StepLauncher,
    last: StepInFlight | None,
    failures: Failures | None = None,
    meanwhile: Callable[[], Meanwhile | None] = lambda: None,
) -> tuple[StepInFlight | None, list[Delta]]:
    """One iteration: launches the next step, then settles the last one while the device runs. If the planner does not
    schedule ahead, it settles the step that it has just launched. -> the step in flight, and the deltas.

    Raises WorkerLost, without settling the step, if no further step should be tried; `failures` counts over iterations.
    meanwhile: called before waiting for a step; returns a callback to run while the step runs, or None.
    """
    planner.report(launcher.recorded)
    # After a failed launch no step is launched: the jobs of the failed step never began, and have to end first.
    step = planner.next_step() if last is None or last.launched else None
    in_flight = StepInFlight(step, _launch(launcher, step), clock.monotonic()) if step else None
    if last is None and not planner.ahead:
        last, in_flight = in_flight, None
    if last is None:
        return in_flight, []
    if (watching := meanwhile()) is not None:
        last.pending.watch(watching)
    ended = wait(last)
    (failures or Failures()).count(ended)
    seconds = None if ended.error else ended.at - last.begun
    deltas = planner.settle(last.step, ended.result, seconds)
    return in_flight and in_flight._replace(begun=ended.at), deltas


class _NotLaunched(NamedTuple):
    """The result of a step that failed to launch; it is settled in order, like any other step."""

    error: Exception

    def watch(self, meanwhile: Meanwhile) -> None:
        """Does nothing, since the step does not run."""

    def wait(self) -> StepResult:
        raise self.error


def _launch(launcher: StepLauncher, step: Step) -> Pending:
    try:
        return launcher.launch(step)
    except Exception as error:
        return _NotLaunched(error)


def wait(in_flight: StepInFlight) -> EndedStep:
    """Waits for a step. If it failed, each row of the result has an error."""
    try:
        return EndedStep(in_flight.pending.wait(), clock.monotonic(), None)
    except Exception as error:
        what = "failed" if in_flight.launched else "could not be launched"
        _log.error("step %d %s: %s", in_flight.step.number, what, one_line(error))
        _log.info("step %d %s", in_flight.step.number, what, exc_info=error)
        rows = (RowResult(error=f"the step {what}: {error}"),) * len(in_flight.step.rows)
        return EndedStep(StepResult(number=in_flight.step.number, rows=rows, failed=True), clock.monotonic(), error)
