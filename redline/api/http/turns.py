"""Limits how much of the clients' data is read per event loop iteration.

Many requests that arrive at once would otherwise all be parsed and started in one iteration, during which no stream is
served: 500 requests took 138 ms. Reads beyond the limit wait for the next iterations, first come, first served.
"""

import asyncio
from collections import deque
from typing import Protocol

READS = 128  # calls of `DataConsumer.feed` per iteration
REQUEST = 16  # reads that a complete request counts as: its processing starts in the same iteration


class DataConsumer(Protocol):
    """A connection, as seen by `ReadQueue`."""

    def feed(self, data: bytes) -> None:
        """Parse `data`, the next bytes of the connection."""
        ...

    def wait(self) -> None:
        """Stop reading from the socket until `go_on`: data was queued for a later iteration."""
        ...

    def go_on(self) -> None:
        """Read from the socket again."""
        ...


class ReadQueue:
    """Passes data to connections, or queues it for the next event loop iteration. Everything runs in one event loop."""

    def __init__(self) -> None:
        self._spent = 0  # reads in this iteration
        self._waiting: deque[tuple[DataConsumer, bytes]] = deque()
        self._told = False  # `_next` is scheduled

    def read(self, reader: DataConsumer, data: bytes) -> None:
        """Feed `data` to the reader, now or in a later iteration; the order per reader is kept."""
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
        """Report that the request being read is complete; it counts as REQUEST reads of this iteration."""
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
