"""Streams that are written in the turn of the event loop in which their tokens come, without waking a task for each.

A task that wakes, walks through the layers between it and the socket, and sleeps again costs as much as all that is
done with a token. So while an answer only goes on, one callback a turn writes for every stream that has something new.
"""

import asyncio
from typing import Protocol


class Poured(Protocol):
    """A stream that has something to write."""

    def flush(self) -> None:
        """Write all that has come."""
        ...


class Pours:
    """The streams that have something new. Everything runs in one event loop."""

    def __init__(self) -> None:
        self._full: list[Poured] = []
        self._told = False  # the loop, of the next turn

    def add(self, stream: Poured) -> None:
        """Have the stream flushed, once however much comes for it until then."""
        self._full.append(stream)

    def soon(self) -> None:
        """Flush in the next turn of the event loop: more may come in this one."""
        if self._full and not self._told:
            self._told = True
            asyncio.get_running_loop().call_soon(self._flush_told)

    def flush(self) -> None:
        """Flush every stream now."""
        full, self._full = self._full, []
        for stream in full:
            stream.flush()

    def _flush_told(self) -> None:
        self._told = False
        self.flush()


class Direct(Protocol):
    """A connection on which a streamed answer has begun: `scope["extensions"][DIRECT]`."""

    @property
    def lags(self) -> bool:
        """Whether the client has not taken what was written before."""
        ...

    def write_part(self, body: bytes) -> bool:
        """Write a part of the body, which is not empty, as `http.response.body` with more to come does.

        False, and nothing is written, where the client has left or has not taken what was written before.
        """
        ...


DIRECT = "redline.direct"
