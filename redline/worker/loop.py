"""The worker's scheduling loop: schedule and launch the next step, then settle the last one while the device runs.

An error in one job ends that job; an error in one step ends the jobs of that step, and the loop continues. After a
device error, or after several failed steps in a row, the worker ends: each of its jobs gets an error, and the
supervisor can restart the worker.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from redline import clock
from redline.errors import MessageTooLarge, WorkerLost
from redline.kernels.hopper.faults import is_device_error
from redline.messages.channel import Inbox, Outbox
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.handoff import (
    ChunkAck,
    ChunkReady,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PullRequest,
    Queued,
    WorkerDown,
)
from redline.messages.job import Abort, Job
from redline.messages.news import Load, Missed, Ping, Recall, Role, RoleTaken, Stop, TakeRole
from redline.messages.profile import Profile
from redline.messages.replicas import Replicas
from redline.messages.step import RowResult, Step, StepResult
from redline.run.layer_marks import Meanwhile
from redline.run.runner import Pending
from redline.scheduler.planner import Planner
from redline.worker.delta_router import DeltaRouter
from redline.worker.heartbeat import LoopStatus
from redline.worker.kv_transfer import KvTransferManager
from redline.worker.page_events import PageEvents
from redline.worker.ports import Plans, Runner
from redline.worker.profile import Profiling
from redline.worker.tiers import Tiers
from redline.worker.trace import Trace

LOAD_INTERVAL_S = 0.2  # least time, in seconds, between two `Load` messages
COMPILES_S = 0.002  # polling interval, in seconds, of a grammar that is being compiled while the loop is idle
WATCH_S = 0.001  # polling interval, in seconds, of a step with prompts that are sent while they are computed
MOST_FAILURES = 3  # number of consecutive failed steps after which the worker ends

_log = logging.getLogger(__name__)


class StepInFlight(NamedTuple):
    """A step that was launched, or failed to launch, and is not settled yet."""

    step: Step
    pending: Pending
    begun: float  # the later of its launch and the end of the previous step, in seconds (time.monotonic)

    @property
    def launched(self) -> bool:
        """Whether the runner could launch the step."""
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
    runner: Runner,
    last: StepInFlight | None,
    failures: Failures | None = None,
    meanwhile: Callable[[], Meanwhile | None] = lambda: None,
) -> tuple[StepInFlight | None, list[Delta]]:
    """One iteration: launches the next step, then settles the last one while the device runs. If the planner does not
    schedule ahead, it settles the step that it has just launched. -> the step in flight, and the deltas.

    Raises WorkerLost, without settling the step, if no further step should be tried; `failures` counts over iterations.
    meanwhile: called before waiting for a step; returns a callback to run while the step runs, or None.
    """
    planner.report(runner.recorded)
    # After a failed launch no step is launched: the jobs of the failed step never began, and have to end first.
    step = planner.next_step() if last is None or last.launched else None
    in_flight = StepInFlight(step, _launch(runner, step), clock.monotonic()) if step else None
    if last is None and not planner.ahead:
        last, in_flight = in_flight, None
    if last is None:
        return in_flight, []
    if (watching := meanwhile()) is not None:
        last.pending.watch(watching)
    ended = _wait(last)
    (failures or Failures()).count(ended)
    seconds = None if ended.error else ended.at - last.begun
    deltas = planner.settle(last.step, ended.result, seconds)
    return in_flight and in_flight._replace(begun=ended.at), deltas


def lead(
    planner: Planner,
    runner: Runner,
    inbox: Inbox,
    outbox: Outbox,
    trace: Trace | None = None,
    pulse: LoopStatus | None = None,
    exchange: KvTransferManager | None = None,
    tiers: Tiers | None = None,
    events: PageEvents | None = None,
    *,
    record: bool = True,
    tells_cache: bool = False,
    takes_role: Callable[[Role], object] = lambda _: None,
) -> None:
    """Serves jobs until a Stop arrives; then aborts every job, and checks that all pages and slots are free.

    outbox: a `DeltaRouter` if several API replicas may send jobs. exchange: manager of KV transfers; None disables
    them. tiers: KV offload to host memory and disk; None: no offload. events: publishes KV cache events as vLLM does.
    record: whether the runner captures CUDA graphs while it is idle, one at a time: a new job waits for at most one
    capture. tells_cache: whether changes of the prefix cache are reported to the API. takes_role: called with the new
    role after a role switch; the loop itself does the same in every role.

    Sends each delta immediately, and a `Load` when it differs from the last one, at most every LOAD_INTERVAL_S seconds.
    The trace records every job and delta. Raises WorkerLost after a device error or MOST_FAILURES failed steps in a
    row, once an error was sent for every job.
    """
    pulse, failures = pulse or LoopStatus(), Failures()
    if events is not None:
        planner.log_pages()
    hearers = outbox = outbox if isinstance(outbox, DeltaRouter) else DeltaRouter(outbox)
    if trace is not None:
        outbox = _Traced(outbox, trace)
    last: StepInFlight | None = None
    others = [one for one in (exchange, tiers) if one is not None]  # work in progress apart from steps
    loads = _Loads(planner, exchange, tiers, outbox, clock.monotonic)
    profiling: Profiling | None = None
    whole = False  # whether the next report of the prefix cache lists all of it
    proven = False
    before: tuple[int, ...] | None = None  # `_done` before the last iteration
    held: list[Wire] = []  # messages received while a step ran, for the next iteration

    def departing() -> Meanwhile | None:
        """The callback while a step runs: sends computed layers of prompts, and receives the messages of readers."""
        return None if exchange is None or not exchange.leaves else functools.partial(depart, exchange)

    def depart(exchange: KvTransferManager, layers: int) -> None:
        exchange.depart(layers)
        for message in inbox.drain(wait=True, timeout=WATCH_S):
            if isinstance(message, PullRequest | ChunkAck):
                exchange.hear(message)
            else:
                held.append(message)

    while True:
        idle = last is None and planner.idle and all(other.idle for other in others)
        pulse.waits = idle
        messages = _prove(planner, inbox) if idle and not proven and not held else []
        proven = idle and not messages
        messages, held = [*held, *messages] or inbox.drain(wait=False), []
        if idle and not messages and not (record and _record_more(runner, pulse)):
            messages = inbox.drain(wait=True, timeout=_sooner(loads.due_in(), profiling))
        elif (
            not idle  # an idle worker gets here after it has captured a graph: there may be more, and a load to send
            and (others or planner.compiling)
            and last is None
            and not messages
            and before == _done(planner, others)
        ):
            pulse.waits = True  # for another worker, for pages, or for a grammar: there is nothing to schedule
            due_in = COMPILES_S if planner.compiling else _due_in(others)
            messages = inbox.drain(wait=True, timeout=_sooner(due_in, profiling))
        pulse.turns, pulse.waits = pulse.turns + 1, False
        for message in messages:
            match message:
                case Job():
                    deltas = []
                    if hearers.takes(message):
                        if trace is not None:
                            trace.submit(message)
                        deltas = _submit(planner, message, exchange)
                case Abort():
                    if exchange is not None:
                        exchange.abort(message.job)
                    deltas = planner.abort(message.job)
                case (
                    Prefill()
                    | Queued()
                    | PrefillStarted()
                    | PullRequest()
                    | ChunkReady()
                    | ChunkAck()
                    | PrefillDone()
                    | WorkerDown()
                ) if exchange is not None:
                    deltas = []
                    if isinstance(message, Prefill):
                        deltas = exchange.prefill(message) if message.job.replica in hearers else []
                    else:
                        exchange.hear(message)
                case Ping():
                    deltas, pulse.knocks[message.replica] = [], message.number
                    hearers.put_to(message.replica, message)
                case Missed() if (replica := hearers.whose(message.writer)) is not None:  # its jobs and aborts alone
                    hearers.put_to(replica, message)
                    _forget(replica, planner, exchange, hearers, trace)
                    deltas = []
                case Missed():  # the lost messages may include an abort, a job, or a message of another worker
                    outbox.put(message)
                    if exchange is not None:
                        exchange.abort_all()
                    _end_unheard(planner.abort_all(), hearers, trace)
                    deltas = []
                case Replicas():
                    come, gone = hearers.follow(message.replicas)
                    for replica in gone:
                        _forget(replica, planner, exchange, hearers, trace)
                    pulse.replicas = message.replicas
                    whole, deltas = whole or bool(come), []
                case Recall():
                    whole, deltas = True, []
                case Profile():
                    deltas = []
                    if profiling is not None:
                        profiling.close()
                    profiling = Profiling(message, planner, runner, outbox, clock.monotonic_ns)
                case TakeRole(role=role):
                    takes_role(role)
                    outbox.put(RoleTaken(role=role))
                    deltas = []
                case Stop():
                    if profiling is not None:
                        profiling.close()
                    _stop(planner, last, outbox)
                    if tiers is not None:
                        tiers.close()
                    if events is not None:
                        events.close()
                    loads.send()
                    return
                case _:
                    raise AssertionError(f"unexpected message for a worker: {message}")
            _put_all(planner, outbox, deltas)
        before = _done(planner, others)
        try:
            if profiling is None:
                last, deltas = turn(planner, runner, last, failures, departing)
            else:
                last, deltas = turn(profiling.planner, profiling.runner, last, failures, departing)
            if exchange is not None:
                deltas = exchange.keep(deltas) + exchange.work()
        except WorkerLost as error:
            _put_all(planner, outbox, planner.lose_all(str(error)))
            raise
        _put_all(planner, outbox, deltas)
        if tiers is not None:
            tiers.work()
        if tells_cache and (news := planner.cached(whole=whole)) is not None:
            outbox.put(news)
            whole = False
        if events is not None:
            events.tell(planner.page_changes())
        if loads.due_in() == 0:
            loads.send()
        if profiling is not None and not profiling.work():
            profiling = None


def _sooner(seconds: float | None, profiling: Profiling | None) -> float | None:
    """Seconds that an idle loop may wait for messages; None: without a timeout."""
    if profiling is None:
        return seconds
    return profiling.due_in() if seconds is None else min(seconds, profiling.due_in())


class _Beside(Protocol):
    """A component that has work in progress apart from steps."""

    changes: int

    @property
    def idle(self) -> bool: ...

    def due_in(self) -> float | None: ...


def _done(planner: Planner, others: Sequence[_Beside]) -> tuple[int, ...]:
    """Counters that change whenever the planner has done something or its state was changed."""
    return *planner.done, *(other.changes for other in others)


def _due_in(others: Sequence[_Beside]) -> float | None:
    return min((due for other in others if (due := other.due_in()) is not None), default=None)


def _forget(
    replica: str, planner: Planner, exchange: KvTransferManager | None, hearers: DeltaRouter, trace: Trace | None
) -> None:
    """Aborts the jobs of one API replica without notifying it: the replica resumes them elsewhere, or is down."""
    for id in hearers.jobs_of(replica) + (exchange.computes_for(replica) if exchange is not None else []):
        if exchange is not None:
            exchange.abort(id)
        _end_unheard(planner.abort(id), hearers, trace)
        hearers.forget(id)


def _end_unheard(deltas: Sequence[Delta], hearers: DeltaRouter, trace: Trace | None) -> None:
    """Passes the last deltas of jobs to the trace only."""
    for delta in deltas:
        hearers.forget(delta.job)
        if trace is not None:
            trace.told(delta)


class _Traced(NamedTuple):
    """An outbox that also passes its deltas to a trace."""

    outbox: Outbox
    trace: Trace

    def put(self, message: Wire) -> None:
        if isinstance(message, Delta):
            self.trace.told(message)
        self.outbox.put(message)


class _Loads:
    """Sends the planner's load when it has changed, at most every LOAD_INTERVAL_S seconds."""

    def __init__(
        self,
        planner: Planner,
        exchange: KvTransferManager | None,
        tiers: Tiers | None,
        outbox: Outbox,
        clock: Callable[[], float],
    ) -> None:
        self._planner = planner
        self._exchange = exchange
        self._tiers = tiers
        self._outbox = outbox
        self._clock = clock
        self._sent: Load | None = None
        self._next = clock()

    def due_in(self) -> float | None:
        """Seconds until `send` should be called; None: the load has not changed."""
        left = self._next - self._clock()
        if left > 0:
            return left
        return 0.0 if self._load() != self._sent else None

    def _load(self) -> Load:
        load = self._planner.load()
        if self._exchange is not None:
            load = msgspec.structs.replace(
                load, handoffs=tuple(self._exchange.counts.items()), kv_chunks=self._exchange.chunks
            )
        if self._tiers is not None:
            load = msgspec.structs.replace(load, tiers=self._tiers.load())
        return load

    def send(self) -> None:
        load = self._load()
        if load != self._sent:
            self._outbox.put(load)
            self._sent = load
        self._next = self._clock() + LOAD_INTERVAL_S


class _NotLaunched(NamedTuple):
    """The result of a step that failed to launch; it is settled in order, like any other step."""

    error: Exception

    def watch(self, meanwhile: Meanwhile) -> None:
        """Does nothing, since the step does not run."""

    def wait(self) -> StepResult:
        raise self.error


def _launch(runner: Runner, step: Step) -> Pending:
    try:
        return runner.launch(step)
    except Exception as error:
        return _NotLaunched(error)


def _wait(in_flight: StepInFlight) -> EndedStep:
    """Waits for a step. If it failed, each row of the result has an error."""
    try:
        return EndedStep(in_flight.pending.wait(), clock.monotonic(), None)
    except Exception as error:
        what = "failed" if in_flight.launched else "could not be launched"
        _log.error("step %d %s: %s", in_flight.step.number, what, one_line(error))
        _log.info("step %d %s", in_flight.step.number, what, exc_info=error)
        rows = (RowResult(error=f"the step {what}: {error}"),) * len(in_flight.step.rows)
        return EndedStep(StepResult(number=in_flight.step.number, rows=rows), clock.monotonic(), error)


def _prove(planner: Planner, inbox: Inbox) -> list[Wire]:
    """Checks that the planner's state is consistent. Messages that arrive interrupt the check and are returned."""
    for _ in planner.checks():
        if messages := inbox.drain(wait=False):
            return messages
    return []


def _record_more(runner: Runner, pulse: LoopStatus) -> bool:
    """Captures one more CUDA graph while there are no jobs; False if none is left. Raises WorkerLost."""
    pulse.waits = False
    try:
        return runner.record_more()
    except WorkerLost:
        raise
    except Exception as error:
        raise WorkerLost(f"a CUDA graph could not be captured: {one_line(error)}") from error
    finally:
        pulse.waits = True


def _submit(planner: Planner, job: Job, exchange: KvTransferManager | None) -> list[Delta]:
    try:
        return planner.submit(job) if exchange is None or job.pages_from is None else exchange.expect(job)
    except Exception as error:
        _log.error("job %s could not be submitted: %s", job.id, one_line(error))
        _log.info("job %s", job.id, exc_info=error)
        return [Delta(job=job.id, finish="error", error=f"the job could not be submitted: {error}", fault="failed")]


def _stop(planner: Planner, last: StepInFlight | None, outbox: Outbox) -> None:
    _put_all(planner, outbox, planner.abort_all())
    if last is not None:
        _put_all(planner, outbox, planner.settle(last.step, _wait(last).result))
    planner.check()


def _put_all(planner: Planner, outbox: Outbox, deltas: list[Delta]) -> None:
    """Sends deltas. A delta that is too large for a message ends its job with an error of the server, since the server
    is responsible for bounding its messages."""
    for delta in deltas:
        try:
            outbox.put(delta)
        except MessageTooLarge as error:
            planner.abort(delta.job)
            outbox.put(Delta(job=delta.job, finish="error", error=str(error), fault="failed"))
