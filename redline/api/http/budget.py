"""Limits the number of open connections of a process's listeners, and chooses which one is closed for a new one.

A connection counts from `accept` on, including its TLS handshake. A connection is "owing" while the server waits for
its client: for the rest of the handshake, a request's head or body, or, between requests, the next one. At the limit,
the connection that has been owing for longest without progress is closed for the new one.
"""

import logging
from typing import Protocol

from redline import clock
from redline.api.config import Limits
from redline.api.http.client_disconnects import Disconnects
from redline.api.http.turns import ReadQueue
from redline.limits import open_files

RESERVED_FILES = 128  # descriptors for all else: sockets to workers, pipes, files, and connections of the admin routes
TELL_FULL_S = 60.0  # seconds between two log lines about reaching the limit

log = logging.getLogger("redline.api")


class ClosableConnection(Protocol):
    """A connection, as seen by `Connections`."""

    def give_way(self) -> None:
        """Close now, for a new connection."""
        ...


class Connections:
    """The connections of a process's listeners. Everything runs in one event loop.

    `owing` holds the connections whose clients have data to send, the one longest without progress first. `turns` and
    `departures` are shared by all connections.
    """

    def __init__(self, limits: Limits) -> None:
        self.most = max(1, min(limits.connections, open_files(limits.connections + RESERVED_FILES) - RESERVED_FILES))
        self.turns = ReadQueue()
        self.departures = Disconnects()
        self.owing: dict[ClosableConnection, None] = {}
        self._open: set[ClosableConnection] = set()
        self._told = -TELL_FULL_S

    @property
    def count(self) -> int:
        """Number of open connections."""
        return len(self._open)

    @property
    def too_many(self) -> bool:
        """Whether there are more connections than the limit."""
        return len(self._open) > self.most

    def enter(self, connection: ClosableConnection) -> bool:
        """Count a new connection. At the limit another one is closed for it: False if none is owing."""
        self._open.add(connection)
        return not self.too_many or self._make_room()

    def leave(self, connection: ClosableConnection) -> None:
        """Count the end of a connection; idempotent."""
        self._open.discard(connection)
        self.owing.pop(connection, None)

    def owes(self, connection: ClosableConnection) -> None:
        """Mark a connection as owing, or as having made progress: it becomes the last to be closed."""
        if connection in self._open:  # one that was closed for another may still process earlier data
            self.owing.pop(connection, None)
            self.owing[connection] = None

    def owes_nothing(self, connection: ClosableConnection) -> None:
        """The connection is not closed for new ones any more."""
        self.owing.pop(connection, None)

    def _make_room(self) -> bool:
        if (now := clock.monotonic()) - self._told >= TELL_FULL_S:
            self._told = now
            log.warning(
                "the limit of %d open connections is reached: each new one closes the connection whose client has "
                "owed a handshake, a request or its body for longest",
                self.most,
            )
        oldest = next(iter(self.owing), None)
        if oldest is None:
            return False
        self.leave(oldest)  # it ends in a later event loop iteration
        oldest.give_way()
        return True
