"""Accepts the connections of a listening socket: a few in each turn of the event loop, and none while there is no room.

An event loop's own server accepts all that wait at once, before any of them is counted, and resets every client where
that uses up the process's descriptors.
"""

import asyncio
import logging
import socket
from collections.abc import Callable

AT_ONCE = 16  # connections accepted in one turn of the event loop: one that gives way keeps its descriptor for some
PAUSE_S = 1.0  # where the system has no descriptor left

log = logging.getLogger("redline.api")


class Listener:
    """Accepts at one listening socket, which its caller owns and which does not block, between `open` and `close`."""

    def __init__(self, at: socket.socket, take: Callable[[socket.socket], None]) -> None:
        """take: is given each connection, which does not block, and owns it from then on."""
        self._at = at
        self._take = take
        self._later: asyncio.TimerHandle | None = None
        self._opened = False

    def open(self) -> None:
        """Accept from now on; idempotent."""
        if not self._opened:
            self._opened = True
            asyncio.get_running_loop().add_reader(self._at, self._accept)

    def close(self) -> None:
        """Accept nothing more: clients wait in the socket's queue; idempotent."""
        if not self._opened:
            return
        self._opened = False
        asyncio.get_running_loop().remove_reader(self._at)
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._at.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error("connections cannot be accepted for %g s: %s", PAUSE_S, error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._at)
                self._later = loop.call_later(PAUSE_S, loop.add_reader, self._at, self._accept)
                return
            connection.setblocking(False)
            self._take(connection)
            if not self._opened:
                return
