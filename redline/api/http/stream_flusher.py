"""Writes streams in the event loop iteration in which their tokens arrive, without waking a task for each.

A task that wakes, passes through the layers between it and the socket, and sleeps again costs the same as all other
work on a token. So while an answer only continues, one callback per iteration writes all streams that have new
tokens.
"""

from typing import Protocol


class Flushable(Protocol):
    """A stream with data to write."""

    def flush(self) -> None:
        """Write everything received so far."""
        ...


class StreamFlusher:
    """The streams that have new data. Everything runs in one event loop."""

    def __init__(self) -> None:
        self._full: list[Flushable] = []

    def add(self, stream: Flushable) -> None:
        """Have the stream flushed once, however much more arrives for it before that."""
        self._full.append(stream)

    def flush(self) -> None:
        """Flush every stream now."""
        full, self._full = self._full, []
        for stream in full:
            stream.flush()


class ImmediateWriter(Protocol):
    """A connection with a streamed response under way: `scope["extensions"][DIRECT]`."""

    @property
    def lags(self) -> bool:
        """Whether the client has not yet read earlier data."""
        ...

    def write_part(self, body: bytes) -> bool:
        """Write a non-empty part of the body, like `http.response.body` with more_body set.

        Returns False, and writes nothing, if the client has disconnected or has not yet read earlier data.
        """
        ...


DIRECT = "redline.direct"
