"""The workers through their starts: messages, heartbeats, role switches and failures.

One reader per worker passes its messages to `WorkerMonitor.receive`. Invariant: a worker that is down, or exceeds its
heartbeat timeout while another one responds, has no jobs, and the other workers are notified (`WorkerDown`).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from redline import clock
from redline.api.gateway.active_requests import ActiveRequests, JobState
from redline.api.gateway.dispatcher import Dispatcher
from redline.api.gateway.pictures import Pictures
from redline.api.http.stream_flusher import StreamFlusher
from redline.api.telemetry.metrics import Metrics
from redline.messages.channel import AsyncInbox, Outbox
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.handoff import WorkerDown
from redline.messages.media import ImageWanted
from redline.messages.news import Cached, Failed, Heartbeat, Load, Missed, Ping, Ready, Role, RoleTaken, TakeRole
from redline.messages.profile import Profiled
from redline.router.roles import STAY_S, is_done
from redline.router.worker_registry import WorkerHandle, WorkerRegistry

CHECK_S = 0.25  # seconds between two checks for workers without a heartbeat

log = logging.getLogger("redline.api")


class MessageRecorder(Protocol):
    """Receives worker messages while a profile is being recorded (`api.telemetry.profile`)."""

    def took(self, worker: WorkerHandle, messages: Sequence[Wire], began: float) -> None:
        """Called after a batch of worker messages was processed and written. began: start, by time.perf_counter."""
        ...

    def told(self, worker: WorkerHandle, message: Profiled) -> None:
        """Called with each Profiled message of a worker."""
        ...


class WorkerMonitor:
    """Follows the workers of `workers`. Everything runs in one event loop. `replica`: as in `Gateway`."""

    def __init__(
        self,
        workers: WorkerRegistry,
        requests: ActiveRequests,
        dispatcher: Dispatcher,
        flusher: StreamFlusher,
        metrics: Metrics,
        pictures: Pictures,
        clock: Callable[[], float],
        replica: str,
    ) -> None:
        self.workers = workers
        self._replica = replica
        self.recorder: MessageRecorder | None = None  # set while a profile is being recorded
        self.on_load: Callable[[str, Load], object] = lambda _worker, _load: None  # called with each Load message
        self._requests = requests
        self._dispatcher = dispatcher
        self._flusher = flusher
        self._metrics = metrics
        self._pictures = pictures
        self._clock = clock
        self._checked_at: float | None = None

    @property
    def ready(self) -> Ready | None:
        """Properties of the engine (context length, fingerprint); None while no worker can serve."""
        return self.workers.ready

    @property
    def stalled(self) -> bool:
        """Whether this event loop has not run for so long that messages of workers are still unread."""
        return self._checked_at is not None and self._clock() - self._checked_at > 2 * CHECK_S

    def join(
        self, name: str, outbox: Outbox, role: Role = "both", epoch: int = 1, inbox: str = "", at: str | None = None
    ) -> WorkerHandle:
        """Register a started worker; pass its messages to `receive`. Jobs are sent to it through `outbox`.

        inbox: the address that the worker reads, for other workers. at: the machine that it runs on, if it is a remote
        one. Raises AssertionError if the worker's last start is not marked as down.
        """
        worker = WorkerHandle(name, outbox, role, epoch, inbox, at)
        self.workers.join(worker)
        self._metrics.joined(name)
        self._metrics.role(name, role)
        return worker

    def drain(self, worker: WorkerHandle) -> None:
        """Send nothing new to a worker that is about to be replaced."""
        worker.draining = True

    async def follow(self, worker: WorkerHandle, inbox: AsyncInbox) -> None:
        """Read a worker's messages until cancelled. The worker counts as down once reading ends, for any reason."""
        try:
            while worker.lost is None:
                self.receive(worker, await inbox.get())
        finally:
            self.mark_down(worker, "the worker's messages are no longer read")

    def receive(self, worker: WorkerHandle, messages: Sequence[Wire]) -> None:
        """Process messages of a worker that arrived together, with one write per stream. Raises AssertionError for a
        message type that no worker sends."""
        began = 0.0 if self.recorder is None else clock.perf_counter()
        for message in messages:
            self._receive(worker, message)
        self._flusher.flush()
        if self.recorder is not None:
            self.recorder.took(worker, messages, began)

    def mark_down(self, worker: WorkerHandle, reason: str, *, asked: bool = False) -> None:
        """Mark a worker as down; idempotent. Its jobs are requeued to other workers, or fail with WorkerLost if none
        can take them.

        asked: the worker was stopped on purpose, so its jobs are not the cause.
        """
        jobs = self._requests.at(worker)
        if worker.lost is None:
            level = logging.ERROR if jobs else logging.DEBUG
            log.log(level, "%s is down with %d jobs: %s", worker.name, len(jobs), reason)
            self.workers.mark_down(worker, reason)
            self._metrics.lost(worker.name, worker.epoch)
            self._announce_down(*self.workers.newly_down())
        for job in jobs:
            self._dispatcher.requeue(job, reason, blamed=not asked)

    def switch_role(self, worker: WorkerHandle, role: Role) -> None:
        """Switch the role of a worker (`roles.refusal` checks whether it can); new jobs are routed by the new role at
        once.

        If it becomes a prefill worker, jobs without a first token are requeued elsewhere at once. Its decoding jobs
        finish there, or are requeued after STAY_S. If jobs cannot be resumed, all of them finish there, however long
        that takes.
        """
        log.info("%s: role is now %s, was %s", worker.name, role, worker.role)
        self.workers.switch_role(worker, role)
        self._metrics.role(worker.name, role)
        self._metrics.turned(worker.name, role)
        if role == "prefill":
            self._move(worker, [job for job in self._requests.at(worker) if not job.started])

    def check_heartbeats(self) -> None:
        """Call every CHECK_S: requeues the jobs of workers whose heartbeat timed out. If this event loop itself was
        stalled, messages that arrived in that time are still unread, so no worker counts as silent."""
        now = self._clock()
        before, stalled, self._checked_at = self._checked_at, self.stalled, now
        if before is None:
            return
        if stalled:
            for worker in self.workers:
                worker.shift_timeouts(now - before)
            return
        for worker in self.workers:
            if worker.heartbeat_at is not None and worker.ready is not None and worker.busy:
                worker.ping(now, self._replica)
        self._announce_down(*self.workers.newly_down())
        for worker in self.workers:
            if (switching_s := self.workers.switching_s(worker)) is not None and worker.ready is not None:
                self._finish_switch(worker, switching_s)
        for worker in self.workers.silent():
            reason = f"{worker.name} has sent no heartbeat for {self.workers.silent_s(worker):.1f} s"
            for job in self._requests.at(worker):
                self._dispatcher.withdraw(job, reason, blamed=True)

    def _receive(self, worker: WorkerHandle, message: Wire) -> None:
        if worker.lost is not None:  # jobs requeued, cached pages dropped; a drained one sends its last
            return
        match message:
            case Delta():
                self._dispatcher.deliver(worker, message)
            case ImageWanted():
                if (job := self._requests.get(message.job)) is not None:
                    self._pictures.send(worker, message.hash, job)
            case Load():
                self.workers.update_load(worker, message)
                self._metrics.load(message, worker.name, worker.epoch)
                self.on_load(worker.name, message)
            case Heartbeat():
                worker.record_heartbeat(message, self._clock())
            case Ping():
                pass  # a lost message before it would have been reported as Missed
            case Missed():
                self._missed(worker, message.messages)
            case Cached():
                self.workers.update_cache(worker, message)
            case Profiled():
                if self.recorder is not None:
                    self.recorder.told(worker, message)
            case Ready():
                if (why_not := self.workers.set_ready(worker, message)) is not None:
                    self.mark_down(worker, why_not)
                    return
                self._metrics.ready(message, worker.name)
                self._dispatcher.retry()
            case RoleTaken():
                worker.confirmed_role = message.role
            case Failed():
                self.mark_down(worker, message.reason)
            case _:
                raise AssertionError(f"a worker does not send {type(message).__name__}")

    def _missed(self, worker: WorkerHandle, messages: int) -> None:
        """A connection was cut and messages on it were lost: a job, an abort or tokens. It is unknown which jobs they
        belonged to, so all jobs of the worker are requeued under new ids, and none of its KV transfers continues."""
        reason = f"{messages} messages of the worker's connections were lost"
        if worker.ready is None:
            # Its Ready may have been lost; with several replicas it is sent again.
            if not self._replica:
                self.mark_down(worker, reason, asked=True)
            return
        jobs = self._requests.at(worker)
        log.warning("%s: %s; %d jobs are requeued", worker.name, reason, len(jobs))
        self._announce_down(worker)
        self.workers.request_cache(worker)
        if not self._replica:  # with several replicas, roles do not change
            worker.outbox.put(TakeRole(role=worker.role))  # a TakeRole may be among the lost messages
        for job in jobs:
            self._dispatcher.withdraw(job, reason)

    def _finish_switch(self, worker: WorkerHandle, switching_s: float) -> None:
        if worker.role == "prefill" and switching_s >= STAY_S:
            self._move(worker, self._requests.at(worker))
        if is_done(worker, len(self._requests.at(worker))):
            worker.switching_since = None
            log.info("%s: switch to role %s is complete after %.1f s", worker.name, worker.role, switching_s)

    def _move(self, worker: WorkerHandle, jobs: Sequence[JobState]) -> None:
        for job in jobs if self._dispatcher.resumes else ():
            self._dispatcher.withdraw(job, f"the role of {worker.name} is now {worker.role}")

    def _announce_down(self, *down: WorkerHandle) -> None:
        for worker in down:
            for other in self.workers:
                if other.ready is not None and other is not worker and other.ready.format:
                    other.outbox.put(WorkerDown(worker=worker.name, epoch=worker.epoch))
