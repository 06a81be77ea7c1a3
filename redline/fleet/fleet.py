"""The workers and the replicas of a deployment as their supervisor knows them, where the API is several processes.

It stands where the gateway stands in a server of one: the workers' starts and ends are told it, and it tells every
replica. What workers say of jobs never passes here: each of them speaks to each replica itself.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from redline import clock
from redline.api.gateway import LOOK_S
from redline.api.metrics import Metrics
from redline.fleet.doorman import Taker
from redline.fleet.questions import Questions
from redline.route.links import Link, Links
from redline.wire.channel import Outbox, ipc_address
from redline.wire.codec import Wire
from redline.wire.news import Beat, Failed, Load, Missed, Ready, Role
from redline.wire.replicas import Ask, Drain, Replica, Replicas, Roster, Start, Told, Use

AGAIN_S = 1.0  # before a worker is told once more of a replica that has not heard of it


class ReplicaStart(Taker):
    """One start of a replica. `ready` is None until it serves."""

    def __init__(self, of: str, epoch: int, outbox: Outbox, writer: bytes, door: socket.socket, pid: int) -> None:
        """of: the replica's name, through all its starts. writer: what it numbers its messages to workers under."""
        super().__init__(f"{of}.{epoch}", door)
        self.of = of
        self.epoch = epoch
        self.outbox = outbox
        self.writer = writer
        self.pid = pid
        self.beats = 0

    @property
    def ready(self) -> Use | None:
        """What it said last."""
        return self.use

    def jobs_at(self, link: Link) -> int:
        """Its jobs that a worker has."""
        workers = () if self.use is None else self.use.workers
        return sum(each.jobs for each in workers if (each.worker, each.epoch) == (link.name, link.epoch))


class Fleet:
    """Whom the supervisor of workers and replicas tells what. Everything runs in one event loop."""

    def __init__(
        self,
        metrics: Metrics,
        sockets: Path,
        answer: Callable[["ReplicaStart", Ask], None] = lambda _, __: None,
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """metrics: where it is counted what workers tell. sockets: the folder for those between workers and replicas.

        answer: called with what a replica asks.
        """
        self.links = Links(clock)
        self.metrics = metrics
        self.questions = Questions()
        self.replicas: dict[str, ReplicaStart] = {}  # by name
        self.ended: dict[str, str] = {}  # of each replica, why its start before this one has ended
        self.draining: str | None = None  # why no new request is taken
        self._sockets = sockets
        self._answer = answer
        self._clock = clock
        self._asked: set[tuple[str, int]] = set()  # starts of workers that were to end
        self._roster = 0
        self._told_at: dict[str, float] = {}  # when each worker was last told of the replicas
        self._looked_at: float | None = None

    @property
    def ready(self) -> Ready | None:
        """What jobs may be like; None while no worker can answer."""
        return self.links.ready

    @property
    def known(self) -> bool:
        """Whether every replica serves, and has heard of a worker that answers."""
        return bool(self.replicas) and all(one.use is not None and one.use.ready for one in self.replicas.values())

    @property
    def drained(self) -> bool:
        """Whether no replica takes new requests, and none reads or answers any."""
        uses = [one.use for one in self.replicas.values() if one.use is not None]
        return all(use.draining and not use.busy for use in uses)

    # -- of workers

    def join(
        self, name: str, outbox: Outbox, role: Role = "both", epoch: int = 1, inbox: str = "", at: str | None = None
    ) -> Link:
        """A worker has been started: it is told of the replicas, and they of it."""
        link = Link(name, outbox, role, epoch, inbox, at)
        self.links.join(link)
        self.metrics.joined(name)
        self.metrics.role(name, role)
        self._tell_worker(link)
        self._tell_replicas()
        return link

    def drain(self, link: Link) -> None:
        """A worker is to be replaced."""
        link.draining = True
        self._tell_replicas()

    def lose(self, link: Link, reason: str, *, asked: bool = False) -> None:
        """A worker has ended; idempotent. asked: it was to end."""
        if link.lost is None:
            self.links.lose(link, reason)
            self.metrics.lost(link.name, link.epoch)
            if asked:
                self._asked.add((link.name, link.epoch))
            self._tell_replicas()

    def take(self, link: Link, messages: Sequence[Wire]) -> None:
        """Take in what a worker says of itself."""
        for message in messages:
            match message:
                case Ready():
                    if (why_not := self.links.speaks(link, message)) is not None:
                        self.lose(link, why_not)
                        return
                    self.metrics.ready(message, link.name)
                case Beat():
                    link.heard(message, self._clock())
                case Load():
                    link.load = message if link.lost is None else None
                    self.metrics.load(message, link.name, link.epoch)
                case Failed():
                    self.lose(link, message.reason)
                case Missed():
                    self._tell_worker(link)  # it may have missed this
                case _:
                    pass  # for whoever chooses among workers

    def look(self) -> None:
        """To be called every LOOK_S. Where this process was itself held up, nobody is taken for silent."""
        now = self._clock()
        before, self._looked_at = self._looked_at, now
        if before is not None and now - before > 2 * LOOK_S:
            for link in self.links:
                link.forgive(now - before)

    # -- of replicas

    def enter(self, start: ReplicaStart) -> None:
        """A replica has been started: the workers are told of it, and it of them."""
        self.replicas[start.name] = start
        for link in self.links:
            self._tell_worker(link)
        self._tell_replicas()
        if self.draining is not None:
            start.outbox.put(Drain(reason=self.draining))

    def leave(self, start: ReplicaStart, reason: str) -> None:
        """A replica has ended: its jobs are wanted by nobody; idempotent."""
        if self.replicas.pop(start.name, None) is None:
            return
        self.ended[start.of] = reason
        for link in self.links:
            self._tell_worker(link)
        self._count()
        self._tell_replicas()

    def hear(self, start: ReplicaStart, messages: Sequence[Wire]) -> None:
        """Take in what a replica says. Raises AssertionError for what none says."""
        for message in messages:
            match message:
                case Use():
                    self._use(start, message)
                case Told():
                    self.questions.told(message)
                case Ask():
                    self._answer(start, message)
                case Missed():
                    pass  # what it has under way it says again, and what was asked is asked again
                case _:
                    raise AssertionError(f"a replica does not say {type(message).__name__}")

    def begin_drain(self, reason: str) -> None:
        """Have no replica take new requests."""
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
        if use.roster != self._roster:  # lost on the way, or under way still
            start.outbox.put(self._roster_now(start))
        known = {(each.worker, each.epoch) for each in use.workers}
        for link in self.links:
            late = link.ready is not None and self._clock() - self._told_at.get(link.name, 0.0) > AGAIN_S
            if late and (link.name, link.epoch) not in known:
                self._tell_worker(link)

    def _count(self) -> None:
        for link in self.links:
            link.jobs = sum(start.jobs_at(link) for start in self.replicas.values())

    def _address(self, start: ReplicaStart, link: Link) -> str:
        """Where a replica hears a worker. Raises ConfigError where a socket's path is too long."""
        return ipc_address(self._sockets, f"{start.name}.{link.name}.{link.epoch}")

    def _tell_worker(self, link: Link) -> None:
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
        for link in self.links:
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
