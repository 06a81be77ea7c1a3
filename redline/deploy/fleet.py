"""The supervisor's view of workers and API replicas, if the API is several processes.

`Fleet` takes the place of the gateway's worker monitor: it receives the starts and ends of workers and broadcasts them
to every replica. Messages about jobs do not pass through it: every worker sends them to the replicas directly.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from redline import clock
from redline.api.gateway.worker_monitor import CHECK_S
from redline.api.telemetry.metrics import Metrics
from redline.deploy.connection_balancer import ReplicaSlot
from redline.deploy.questions import Questions
from redline.messages.channel import Outbox, ipc_address
from redline.messages.codec import Wire
from redline.messages.news import Failed, Heartbeat, Load, Missed, Ready, Role
from redline.messages.replicas import Drain, Replica, ReplicaQuery, ReplicaReply, Replicas, Roster, Start, Use
from redline.router.worker_registry import WorkerHandle, WorkerRegistry

AGAIN_S = 1.0  # before the list of replicas is sent again to a worker that a replica has not received messages from


class ReplicaStart(ReplicaSlot):
    """One start of a replica. `ready` is None until it serves."""

    def __init__(self, of: str, epoch: int, outbox: Outbox, writer: bytes, door: socket.socket, pid: int) -> None:
        """of: the replica's name, the same for all its starts. writer: the sender id of its messages to workers."""
        super().__init__(f"{of}.{epoch}", door)
        self.of = of
        self.epoch = epoch
        self.outbox = outbox
        self.writer = writer
        self.pid = pid
        self.beats = 0

    @property
    def ready(self) -> Use | None:
        """Its newest heartbeat."""
        return self.use

    def jobs_at(self, link: WorkerHandle) -> int:
        """The number of its jobs at a worker."""
        workers = () if self.use is None else self.use.workers
        return sum(each.jobs for each in workers if (each.worker, each.epoch) == (link.name, link.epoch))


class Fleet:
    """Workers and replicas, and the messages that the supervisor sends to them. Everything runs in one event loop."""

    def __init__(
        self,
        metrics: Metrics,
        sockets: Path,
        answer: Callable[["ReplicaStart", ReplicaQuery], None] = lambda _, __: None,
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """metrics: counts what workers report. sockets: folder of the sockets between workers and replicas.

        answer: called with each query of a replica.
        """
        self.workers = WorkerRegistry(clock)
        self.metrics = metrics
        self.questions = Questions()
        self.replicas: dict[str, ReplicaStart] = {}  # by name
        self.ended: dict[str, str] = {}  # by replica, why its previous start has ended
        self.draining: str | None = None  # why no new requests are accepted
        self._sockets = sockets
        self._answer = answer
        self._clock = clock
        self._asked: set[tuple[str, int]] = set()  # starts of workers that ended on request
        self._roster = 0
        self._told_at: dict[str, float] = {}  # when each worker was last sent the list of replicas
        self._checked_at: float | None = None

    @property
    def ready(self) -> Ready | None:
        """The limits of jobs; None while no worker can answer."""
        return self.workers.ready

    @property
    def known(self) -> bool:
        """Whether every replica serves, and knows a worker that can answer."""
        return bool(self.replicas) and all(one.use is not None and one.use.ready for one in self.replicas.values())

    @property
    def drained(self) -> bool:
        """Whether no replica accepts new requests, and none is reading or answering one."""
        uses = [one.use for one in self.replicas.values() if one.use is not None]
        return all(use.draining and not use.busy for use in uses)

    # -- of workers

    def join(
        self, name: str, outbox: Outbox, role: Role = "both", epoch: int = 1, inbox: str = "", at: str | None = None
    ) -> WorkerHandle:
        """A worker has been started: send it the list of replicas, and announce it to them."""
        link = WorkerHandle(name, outbox, role, epoch, inbox, at)
        self.workers.join(link)
        self.metrics.joined(name)
        self.metrics.role(name, role)
        self._tell_worker(link)
        self._tell_replicas()
        return link

    def drain(self, worker: WorkerHandle) -> None:
        """A worker is to be replaced."""
        worker.draining = True
        self._tell_replicas()

    def mark_down(self, worker: WorkerHandle, reason: str, *, asked: bool = False) -> None:
        """A worker has ended; idempotent. asked: it ended on request."""
        if worker.lost is None:
            self.workers.mark_down(worker, reason)
            self.metrics.lost(worker.name, worker.epoch)
            if asked:
                self._asked.add((worker.name, worker.epoch))
            self._tell_replicas()

    def receive(self, worker: WorkerHandle, messages: Sequence[Wire]) -> None:
        """Process a worker's status messages."""
        for message in messages:
            match message:
                case Ready():
                    if (why_not := self.workers.set_ready(worker, message)) is not None:
                        self.mark_down(worker, why_not)
                        return
                    self.metrics.ready(message, worker.name)
                case Heartbeat():
                    worker.record_heartbeat(message, self._clock())
                case Load():
                    worker.load = message if worker.lost is None else None
                    self.metrics.load(message, worker.name, worker.epoch)
                case Failed():
                    self.mark_down(worker, message.reason)
                case Missed():
                    self._tell_worker(worker)  # the list of replicas may be among the lost messages
                case _:
                    pass  # messages for the routers in the replicas

    def check_heartbeats(self) -> None:
        """Call every CHECK_S. If this process itself stalled, the stall does not count as silence of workers."""
        now = self._clock()
        before, self._checked_at = self._checked_at, now
        if before is not None and now - before > 2 * CHECK_S:
            for link in self.workers:
                link.shift_timeouts(now - before)

    # -- of replicas

    def enter(self, start: ReplicaStart) -> None:
        """A replica has been started: announce it to the workers, and send it the list of workers."""
        self.replicas[start.name] = start
        for link in self.workers:
            self._tell_worker(link)
        self._tell_replicas()
        if self.draining is not None:
            start.outbox.put(Drain(reason=self.draining))

    def leave(self, start: ReplicaStart, reason: str) -> None:
        """A replica has ended: the workers drop its jobs; idempotent."""
        if self.replicas.pop(start.name, None) is None:
            return
        self.ended[start.of] = reason
        for link in self.workers:
            self._tell_worker(link)
        self._count()
        self._tell_replicas()

    def hear(self, start: ReplicaStart, messages: Sequence[Wire]) -> None:
        """Process a replica's messages. Raises AssertionError for a message type that replicas do not send."""
        for message in messages:
            match message:
                case Use():
                    self._use(start, message)
                case ReplicaReply():
                    self.questions.told(message)
                case ReplicaQuery():
                    self._answer(start, message)
                case Missed():
                    pass  # heartbeats are repeated, and queries are retried
                case _:
                    raise AssertionError(f"unexpected message from a replica: {type(message).__name__}")

    def begin_drain(self, reason: str) -> None:
        """Have all replicas refuse new requests."""
        self.draining = reason
        for start in self.replicas.values():
            start.outbox.put(Drain(reason=reason))

    def _use(self, start: ReplicaStart, use: Use) -> None:
        start.use, start.heard_at = use, self._clock()
        start.beats += 1
        for other in self.replicas.values():
            if other is not start:
                other.outbox.put(use)
        self._count()
        if use.roster != self._roster:  # the newest roster was lost, or has not arrived yet
            start.outbox.put(self._roster_now(start))
        known = {(each.worker, each.epoch) for each in use.workers}
        for link in self.workers:
            late = link.ready is not None and self._clock() - self._told_at.get(link.name, 0.0) > AGAIN_S
            if late and (link.name, link.epoch) not in known:
                self._tell_worker(link)

    def _count(self) -> None:
        for link in self.workers:
            link.jobs = sum(start.jobs_at(link) for start in self.replicas.values())

    def _address(self, start: ReplicaStart, link: WorkerHandle) -> str:
        """The address on which a replica receives a worker's messages. Raises ConfigError if the socket's path is too
        long."""
        return ipc_address(self._sockets, f"{start.name}.{link.name}.{link.epoch}")

    def _tell_worker(self, link: WorkerHandle) -> None:
        if link.lost is not None:
            return
        self._told_at[link.name] = self._clock()
        replicas = (
            Replica(name=start.name, writer=start.writer, inbox=self._address(start, link))
            for start in self.replicas.values()
        )
        link.outbox.put(Replicas(replicas=tuple(replicas)))

    def _tell_replicas(self) -> None:
        self._roster += 1
        for start in self.replicas.values():
            start.outbox.put(self._roster_now(start))

    def _roster_now(self, start: ReplicaStart) -> Roster:
        return Roster(number=self._roster, starts=tuple(self._starts(start)), replicas=tuple(self.replicas))

    def _starts(self, start: ReplicaStart) -> Iterator[Start]:
        for link in self.workers:
            yield Start(
                worker=link.name,
                epoch=link.epoch,
                role=link.role,
                inbox=link.inbox,
                outbox=self._address(start, link),
                draining=link.draining,
                lost=link.lost,
                asked=(link.name, link.epoch) in self._asked,
            )
