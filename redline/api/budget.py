"""How many connections the listeners of a process may have open together, and which one makes room for a new one.

A connection counts from `accept` on, so also while it has not finished its TLS handshake. It owes something while its
client has to send: the rest of the handshake, a request's head, a request's body, or, between two requests, the next
one. When there are as many connections as there may be, the one that has owed something for longest without progress is
closed for the new one.
"""

import logging
from typing import Protocol

from redline import clock
from redline.api.config import Limits
from redline.api.departures import Departures
from redline.api.turns import Turns
from redline.limits import open_files

RESERVED_FILES = 128  # descriptors for all else: sockets to workers, pipes, files, and connections of the admin routes
TELL_FULL_S = 60.0  # between two lines that tell that all connections are taken

log = logging.getLogger("redline.api")


class Counted(Protocol):
    """A connection, as far as the budget is concerned."""

    def give_way(self) -> None:
        """Close now, for a new connection."""
        ...


class Connections:
    """The connections of some listeners of a process. Everything runs in one event loop.

    `owing` has those that owe something, the one without progress for longest first. `turns` and `departures` are
    shared by all of them.
    """

    def __init__(self, limits: Limits) -> None:
        self.most = max(1, min(limits.connections, open_files(limits.connections + RESERVED_FILES) - RESERVED_FILES))
        self.turns = Turns()
        self.departures = Departures()
        self.owing: dict[Counted, None] = {}
        self._open: set[Counted] = set()
        self._told = -TELL_FULL_S

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._open)

    @property
    def too_many(self) -> bool:
        """Whether there are more connections than there may be."""
        return len(self._open) > self.most

    def enter(self, connection: Counted) -> bool:
        """Count a new connection. When that is one too many, another makes room: False where none owes anything."""
        self._open.add(connection)
        return not self.too_many or self._make_room()

    def leave(self, connection: Counted) -> None:
        """The connection has ended; idempotent."""
        self._open.discard(connection)
        self.owing.pop(connection, None)

    def owes(self, connection: Counted) -> None:
        """From now on the connection owes something, or what it owes has made progress: it is the last to give way."""
        if connection in self._open:  # one that has given way may still read what had arrived before
            self.owing.pop(connection, None)
            self.owing[connection] = None

    def owes_nothing(self, connection: Counted) -> None:
        """The connection does not make room for others."""
        self.owing.pop(connection, None)

    def _make_room(self) -> bool:
        if (now := clock.monotonic()) - self._told >= TELL_FULL_S:
            self._told = now
            log.warning(
                "%d connections are open, as many as there may be: each new one closes the connection whose client has "
                "owed a handshake, a request or its body for longest",
                self.most,
            )
        oldest = next(iter(self.owing), None)
        if oldest is None:
            return False
        self.leave(oldest)  # it ends in a later turn of the event loop
        oldest.give_way()
        return True
