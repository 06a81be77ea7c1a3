"""The worker's loop: it receives messages, runs one iteration (`turn`), and sends what comes of it.

After a device error or several failed steps in a row the worker ends: each of its jobs gets an error, and the
supervisor can restart the worker. Everything that a worker does besides steps is a `Service`.
"""

import functools
import logging
from collections.abc import Callable, Sequence

from redline import clock
from redline.errors import WorkerLost
from redline.messages.channel import Inbox, Outbox
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.handoff import ChunkAck, Prefill, PullRequest
from redline.messages.job import Abort, Job
from redline.messages.news import Load, Missed, Ping, Recall, RoleTaken, Stop, TakeRole
from redline.messages.replicas import Replicas
from redline.run.layer_marks import Meanwhile
from redline.scheduler.planner import Planner
from redline.worker.delta_router import DeltaRouter
from redline.worker.heartbeat import LoopStatus
from redline.worker.ports import Plans, StepLauncher
from redline.worker.service import Service
from redline.worker.turn import Failures, StepInFlight, one_line, turn, wait

LOAD_INTERVAL_S = 0.2  # least time, in seconds, between two `Load` messages
COMPILES_S = 0.002  # polling interval, in seconds, of a grammar that is being compiled while the loop is idle
WATCH_S = 0.001  # polling interval, in seconds, of a step with prompts that are sent while they are computed

_log = logging.getLogger(__name__)


def lead(
    planner: Planner,
    launcher: StepLauncher,
    inbox: Inbox,
    outbox: Outbox,
    services: Sequence[Service] = (),
    *,
    pulse: LoopStatus | None = None,
    record: bool = True,
) -> None:
    """Serves jobs until a Stop arrives; then aborts every job, and checks that all pages and slots are free.

    outbox: a `DeltaRouter` if several API replicas may send jobs. record: whether the launcher captures CUDA graphs
    while it is idle, one at a time: a new job waits for at most one capture. The loop does the same in every role.

    Sends each delta immediately, and a `Load` when it differs from the last one, at most every LOAD_INTERVAL_S seconds.
    Raises WorkerLost after a device error or several failed steps in a row, once an error was sent for every job.
    """
    router = outbox if isinstance(outbox, DeltaRouter) else DeltaRouter(outbox)
    WorkerLoop(planner, launcher, inbox, router, services, pulse or LoopStatus(), record=record).run()


class WorkerLoop:
    """The state of a loop between two iterations. `lead` has the parameters' meanings."""

    def __init__(
        self,
        planner: Planner,
        launcher: StepLauncher,
        inbox: Inbox,
        router: DeltaRouter,
        services: Sequence[Service],
        pulse: LoopStatus,
        *,
        record: bool,
    ) -> None:
        self._planner, self._launcher = planner, launcher
        self._inbox, self._router = inbox, router
        self._services, self._pulse, self._record = services, pulse, record
        self._loads = _Loads(planner, services, router, clock.monotonic)
        self._last: StepInFlight | None = None
        self._proven = False  # whether the planner's state was checked since it became idle
        self._before: tuple[int, ...] | None = None  # `_done` before the last iteration
        self._held: list[Wire] = []  # messages received while a step ran, for the next iteration

    def run(self) -> None:
        """Iterates until a Stop arrives."""
        failures = Failures()
        while True:
            for message in self._messages():
                if isinstance(message, Stop):
                    self._stop()
                    return
                self._send(self._receive(message))
            self._before = self._done()
            try:
                deltas = self._turn(failures)
            except WorkerLost as error:
                self._send(self._planner.lose_all(str(error)))
                raise
            self._send(deltas)
            for service in self._services:
                service.work()
            if self._loads.due_in() == 0:
                self._loads.send()

    def _messages(self) -> list[Wire]:
        """The messages to process next; waits for some if there is nothing else to do."""
        planner, pulse = self._planner, self._pulse
        idle = self._last is None and planner.idle and all(service.idle for service in self._services)
        pulse.waits = idle
        messages = self._prove() if idle and not self._proven and not self._held else []
        self._proven = idle and not messages
        messages, self._held = [*self._held, *messages] or self._inbox.drain(wait=False), []
        if idle and not messages and not (self._record and self._record_more()):
            messages = self._inbox.drain(wait=True, timeout=self._sooner(self._loads.due_in()))
        elif (
            not idle  # an idle worker gets here after it has captured a graph: there may be more, and a load to send
            and self._last is None
            and not messages
            and self._before == self._done()
        ):
            pulse.waits = True  # for another worker, for pages, or for a grammar: there is nothing to schedule
            due_in = self._sooner(COMPILES_S if planner.compiling else None)
            messages = self._inbox.drain(wait=True, timeout=due_in)
        pulse.turns, pulse.waits = pulse.turns + 1, False
        return messages

    def _sooner(self, seconds: float | None) -> float | None:
        """Seconds that the loop may wait for messages, at most `seconds`; None: without a timeout."""
        waits = [seconds, *(service.due_in() for service in self._services)]
        return min((each for each in waits if each is not None), default=None)

    def _done(self) -> tuple[int, ...]:
        """Counters that change whenever the planner has done something or its state was changed."""
        return *self._planner.done, *(service.changes for service in self._services)

    def _receive(self, message: Wire) -> list[Delta]:
        """Processes a message. -> the deltas to send."""
        planner, router = self._planner, self._router
        match message:
            case Job():
                return self._submit(message) if router.takes(message) else []
            case Abort():
                for service in self._services:
                    service.abort(message.job)
                return planner.abort(message.job)
            case Ping():
                self._pulse.knocks[message.replica] = message.number
                router.put_to(message.replica, message)
            case Missed() if (replica := router.whose(message.writer)) is not None:  # its jobs and aborts alone
                router.put_to(replica, message)
                self._forget(replica)
            case Missed():  # the lost messages may include an abort, a job, or a message of another worker
                router.put(message)
                for service in self._services:
                    service.abort_all()
                self._end_unheard(planner.abort_all())
            case Replicas():
                come, gone = router.follow(message.replicas)
                for replica in gone:
                    self._forget(replica)
                self._pulse.replicas = message.replicas
                if come:
                    self._recall()
            case Recall():
                self._recall()
            case TakeRole(role=role):
                self._heard(message)
                router.put(RoleTaken(role=role))
            case Prefill() if message.job.replica not in router:  # its replica has gone
                pass
            case _:
                deltas = self._heard(message)
                assert deltas is not None, f"unexpected message for a worker: {message}"
                return deltas
        return []

    def _heard(self, message: Wire) -> list[Delta] | None:
        """Offers a message to the services. -> the deltas to send; None: no service has processed it."""
        for service in self._services:
            if (deltas := service.hear(message)) is not None:
                return deltas
        return None

    def _submit(self, job: Job) -> list[Delta]:
        try:
            deltas = self._heard(job)
            return self._planner.submit(job) if deltas is None else deltas
        except Exception as error:
            _log.error("job %s could not be submitted: %s", job.id, one_line(error))
            _log.info("job %s", job.id, exc_info=error)
            return [Delta(job=job.id, finish="error", error=f"the job could not be submitted: {error}", fault="failed")]

    def _recall(self) -> None:
        for service in self._services:
            service.recall()

    def _turn(self, failures: Failures) -> list[Delta]:
        """Launches a step and settles the last one. -> the deltas to send."""
        plans: Plans = self._planner
        launcher = self._launcher
        for service in self._services:
            plans, launcher = service.watched(plans, launcher)
        self._last, deltas = turn(plans, launcher, self._last, failures, self._departing)
        for service in self._services:
            deltas = service.settled(deltas)
        return deltas

    def _departing(self) -> Meanwhile | None:
        """The callback while a step runs: sends computed layers of prompts, and receives the messages of readers."""
        leaving = [service for service in self._services if service.leaves]
        return functools.partial(self._depart, leaving) if leaving else None

    def _depart(self, leaving: Sequence[Service], layers: int) -> None:
        for service in leaving:
            service.depart(layers)
        for message in self._inbox.drain(wait=True, timeout=WATCH_S):
            if isinstance(message, PullRequest | ChunkAck):
                self._heard(message)
            else:
                self._held.append(message)

    def _prove(self) -> list[Wire]:
        """Checks that the planner's state is consistent. Messages that arrive interrupt the check and are returned."""
        for _ in self._planner.checks():
            if messages := self._inbox.drain(wait=False):
                return messages
        return []

    def _record_more(self) -> bool:
        """Captures one more CUDA graph while there are no jobs; False if none is left. Raises WorkerLost."""
        self._pulse.waits = False
        try:
            return self._launcher.record_more()
        except WorkerLost:
            raise
        except Exception as error:
            raise WorkerLost(f"a CUDA graph could not be captured: {one_line(error)}") from error
        finally:
            self._pulse.waits = True

    def _forget(self, replica: str) -> None:
        """Aborts the jobs of one API replica without notifying it: the replica resumes them elsewhere, or is down."""
        kept = [id for service in self._services for id in service.jobs_of(replica)]
        for id in self._router.jobs_of(replica) + kept:
            for service in self._services:
                service.abort(id)
            self._end_unheard(self._planner.abort(id))
            self._router.forget(id)

    def _end_unheard(self, deltas: Sequence[Delta]) -> None:
        """Passes the last deltas of jobs to the services only."""
        for delta in deltas:
            self._router.forget(delta.job)
        for service in self._services:
            service.sending(deltas)

    def _send(self, deltas: Sequence[Delta]) -> None:
        """Sends deltas. A delta that is too large for a message ends its job with an error of the server, since the
        server is responsible for bounding its messages."""
        while deltas:
            for service in self._services:
                service.sending(deltas)
            refused = self._router.put_deltas(deltas)
            for delta, _ in refused:
                self._planner.abort(delta.job)
            deltas = [Delta(job=one.job, finish="error", error=str(error), fault="failed") for one, error in refused]

    def _stop(self) -> None:
        self._send(self._planner.abort_all())
        if self._last is not None:
            self._send(self._planner.settle(self._last.step, wait(self._last).result))
        self._planner.check()
        for service in self._services:
            service.stop()
        self._loads.send()


class _Loads:
    """Sends the planner's load when it has changed, at most every LOAD_INTERVAL_S seconds."""

    def __init__(
        self, planner: Planner, services: Sequence[Service], outbox: Outbox, clock: Callable[[], float]
    ) -> None:
        self._planner = planner
        self._services = services
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
        for service in self._services:
            load = service.load(load)
        return load

    def send(self) -> None:
        load = self._load()
        if load != self._sent:
            self._outbox.put(load)
            self._sent = load
        self._next = self._clock() + LOAD_INTERVAL_S
