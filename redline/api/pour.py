"""Streams that are written in the turn of the event loop after their tokens came, without waking a task for each.

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
    """Gathers the streams of one turn. Everything runs in one event loop."""

    def __init__(self) -> None:
        self._full: list[Poured] = []

    def add(self, stream: Poured) -> None:
        """Flush the stream in the next turn; whatever comes until then leaves in the same write."""
        if not self._full:
            asyncio.get_running_loop().call_soon(self._flush)
        self._full.append(stream)

    def _flush(self) -> None:
        full, self._full = self._full, []
        for stream in full:
            stream.flush()


class Direct(Protocol):
    """A connection on which a streamed answer has begun: `scope["extensions"][DIRECT]`."""

    def write_part(self, body: bytes) -> bool:
        """Write a part of the body, which is not empty, as `http.response.body` with more to come does.

        False, and nothing is written, where the client has left or has not taken what was written before.
        """
        ...


DIRECT = "redline.direct"
