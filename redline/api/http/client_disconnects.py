"""Detects which half-closed clients have disconnected.

The end of a client's data (FIN) does not show whether it has disconnected: a client may half-close and wait for the
whole response (`shutdown(SHUT_WR)`; `nc -N`). If the client is gone, its system answers the next data with a reset. The
kernel reports that as a hang-up even on a connection that is no longer read, which event loops do not watch; so such
connections are watched here.
"""

import asyncio
import select
from collections.abc import Callable
from contextlib import suppress


class Disconnects:
    """Watches connections by file descriptor. Everything runs in one event loop."""

    def __init__(self) -> None:
        self._left: dict[int, Callable[[], None]] = {}
        self._epoll: select.epoll | None = None

    def watch(self, descriptor: int, left: Callable[[], None]) -> None:
        """Call `left`, once, when the connection is reset or both its directions are closed."""
        if self._epoll is None:
            self._epoll = select.epoll()
        if not self._left:
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._look)
        self._left[descriptor] = left
        self._epoll.register(descriptor, 0)  # hang-ups and errors are always reported

    def forget(self, descriptor: int) -> None:
        """Stop watching; idempotent. Call before the descriptor is closed."""
        if self._left.pop(descriptor, None) is None:
            return
        assert self._epoll is not None
        with suppress(OSError):  # it is already closed
            self._epoll.unregister(descriptor)
        if not self._left:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())

    def _look(self) -> None:
        assert self._epoll is not None
        for descriptor, _ in self._epoll.poll(0):
            left = self._left[descriptor]
            self.forget(descriptor)
            left()
