"""What signals ask of the process that serves."""

import asyncio
import os
from collections.abc import Callable


class Signals:
    """What the process was asked. stop: end, once running answers have ended. now: asked again, so end at once."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.now = asyncio.Event()
        self.reload: Callable[[], object] | None = None

    def end(self) -> None:
        """Asked to end."""
        (self.now if self.stop.is_set() else self.stop).set()

    def hang_up(self) -> None:
        """SIGHUP: for a service it means to read its files again; for a program in a terminal, that this has closed."""
        if self.reload is not None and not _has_terminal():
            self.reload()
        else:
            self.end()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
