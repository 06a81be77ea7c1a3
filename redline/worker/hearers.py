"""Who hears a worker: the process that has started it, and the replicas of the API that it is told of.

What comes of a job goes to whoever has sent it, all else to everybody. Where the API is one process, that has started
the worker, and there is nobody else.
"""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from redline.wire.channel import Outbox, SocketOutbox
from redline.wire.codec import Wire
from redline.wire.delta import Delta
from redline.wire.job import Job, JobId
from redline.wire.news import Load, Ready
from redline.wire.replicas import Replica

STARTER = ""  # in the place of a replica's name: the process that has started the worker


class Hearers:
    """An outbox to all of them. One thread uses it."""

    def __init__(self, starter: Outbox, connect: Callable[[str], Outbox] = SocketOutbox) -> None:
        """starter: leads to the process that has started the worker. connect: to a replica, by its address."""
        self._outboxes: dict[str, Outbox] = {STARTER: starter}
        self._connect = connect
        self._writers: dict[bytes, str] = {}  # of the replicas
        self._of: dict[JobId, str] = {}  # who has sent each job that has not ended
        self._ready: Ready | None = None  # what was said last
        self._load: Load | None = None

    def __contains__(self, replica: str) -> bool:
        return replica in self._outboxes

    def __iter__(self) -> Iterator[tuple[str, Outbox]]:
        return iter(self._outboxes.items())

    def put(self, message: Wire) -> None:
        """Send a delta to whoever has sent its job, where it is still there, and all else to everybody. Raises
        MessageTooLarge."""
        if isinstance(message, Delta):
            replica = self._of.get(message.job, STARTER)
            if replica in self._outboxes:
                self._outboxes[replica].put(message)
            if message.finish is not None:
                self._of.pop(message.job, None)
            return
        if isinstance(message, Ready):
            self._ready = message
        elif isinstance(message, Load):
            self._load = message
        for outbox in self._outboxes.values():
            outbox.put(message)

    def put_to(self, replica: str, message: Wire) -> None:
        """Send a message to one of them, where it is still there."""
        if replica in self._outboxes:
            self._outboxes[replica].put(message)

    def takes(self, job: Job) -> bool:
        """From now on what comes of the job goes to whoever has sent it; False where that has gone: nobody wants it."""
        if job.replica not in self._outboxes:
            return False
        if job.replica != STARTER:
            self._of[job.id] = job.replica
        return True

    def jobs_of(self, replica: str) -> list[JobId]:
        """The jobs of a replica that have not ended."""
        return [id for id, of in self._of.items() if of == replica]

    def forget(self, id: JobId) -> None:
        """Nothing more is to be told of a job."""
        self._of.pop(id, None)

    def whose(self, writer: bytes) -> str | None:
        """The replica that writes under a name; None: it is no replica's."""
        return self._writers.get(writer)

    def follow(self, replicas: Sequence[Replica]) -> tuple[list[str], list[str]]:
        """Take in which replicas there are: -> those that have come, and those that have gone. All are told what they
        have to know of the worker: one that was there before may have missed it."""
        now = {replica.name: replica for replica in replicas}
        gone = [name for name in self._outboxes if name != STARTER and name not in now]
        for name in gone:
            _close(self._outboxes.pop(name))
        come = [name for name in now if name not in self._outboxes]
        for name in come:
            self._outboxes[name] = self._connect(now[name].inbox)
        for name in now:
            for message in (self._ready, self._load):
                if message is not None:
                    self._outboxes[name].put(message)
        self._writers = {replica.writer: replica.name for replica in replicas}
        return come, gone

    def close(self) -> None:
        """Close what leads to replicas; what leads to whoever has started the worker is its caller's."""
        for name, outbox in self._outboxes.items():
            if name != STARTER:
                _close(outbox)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(outbox: Outbox) -> None:
    if isinstance(outbox, SocketOutbox):
        outbox.close()
