"""Connection balancer: accepts connections, and passes each to the API replica that has the fewest.

The kernel could distribute connections instead. With one socket per replica (SO_REUSEPORT) it picks by a hash: of eight
streams two replicas may get six and two, a stopped replica gets its full share, two servers could bind the same port
without an error, and Unix sockets do not support it. With one listening socket shared by all replicas, the process that
wakes first accepts the whole backlog. The balancer knows the number of connections of each replica and which replicas
send heartbeats. A connection costs it one accept and one message; tokens never pass through it.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress

from redline import clock
from redline.api.http.listen import AT_ONCE, SocketListener
from redline.messages.replicas import Use

AGAIN_S = 0.02  # pause before a connection that no replica accepted is offered again
HEARD_S = 1.0  # seconds without a heartbeat after which a replica gets no new connections, if another is alive


class ReplicaSlot:
    """One start of a replica, as the connection balancer sees it."""

    def __init__(self, name: str, door: socket.socket) -> None:
        """door: our end of a socket pair; the replica receives connections from the other end (`take`)."""
        door.setblocking(False)
        self.name = name
        self.use: Use | None = None  # its newest heartbeat; None: it does not serve yet
        self.heard_at = 0.0
        self._door = door
        self._given = 0

    @property
    def open(self) -> int:
        """Its open connections, including those passed to it that its newest heartbeat does not count yet."""
        return 0 if self.use is None else self.use.connections + self._given - self.use.taken

    def give(self, connection: socket.socket) -> bool:
        """Pass it a connection, which the caller closes afterwards; False if it accepts none now."""
        try:
            socket.send_fds(self._door, [b"c"], [connection.fileno()])
        except OSError:  # the replica has ended, or its socket buffer is full
            return False
        self._given += 1
        return True


class ConnectionBalancer:
    """Listens for all replicas of a server. `look` has to be called when a replica begins to serve."""

    def __init__(
        self,
        listener: socket.socket,
        takers: Callable[[], Iterable[ReplicaSlot]],
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """listener: non-blocking, and owned by the caller. takers: returns the replicas that run now."""
        self._listener = SocketListener(listener, self._hand_out)
        self._held: socket.socket | None = None  # a connection that no replica accepted: all socket buffers are full
        self._again: asyncio.TimerHandle | None = None
        self._takers = takers
        self._clock = clock

    def look(self) -> None:
        """Accept connections if a replica serves. If none does, clients wait in the listener's backlog."""
        if self._held is not None:
            return  # the held connection is passed on first
        if any(taker.use is not None for taker in self._takers()):
            self._listener.open()
        else:
            self._listener.close()

    def close(self) -> None:
        """Accept and pass on no more connections; idempotent."""
        self._listener.close()
        if self._again is not None:
            self._again.cancel()
        if self._held is not None:
            self._held.close()

    def order(self) -> list[ReplicaSlot]:
        """The serving replicas, in the order in which the next connection is offered to them."""
        serving = [taker for taker in self._takers() if taker.use is not None]
        heard = [taker for taker in serving if self._clock() - taker.heard_at <= HEARD_S]
        ready = [taker for taker in heard if taker.use is not None and taker.use.ready]  # others would send 503
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
    """Receive connections at a replica's end of its socket pair. Raises EOFError once the other end is closed."""
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
