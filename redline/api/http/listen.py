"""Accepts connections of a listening socket: a few per event loop iteration, and none while the limit is reached.

An event loop's own server accepts all pending connections at once, before any of them is counted, and if that uses up
the process's descriptors, resets every client.
"""

import asyncio
import logging
import socket
from collections.abc import Callable

AT_ONCE = 16  # per event loop iteration: a connection that was closed for another keeps its descriptor for a while
PAUSE_S = 1.0  # seconds without accepting, if no descriptor is left

log = logging.getLogger("redline.api")


class SocketListener:
    """Accepts on one non-blocking listening socket, which the caller owns, between `open` and `close`."""

    def __init__(self, at: socket.socket, take: Callable[[socket.socket], None]) -> None:
        """take: called with each connection, which is non-blocking; `take` owns it from then on."""
        self._at = at
        self._take = take
        self._later: asyncio.TimerHandle | None = None
        self._opened = False

    def open(self) -> None:
        """Start accepting; idempotent."""
        if not self._opened:
            self._opened = True
            asyncio.get_running_loop().add_reader(self._at, self._accept)

    def close(self) -> None:
        """Stop accepting: clients wait in the socket's backlog; idempotent."""
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
