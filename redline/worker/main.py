"""A worker's process: reads its config, loads the model, reports that it is ready, and serves until a Stop arrives.

Its standard input is a pipe from the process that started it, which writes one line of configuration and keeps the pipe
open. When that process dies, for whatever reason, the pipe closes and the worker exits.
"""

import contextlib
import ctypes
import functools
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import zmq
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from redline import clock
from redline.errors import RedlineError
from redline.kernels.cpu import native
from redline.limits import open_files
from redline.messages.channel import IPC, SocketInbox, SocketOutbox
from redline.messages.kv_sockets import Publisher
from redline.messages.machines import Listening
from redline.messages.news import Failed, Heartbeat
from redline.worker.cache_reports import CacheReports
from redline.worker.config import WorkerConfig
from redline.worker.delta_router import DeltaRouter
from redline.worker.engine import EngineCore, pick_device
from redline.worker.heartbeat import LoopStatus, LoopWatchdog
from redline.worker.page_events import PageEvents
from redline.worker.service import Service
from redline.worker.transfer_paths import aside, carriers
from redline.worker.turn import one_line
from redline.worker.urgency import Urgency

FLUSH_S = 1.0  # seconds for the last message to be sent before a process that hangs exits
_PR_SET_PDEATHSIG = 1  # of prctl(2)

_log = logging.getLogger(__name__)


def main() -> int:
    """Serve until a Stop arrives; -> 0. If the worker fails, it sends Failed and the process exits with code 1."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole process group; the parent decides when to stop
    if sys.platform == "linux":  # SIGCONT when the parent dies: a suspended worker could not exit
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    logging.basicConfig(
        level=os.environ.get("REDLINE_LOG", "WARNING").upper(), format="worker: %(levelname)s %(message)s"
    )
    open_files()  # a parent such as Ray may have a lower limit
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    if config.cores:  # before any kernel thread is started
        os.sched_setaffinity(0, config.cores)
    urgency = Urgency(own_cores=bool(config.cores))
    urgency.take(config.role)
    threading.Thread(target=_leave_with_parent, args=(config,), name="parent", daemon=True).start()
    key = None if config.key is None else config.key.encode()
    with SocketOutbox(config.outbox, key) as outbox:
        unsaid = threading.Semaphore()

        def say(reason: str, outbox: SocketOutbox = outbox) -> None:
            """Sends the reason why the worker ends; only the first reason is sent, since others follow from it. outbox:
            an outbox of the calling thread's own."""
            if unsaid.acquire(blocking=False):
                outbox.put(Failed(reason=reason))

        try:
            _work(config, key, outbox, say, urgency)
        except Exception as error:  # the outermost handler: sends one line and exits
            _log.info("the worker ends", exc_info=error)
            say(_reason(error))
        else:
            return 0
    zmq.Context.instance().term()  # returns once the last message is sent
    os._exit(1)  # a normal exit may crash or hang if a device has failed


class _Say(Protocol):
    def __call__(self, reason: str, outbox: SocketOutbox = ...) -> None: ...


def _work(config: WorkerConfig, key: bytes | None, outbox: SocketOutbox, say: _Say, urgency: Urgency) -> None:

    def lost(reason: str) -> None:
        """Handles the failure of another rank; this rank's main thread may be waiting for it in an all-reduce."""
        with SocketOutbox(config.outbox, key) as last_words:
            say(reason, last_words)
        clock.sleep(FLUSH_S)
        os._exit(1)

    with (
        contextlib.ExitStack() as opened,
        SocketInbox(config.inbox, key) as inbox,
        SocketOutbox(config.outbox, key) as beats,
    ):
        if not config.inbox.startswith(IPC):  # TCP: report the port that was chosen
            outbox.put(Listening(inbox=inbox.address))
        publisher = None
        if (told := config.events) is not None:  # before loading a model, which may take minutes
            publisher = Publisher(told.endpoint, told.replay, told.topic)
            opened.callback(publisher.close)
        handoffs = aside(config.transport, pick_device(config.engine.device), config.engine.ranks)
        with _progress() as progress:
            engine = EngineCore.load(
                config.weights, config.engine, progress=progress, lost=lost, aside=handoffs, alone=config.alone
            )
        if engine.model.device.type == "cpu" and native.library() is None:
            _log.warning("%s", native.why_not())
        engine.measure()
        gc.collect()
        gc.freeze()  # existing objects are permanent: exclude them from garbage collections between steps
        pulse = LoopStatus()
        ready = engine.ready
        hearers = opened.enter_context(DeltaRouter(outbox))
        services: list[Service] = [urgency]
        if config.tells_cache:
            services.append(CacheReports(engine.planner, hearers))
        if publisher is not None and told is not None:
            engine.planner.log_pages()
            services.append(PageEvents(engine.planner.page_changes, publisher, told.number))
        if config.transport is not None:
            folder = Path(config.parcels) if config.parcels is not None else None
            found = carriers(config.transport, folder, engine.model.device, config.engine.ranks)
            outbox_of = functools.partial(SocketOutbox, key=key)
            # It can send KV chunks in every role, since its role may be switched.
            exchange = engine.exchange(found, lends=True, outbox_of=outbox_of)
            opened.callback(exchange.close)
            services.append(exchange)
            ready = msgspec.structs.replace(ready, area=exchange.told, format=exchange.format)

        def hung(reason: str) -> None:
            say(reason, beats)
            clock.sleep(FLUSH_S)
            os._exit(1)  # a thread that is inside a kernel cannot be ended otherwise

        with LoopWatchdog(pulse, beats, engine.step_tokens, hung, engine.model.device.type):
            hearers.put(ready)
            hearers.put(Heartbeat())
            engine.serve(inbox, hearers, services, pulse=pulse, failed=lambda error: say(_reason(error)))


def _reason(error: Exception) -> str:
    """The reason of a failure, in one line for the operator."""
    match error:
        case RedlineError():
            return str(error)
        case MemoryError() | torch.OutOfMemoryError():
            return f"out of memory: {one_line(error)}; `redline doctor` prints what fits"
        case _:
            return f"unexpected error in worker: {one_line(error)}; set REDLINE_LOG=INFO for the traceback"


def _leave_with_parent(config: WorkerConfig) -> None:
    while os.read(0, 4096):
        pass
    # The parent is dead, so all workers exit now and remove the leftover sockets and areas themselves.
    if config.inbox.startswith(IPC):
        _take_away(Path(config.inbox.removeprefix(IPC)).parent, Path.is_socket)
    if config.parcels is not None:
        _take_away(Path(config.parcels), Path.is_file)
    os._exit(1)  # the parent is dead


def _take_away(folder: Path, wanted: Callable[[Path], bool]) -> None:
    """Deletes the files of a folder for which `wanted` is true, and the folder if it is empty then."""
    with contextlib.suppress(OSError):  # another worker may delete them at the same time
        for left in folder.iterdir():
            if wanted(left):
                left.unlink(missing_ok=True)
        folder.rmdir()


@contextlib.contextmanager
def _progress() -> Generator[Callable[[int, int], object]]:
    """A progress bar on standard error for loading weights."""
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
