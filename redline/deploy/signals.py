"""Signal handling of the serving process."""

import asyncio
import os
from collections.abc import Callable


class Signals:
    """Stop requests. stop: shut down once running answers have ended. now: a second request, so shut down at once."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.now = asyncio.Event()
        self.reload: Callable[[], object] | None = None

    def end(self) -> None:
        """SIGINT, SIGTERM, or the admin route for draining."""
        (self.now if self.stop.is_set() else self.stop).set()

    def hang_up(self) -> None:
        """SIGHUP: a service reads its files again; a program in a terminal shuts down, as the terminal was closed."""
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
