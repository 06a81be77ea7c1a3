"""The only loop in the system: plan and launch the next step, then settle the last one while the machine works.

What goes wrong in one job ends that job; what goes wrong in one step ends the jobs of that step. The loop goes on.
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from redline.errors import MessageTooLarge
from redline.plan.planner import Planner
from redline.wire.channel import Inbox, Outbox
from redline.wire.codec import Wire
from redline.wire.delta import Delta
from redline.wire.job import Abort, Job
from redline.wire.news import Load, Stop
from redline.wire.step import RowResult, Step, StepResult
from redline.worker.trace import Trace

LOAD_INTERVAL_S = 0.2

_log = logging.getLogger(__name__)


class Pending(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Blocks until the step has run."""
        ...


class Runner(Protocol):
    """Runs steps, one after another, in the order of their launches."""

    def launch(self, step: Step) -> Pending:
        """Returns at once; `wait` gives the tokens."""
        ...


class Flight(NamedTuple):
    step: Step
    pending: Pending
    begun: float  # the machine's clock could start: the step was launched, and the one before had ended


class Landing(NamedTuple):
    result: StepResult
    at: float
    failed: bool


def turn(planner: Planner, runner: Runner, last: Flight | None) -> tuple[Flight | None, list[Delta]]:
    """Launches the next step, then settles the last one while the machine works; where nothing is planned ahead, the
    one that it has launched."""
    step = planner.next_step()
    flight = Flight(step, _launch(runner, step), time.monotonic()) if step else None
    if last is None and not planner.ahead:
        last, flight = flight, None
    if last is None:
        return flight, []
    landing = _wait(last)
    seconds = None if landing.failed else landing.at - last.begun
    deltas = planner.settle(last.step, landing.result, seconds)
    return flight and flight._replace(begun=landing.at), deltas


def lead(planner: Planner, runner: Runner, inbox: Inbox, outbox: Outbox, trace: Trace | None = None) -> None:
    """Serves jobs until a Stop comes; then every job is aborted, and every page and slot proven to be back.

    Sends deltas as they come, and a Load when one differs from the last, at most every LOAD_INTERVAL_S. A trace is told
    of every job and delta.
    """
    if trace is not None:
        outbox = _Traced(outbox, trace)
    last: Flight | None = None
    loads = _Loads(planner, outbox, time.monotonic)
    while True:
        idle = last is None and planner.idle
        if idle:
            planner.check()
        for message in inbox.drain(wait=idle, timeout=loads.due_in() if idle else None):
            match message:
                case Job():
                    if trace is not None:
                        trace.submit(message)
                    deltas = _submit(planner, message)
                case Abort():
                    deltas = planner.abort(message.job)
                case Stop():
                    _stop(planner, last, outbox)
                    loads.send()
                    return
                case _:
                    raise AssertionError(f"a worker is sent jobs, aborts and a stop, not {message}")
            _put_all(planner, outbox, deltas)
        last, deltas = turn(planner, runner, last)
        _put_all(planner, outbox, deltas)
        if loads.due_in() == 0:
            loads.send()


class _Traced(NamedTuple):
    """An outbox whose deltas a trace hears too."""

    outbox: Outbox
    trace: Trace

    def put(self, message: Wire) -> None:
        if isinstance(message, Delta):
            self.trace.told(message)
        self.outbox.put(message)


class _Loads:
    """Sends the planner's load when it has changed, but not too often."""

    def __init__(self, planner: Planner, outbox: Outbox, clock: Callable[[], float]) -> None:
        self._planner = planner
        self._outbox = outbox
        self._clock = clock
        self._sent: Load | None = None
        self._next = clock()

    def due_in(self) -> float | None:
        """Seconds until the load is to be looked at again; None: there is nothing new to say."""
        left = self._next - self._clock()
        if left > 0:
            return left
        return 0.0 if self._planner.load() != self._sent else None

    def send(self) -> None:
        load = self._planner.load()
        if load != self._sent:
            self._outbox.put(load)
            self._sent = load
        self._next = self._clock() + LOAD_INTERVAL_S


class _NotLaunched(Exception):
    """The launch failed; said when the step's turn to be settled has come."""


class _Broken(NamedTuple):
    """A step that could not be launched: it takes its turn in the order of settling."""

    reason: str

    def wait(self) -> StepResult:
        raise _NotLaunched(self.reason)


def _launch(runner: Runner, step: Step) -> Pending:
    try:
        return runner.launch(step)
    except Exception as error:
        _log.exception("step %d could not be launched", step.number)
        return _Broken(f"the step could not be launched: {error}")


def _wait(flight: Flight) -> Landing:
    """A step that failed gives an error to each of its rows."""
    try:
        return Landing(flight.pending.wait(), time.monotonic(), failed=False)
    except _NotLaunched as error:
        reason = str(error)
    except Exception as error:
        _log.exception("step %d failed", flight.step.number)
        reason = f"the step failed: {error}"
    rows = (RowResult(error=reason),) * len(flight.step.rows)
    return Landing(StepResult(number=flight.step.number, rows=rows), time.monotonic(), failed=True)


def _submit(planner: Planner, job: Job) -> list[Delta]:
    try:
        return planner.submit(job)
    except Exception as error:
        _log.exception("job %s could not be submitted", job.id)
        return [Delta(job=job.id, finish="error", error=f"the job could not be submitted: {error}")]


def _stop(planner: Planner, last: Flight | None, outbox: Outbox) -> None:
    _put_all(planner, outbox, planner.abort_all())
    if last is not None:
        _put_all(planner, outbox, planner.settle(last.step, _wait(last).result))
    planner.check()


def _put_all(planner: Planner, outbox: Outbox, deltas: list[Delta]) -> None:
    """A delta that is too large to travel ends its job."""
    for delta in deltas:
        try:
            outbox.put(delta)
        except MessageTooLarge as error:
            planner.abort(delta.job)
            outbox.put(Delta(job=delta.job, finish="error", error=str(error)))
