"""What the server says while it runs: lines on standard error that never hold it up, control characters escaped.

A terminal may be held (Ctrl-S, a pager) and a pipe may be full. Whoever writes to it then waits, and with the event
loop every stream would wait too. So a thread of its own writes, and what it cannot write in time is dropped and
counted.
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

    as_json: each is a JSON object.

    Those of libraries are written from that level or from warning on, whichever is higher.
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
    """Writes log records to a file descriptor, from a thread; drops and counts what it cannot write in time."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._waiting: queue.Queue[str] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        self._closing = False
        # A daemon, which writes by os.write: held by a terminal, it can hold neither the process's end nor sys.stderr.
        self._thread = threading.Thread(target=self._write, name="lines", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record for the thread; never blocks. Beyond MOST_WAITING lines it is dropped."""
        line = printable(self.format(record))
        try:
            self._waiting.put_nowait(f"{line}\n")
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what still waits, for END_S seconds at most, and take no more."""
        self._closing = True
        with suppress(queue.Full):
            self._waiting.put_nowait("")  # so that the thread looks
        self._thread.join(END_S)
        super().close()

    def _write(self) -> None:
        while not (self._closing and self._waiting.empty()):
            line = self._waiting.get()
            if self._dropped:
                line, self._dropped = f"({self._dropped} lines were dropped here: nobody read them)\n{line}", 0
            data = line.encode(errors="backslashreplace")
            with suppress(OSError):  # nobody is there to read them
                while data:
                    data = data[os.write(self._descriptor, data) :]


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level and message, or, for a request, its fields in place of the message."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        stamp = clock.strftime("%Y-%m-%dT%H:%M:%SZ", clock.gmtime(record.created))
        fields: dict[str, object] | None = getattr(record, "fields", None)
        told = {"message": record.getMessage()} if fields is None else fields
        line: dict[str, object] = {"time": stamp, "level": record.levelname, **told}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def printable(text: str) -> str:
    """The text with every character escaped that is not printable, as a terminal might obey it; line ends stay."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )
