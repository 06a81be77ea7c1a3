"""Routes a worker's messages to the processes that receive them: the process that started it, and the API replicas.

A job's deltas are sent to the process that submitted the job; all other messages are broadcast. With a single API
process, that process has started the worker and is the only receiver.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from redline.errors import MessageTooLarge
from redline.messages.channel import Outbox, SocketOutbox
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.job import Job, JobId
from redline.messages.media import ImageWanted
from redline.messages.news import Load, Ready
from redline.messages.replicas import Replica

STARTER = ""  # used instead of a replica's name for the process that has started the worker


class DeltaRouter:
    """An outbox to all receivers. Only one thread may use it."""

    def __init__(self, starter: Outbox, connect: Callable[[str], Outbox] = SocketOutbox) -> None:
        """starter: outbox to the process that started the worker. connect: opens an outbox to a replica's address."""
        self._outboxes: dict[str, Outbox] = {STARTER: starter}
        self._connect = connect
        self._writers: dict[bytes, str] = {}  # the replicas' names by their writer ids
        self._of: dict[JobId, str] = {}  # the sender of each job that has not ended
        self._ready: Ready | None = None  # the last `Ready` and `Load` that were sent
        self._load: Load | None = None

    def __contains__(self, replica: str) -> bool:
        return replica in self._outboxes

    def __iter__(self) -> Iterator[tuple[str, Outbox]]:
        return iter(self._outboxes.items())

    def put(self, message: Wire) -> None:
        """Send a delta, or a request for an image, to the sender of its job, if it is still connected, and any other
        message to all receivers. Raises MessageTooLarge."""
        if isinstance(message, Delta | ImageWanted):
            replica = self._of.get(message.job, STARTER)
            if replica in self._outboxes:
                self._outboxes[replica].put(message)
            if isinstance(message, Delta) and message.finish is not None:
                self._of.pop(message.job, None)
            return
        if isinstance(message, Ready):
            self._ready = message
        elif isinstance(message, Load):
            self._load = message
        for outbox in self._outboxes.values():
            outbox.put(message)

    def put_deltas(self, deltas: Sequence[Delta]) -> list[tuple[Delta, MessageTooLarge]]:
        """Send a step's deltas, in one frame to each receiver. -> those that are too large for a message, which were
        not sent, with the error."""
        of: dict[str, list[Delta]] = {}
        for delta in deltas:
            of.setdefault(self._of.get(delta.job, STARTER) if self._of else STARTER, []).append(delta)
        refused: list[tuple[Delta, MessageTooLarge]] = []
        for replica, some in of.items():
            outbox = self._outboxes.get(replica)
            if isinstance(outbox, SocketOutbox) and len(some) > 1:
                with contextlib.suppress(MessageTooLarge):  # perhaps one of them is; each is sent alone then
                    outbox.put_all(some)
                    continue
            for delta in some:
                try:
                    if outbox is not None:
                        outbox.put(delta)
                except MessageTooLarge as error:
                    refused.append((delta, error))
        if self._of:
            for delta in deltas:
                if delta.finish is not None:
                    self._of.pop(delta.job, None)
        return refused

    def put_to(self, replica: str, message: Wire) -> None:
        """Send a message to one receiver, if it is still connected."""
        if replica in self._outboxes:
            self._outboxes[replica].put(message)

    def takes(self, job: Job) -> bool:
        """Register a job: its deltas are sent to its sender. False if the sender is no longer connected; the job should
        be dropped then."""
        if job.replica not in self._outboxes:
            return False
        if job.replica != STARTER:
            self._of[job.id] = job.replica
        return True

    def jobs_of(self, replica: str) -> list[JobId]:
        """The jobs of a replica that have not ended."""
        return [id for id, of in self._of.items() if of == replica]

    def forget(self, id: JobId) -> None:
        """Remove a job that has no more deltas to send."""
        self._of.pop(id, None)

    def whose(self, writer: bytes) -> str | None:
        """The replica with the writer id `writer`; None: it belongs to no replica."""
        return self._writers.get(writer)

    def follow(self, replicas: Sequence[Replica]) -> tuple[list[str], list[str]]:
        """Update the list of replicas. -> names of the added and of the removed replicas. The last `Ready` and `Load`
        are sent to all replicas, since one that was connected before may have missed them."""
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
        """Close the outboxes to replicas. The caller closes `starter`."""
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
