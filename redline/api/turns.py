"""How much of what clients send is read in one turn of the event loop.

A crowd that arrives at once would otherwise be parsed, and everything that it asks for begun, in one turn, in which no
stream is served: 500 requests took 138 ms of it. What is beyond the turn's share waits for the next ones, first come,
first served.
"""

import asyncio
from collections import deque
from typing import Protocol

READS = 128  # calls of `Reader.feed` in one turn
REQUEST = 16  # reads that a whole request counts as: what it asks for is begun in the same turn


class Reader(Protocol):
    """A connection, as far as turns are concerned."""

    def feed(self, data: bytes) -> None:
        """Parse `data`, the next bytes of the connection."""
        ...

    def wait(self) -> None:
        """Take nothing more from the socket until `go_on`: what was taken has to wait for a later turn."""
        ...

    def go_on(self) -> None:
        """Take from the socket again."""
        ...


class Turns:
    """Lets connections read, or has them wait for the next turn. Everything runs in one event loop."""

    def __init__(self) -> None:
        self._spent = 0  # in this turn
        self._waiting: deque[tuple[Reader, bytes]] = deque()
        self._told = False  # the loop, of the next turn

    def read(self, reader: Reader, data: bytes) -> None:
        """Feed `data` to the reader, now or in a later turn; what one reader is given comes in order."""
        if not self._told:
            self._told = True
            asyncio.get_running_loop().call_soon(self._next)
        if self._waiting or self._spent >= READS:
            reader.wait()
            self._waiting.append((reader, data))
        else:
            self._spent += 1
            reader.feed(data)

    def whole(self) -> None:
        """Tell that the request that is being read is whole; it counts as REQUEST reads of this turn."""
        self._spent += REQUEST

    def _next(self) -> None:
        self._spent = 0
        self._told = bool(self._waiting)
        if self._told:
            asyncio.get_running_loop().call_soon(self._next)
        while self._waiting and self._spent < READS:
            reader, data = self._waiting.popleft()
            self._spent += 1
            reader.feed(data)
            reader.go_on()
