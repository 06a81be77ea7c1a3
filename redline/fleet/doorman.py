"""Accepts connections, and hands each to the replica of the API that has the fewest.

The kernel could share them out. With a socket for each replica (SO_REUSEPORT) it goes by a hash: of eight streams two
replicas may get six and two, one that is stopped gets as many as the others, two servers could take the same port
without a word, and there is no such thing for a socket in the file system. With one socket that all listen at, whoever
wakes first takes all that wait. Here whoever hands them out knows how many each has, and who is heard of. A connection
costs that process an accept and a message; a token never passes it.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress

from redline import clock
from redline.api.listen import AT_ONCE, Listener
from redline.wire.replicas import Use

AGAIN_S = 0.02  # until a connection is offered again that no replica has taken
HEARD_S = 1.0  # a replica of which nothing has been heard for so long is handed nothing, where another is heard of


class Taker:
    """One start of a replica, as the doorman knows it."""

    def __init__(self, name: str, door: socket.socket) -> None:
        """door: leads to it, which takes what is handed through at its other end (`take`)."""
        door.setblocking(False)
        self.name = name
        self.use: Use | None = None  # the newest; None: it does not serve yet
        self.heard_at = 0.0
        self._door = door
        self._given = 0

    @property
    def open(self) -> int:
        """Connections that it has, with those that it has been handed and has not told of yet."""
        return 0 if self.use is None else self.use.connections + self._given - self.use.taken

    def give(self, connection: socket.socket) -> bool:
        """Hand it a connection, which the caller closes; False where it takes none now."""
        try:
            socket.send_fds(self._door, [b"c"], [connection.fileno()])
        except OSError:  # it has ended, or has many to take in as yet
            return False
        self._given += 1
        return True


class Doorman:
    """Listens for all replicas of a server. `look` has to be called when one begins to serve."""

    def __init__(
        self,
        listener: socket.socket,
        takers: Callable[[], Iterable[Taker]],
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """listener: does not block, and is its caller's. takers: those that there are now."""
        self._listener = Listener(listener, self._hand_out)
        self._held: socket.socket | None = None  # nobody has taken it yet: the doors of all are full
        self._again: asyncio.TimerHandle | None = None
        self._takers = takers
        self._clock = clock

    def look(self) -> None:
        """Listen where there is a replica that serves. Where there is none, clients wait in the listener's queue."""
        if self._held is not None:
            return  # it comes first
        if any(taker.use is not None for taker in self._takers()):
            self._listener.open()
        else:
            self._listener.close()

    def close(self) -> None:
        """Hand out nothing more; idempotent."""
        self._listener.close()
        if self._again is not None:
            self._again.cancel()
        if self._held is not None:
            self._held.close()

    def order(self) -> list[Taker]:
        """Who serves, whoever should be handed the next connection first."""
        serving = [taker for taker in self._takers() if taker.use is not None]
        heard = [taker for taker in serving if self._clock() - taker.heard_at <= HEARD_S]
        ready = [taker for taker in heard if taker.use is not None and taker.use.ready]  # others would answer with 503
        return sorted(ready or heard or serving, key=lambda taker: taker.open)

    def _hand_out(self, connection: socket.socket) -> None:
        if any(taker.give(connection) for taker in self.order()):
            connection.close()
            return
        self._held = connection
        self._listener.close()
        self._again = asyncio.get_running_loop().call_later(AGAIN_S, self._offer_again)

    def _offer_again(self) -> None:
        connection, self._held = self._held, None
        assert connection is not None
        self._hand_out(connection)
        self.look()


def take(door: socket.socket) -> list[socket.socket]:
    """The connections that have been handed through a replica's end of its door. Raises EOFError once nobody is at the
    other end."""
    found: list[socket.socket] = []
    while len(found) < AT_ONCE:
        try:
            data, descriptors, _, _ = socket.recv_fds(door, 1, 1)
        except BlockingIOError:
            break
        except OSError:
            data, descriptors = b"", []
        if not data:
            if not found:
                raise EOFError
            break
        for descriptor in descriptors:
            with suppress(OSError):
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                found.append(connection)
    return found
