"""The server's log: lines on standard error that never block the event loop, with control characters escaped.

A terminal may be paused (Ctrl-S, a pager) and a pipe may be full. A write then blocks, and if the event loop did it,
every stream would stall. So a separate thread writes, and lines that it cannot write in time are dropped and counted.
"""

import json
import logging
import os
import queue
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

from redline import clock

STDERR = 2
MOST_WAITING = 1000  # lines
END_S = 1.0  # for the last lines to be written

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@contextmanager
def lines_on_stderr(level: str, *, as_json: bool = False) -> Generator[None]:
    """While inside, log records of `level` (a key of LEVELS) and above are written to standard error.

    as_json: each record is a JSON object. Records of libraries are written from that level or from warning on,
    whichever is higher.
    """
    root, ours = logging.getLogger(), logging.getLogger("redline")
    lines = Lines(STDERR)
    lines.setLevel(LEVELS[level])
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    lines.setFormatter(JsonLines() if as_json else text)
    before = ours.level
    root.addHandler(lines)
    ours.setLevel(LEVELS[level])
    try:
        yield
    finally:
        ours.setLevel(before)
        root.removeHandler(lines)
        lines.close()


class Lines(logging.Handler):
    """Writes log records to a file descriptor from a thread; drops and counts those that it cannot write in time."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._waiting: queue.Queue[str] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        self._closing = False
        # A daemon thread that uses os.write: when it blocks, it blocks neither the process's exit nor sys.stderr.
        self._thread = threading.Thread(target=self._write, name="lines", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record for the thread; never blocks. With MOST_WAITING lines queued, the record is dropped."""
        line = printable(self.format(record))
        try:
            self._waiting.put_nowait(f"{line}\n")
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write the queued lines, for at most END_S seconds, and accept no more."""
        self._closing = True
        with suppress(queue.Full):
            self._waiting.put_nowait("")  # wakes the thread up
        self._thread.join(END_S)
        super().close()

    def _write(self) -> None:
        while not (self._closing and self._waiting.empty()):
            line = self._waiting.get()
            if self._dropped:
                line, self._dropped = f"({self._dropped} lines were dropped here: stderr was blocked)\n{line}", 0
            data = line.encode(errors="backslashreplace")
            with suppress(OSError):  # standard error is closed
                while data:
                    data = data[os.write(self._descriptor, data) :]


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level and message, or, for a request, its fields in place of the message."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a newline."""
        stamp = clock.strftime("%Y-%m-%dT%H:%M:%SZ", clock.gmtime(record.created))
        fields: dict[str, object] | None = getattr(record, "fields", None)
        told = {"message": record.getMessage()} if fields is None else fields
        line: dict[str, object] = {"time": stamp, "level": record.levelname, **told}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def printable(text: str) -> str:
    """The text with unprintable characters escaped, since a terminal may interpret them; newlines stay."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )
