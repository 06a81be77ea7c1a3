"""A worker's process: reads its config, loads the model, says that it is ready, serves until told to stop.

Its standard input is a pipe from the process that started it, which writes one line and keeps it open. When that
process dies, however it dies, the pipe ends and so does the worker.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from redline.errors import RedlineError
from redline.ops import native
from redline.wire.channel import SocketInbox, SocketOutbox
from redline.wire.news import Failed
from redline.worker.config import WorkerConfig
from redline.worker.engine import Engine


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole group; the parent says when to stop
    logging.basicConfig(
        level=os.environ.get("REDLINE_LOG", "WARNING").upper(), format="worker: %(levelname)s %(message)s"
    )
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    threading.Thread(target=_leave_with_parent, name="parent", daemon=True).start()
    outbox = SocketOutbox(config.outbox)
    try:
        with _progress() as progress:
            engine = Engine.load(config.weights, config.engine, progress=progress)
    except RedlineError as error:
        outbox.put(Failed(reason=str(error)))
        outbox.close()
        return 1
    except MemoryError as error:
        outbox.put(Failed(reason=f"out of memory while loading: {error}; `redline doctor` prints what fits"))
        outbox.close()
        return 1
    with SocketInbox(config.inbox) as inbox, outbox:
        outbox.put(engine.ready)
        engine.serve(inbox, outbox)
    return 0


def _leave_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)  # nobody is left to tell


@contextlib.contextmanager
def _progress() -> Generator[Callable[[int, int], object]]:
    """A bar on standard error; it shows once loading has taken a while."""
    console = Console(stderr=True)
    if native.must_build():
        console.print("building the CPU kernels for this machine (once, about 20 s)", style="dim")
    columns = TextColumn("loading weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("load", total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update


if __name__ == "__main__":
    sys.exit(main())
