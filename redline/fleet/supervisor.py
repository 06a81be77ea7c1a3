"""Starts the workers of a deployment, and starts each again that ends: once more at once, then after longer and longer.

A start of a worker has an epoch and sockets of its own. Whatever an earlier one still says is read by nobody, so it
cannot be taken for the word of the one that has its place. Why a start has ended is said in the log, and kept until the
next one has ended too (`Link.before`).
"""

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from redline.api.gateway import LOOK_S, Gateway
from redline.errors import ConfigError, WorkerLost
from redline.fleet.config import Place, ServeConfig
from redline.route.links import Link
from redline.wire.channel import IPC, AsyncSocketInbox, SocketOutbox, ipc_address
from redline.wire.news import Ready, Stop
from redline.worker.config import AREA_BYTES, WorkerConfig

STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # the last: its terminal was closed
STOP_S = 10.0  # for a worker to abort what runs, prove its pages and leave
WORDS_S = 0.5  # for the last message of a worker that has ended to arrive
SILENCE_S = 60  # without a heartbeat, after which a worker is ended: nothing will come of the answers that wait
AGAIN_S, LONGEST_S = 0.5, 30.0  # before a second start in a row, doubled with each one more; and at most
WELL_S = 60.0  # of being ready, after which earlier ends do not count
REPLACED = "it is replaced"  # by itself: why a start has ended that the operator wanted to end
MOST_ENDS = 5  # of one worker in a row, after which it is given up

log = logging.getLogger("redline.fleet")


class End(NamedTuple):
    """How one start of a worker has ended."""

    why: str
    ready: bool  # whether it had loaded its model
    seconds: float  # from there on

    @property
    def well(self) -> bool:
        """Whether it served for long enough that its end says nothing of the next start."""
        return self.ready and self.seconds >= WELL_S


class Supervised:
    """One worker through all its starts. `given_up` is why there will be no other."""

    def __init__(
        self,
        place: Place,
        weights: str,
        gateway: Gateway,
        sockets: Path,
        parcels: Path | None,
        *,
        again: bool,
        drain_s: float,
    ) -> None:
        """sockets: the folder for its sockets. parcels: for what it hands over. again: whether it is started again.

        drain_s: for its answers to end, where it is replaced.
        """
        self.place = place
        self.given_up: str | None = None
        self.ready = asyncio.Event()  # set when it is ready for the first time
        self._weights = weights
        self._gateway = gateway
        self._sockets = sockets
        self._parcels = parcels
        self._again = again
        self._drain_s = drain_s
        self._stopping = asyncio.Event()
        self._replacing = asyncio.Event()
        self._in_a_row = 0

    async def live(self) -> None:
        """Start it, again and again, until it is given up or told to stop; then no process of it is left."""
        epoch = 0
        while not self._stopping.is_set():
            epoch += 1
            try:
                end = await self._start(epoch)
            except ConfigError as error:  # of the deployment: it would be so again
                self.given_up = str(error)
                return
            except Exception as error:  # no process, no socket: as good a reason as any to try again
                log.exception("%s could not be started", self.place.name)
                end = End(f"the worker could not be started: {error}", ready=False, seconds=0.0)
            if self._stopping.is_set():
                return
            if end.why == REPLACED:
                continue
            self._in_a_row = 1 if end.well else self._in_a_row + 1
            if not self._again or not self.ready.is_set() or self._in_a_row >= MOST_ENDS:
                self.given_up = end.why
                return
            pause = 0.0 if self._in_a_row == 1 else min(AGAIN_S * 2 ** (self._in_a_row - 2), LONGEST_S)
            after = f" in {pause:g} s" if pause else ""
            log.error("%s: %s; it is started again%s", self.place.name, end.why, after)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def replace(self) -> None:
        """Have it answer nothing new, leave once its answers have ended, and be started again."""
        self._replacing.set()

    def stop(self) -> None:
        """Have it abort what it runs and leave; `live` returns once it has."""
        self._stopping.set()

    async def _start(self, epoch: int) -> End:
        """One start, to its end."""
        name, clock = f"{self.place.name}.{epoch}", asyncio.get_running_loop().time
        jobs, deltas = (ipc_address(self._sockets, f"{name}.{kind}") for kind in ("jobs", "deltas"))
        with AsyncSocketInbox(deltas) as inbox, SocketOutbox(jobs) as outbox:
            link = self._gateway.join(self.place.name, outbox, self.place.role, epoch, jobs)
            try:
                process = start_worker(self.place, epoch, self._weights, jobs, deltas, self._parcels)
            except OSError as error:
                self._gateway.lose(link, f"no process can be started: {error}")
                raise
            link.pid = process.pid
            waiter = ThreadPoolExecutor(1, thread_name_prefix="waiter")  # its own: the loop's have other work
            ended = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(waiter, process.wait))
            following = asyncio.create_task(self._follow(link, inbox))
            silence = asyncio.create_task(until_silent(link))
            stopping = asyncio.create_task(self._stopping.wait())
            ready_at: float | None = None
            try:
                first = asyncio.create_task(_until(lambda: link.ready is not None))
                await asyncio.wait({ended, following, stopping, first}, return_when=asyncio.FIRST_COMPLETED)
                if link.ready is not None:
                    ready_at = clock()
                    self.ready.set()
                    replacing = asyncio.create_task(self._drained(link))
                    ends = {ended, following, stopping, silence, replacing}
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    replacing.cancel()
                    if replacing.done() and not replacing.cancelled():
                        self._gateway.lose(link, REPLACED, asked=True)
                first.cancel()
                if ended.done() and not stopping.done():
                    await asyncio.wait({following}, timeout=WORDS_S)  # it may have spoken just before it ended
                why = self._why(link, process, silence.done(), ready_at is not None)
            finally:
                for task in (silence, stopping):
                    task.cancel()
                await self._end(link, process, ended, ready=ready_at is not None)
                following.cancel()
                await asyncio.wait({following})
                if not following.cancelled() and (error := following.exception()) is not None:
                    log.error("what %s said could not be taken in", self.place.name, exc_info=error)
                waiter.shutdown(wait=False)
                self._gateway.lose(link, "the server is stopping")  # where nothing else has been said
            return End(why, ready_at is not None, 0.0 if ready_at is None else clock() - ready_at)

    async def _drained(self, link: Link) -> None:
        """Returns once it is to be replaced, and its answers have ended or had drain_s seconds to."""
        self._replacing.clear()
        await self._replacing.wait()
        log.info("%s is replaced", link.name)
        link.draining = True
        until = asyncio.get_running_loop().time() + self._drain_s
        while link.jobs and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)

    async def _follow(self, link: Link, inbox: AsyncSocketInbox) -> None:
        """Hands on what it says, until it says that it ends."""
        while link.lost is None:
            self._gateway.take(link, await inbox.get())

    def _why(self, link: Link, process: "subprocess.Popen[bytes]", silent: bool, ready: bool) -> str:
        if link.lost == REPLACED:
            return REPLACED
        if link.lost is not None:
            return f"the worker has ended: {link.lost}" if ready else link.lost
        if process.poll() is not None:
            while_loading = "" if ready else " while it was loading the model"
            why = f"the worker has ended with code {process.returncode}{while_loading}"
        elif silent:
            why = f"the worker has not been heard of for {SILENCE_S} s"
        else:
            why = "the worker's messages are not read any more"
        self._gateway.lose(link, why)
        return why

    async def _end(
        self, link: Link, process: "subprocess.Popen[bytes]", ended: "asyncio.Future[int]", *, ready: bool
    ) -> None:
        """Leaves no process behind. One that is told to stop has STOP_S to prove its pages, one that has said its last
        words as long to leave; one that nothing is heard of, or that still loads, has nothing to lose."""
        if ready and process.poll() is None and not self._gateway.links.is_silent(link):
            if self._stopping.is_set() or link.lost == REPLACED:
                link.outbox.put(Stop())
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), STOP_S)
        if process.poll() is None:
            process.kill()
        await ended
        Path(link.inbox.removeprefix(IPC)).unlink(missing_ok=True)  # which it has left there where it was killed
        if self._parcels is not None:
            for left in self._parcels.glob(f"parcels-{process.pid}-*"):
                left.unlink(missing_ok=True)
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()


class Supervisor:
    """All workers of a deployment: `start`, then `given_up` while they serve, then `end` and `ended`."""

    def __init__(self, config: ServeConfig, gateway: Gateway, sockets: Path) -> None:
        again, places = config.resume_s > 0, config.places
        lenders = sum(place.role == "prefill" and place.transport == "shared" for place in places)
        self._parcels = _folder_for_parcels(lenders) if lenders else None
        self.workers = [
            Supervised(place, config.weights, gateway, sockets, self._parcels, again=again, drain_s=config.drain_s)
            for place in places
        ]
        self._gateway = gateway
        self._lives: list[asyncio.Task[None]] = []

    async def start(self, stop: asyncio.Event, serving: "asyncio.Task[None]") -> Ready | None:
        """Start all of them: what jobs may be like once each is ready; None where `stop` was set before.

        Raises ConfigError with the reason of the first that cannot load its model, WorkerLost where it had no time to
        give one, or where `serving` has ended meanwhile.
        """
        self._lives = [asyncio.create_task(worker.live()) for worker in self.workers]
        all_ready = asyncio.gather(*(worker.ready.wait() for worker in self.workers))
        stopping = asyncio.create_task(stop.wait())
        try:
            while not all_ready.done() and not stopping.done():
                running = {life for life in self._lives if not life.done()}
                await asyncio.wait({all_ready, stopping, serving, *running}, return_when=asyncio.FIRST_COMPLETED)  # pyright: ignore[reportCallIssue, reportArgumentType]
                if serving.done():
                    raise WorkerLost(f"the server has failed while the model was loading: {serving.exception()}")
                for worker, life in zip(self.workers, self._lives, strict=True):
                    if life.done() and not stopping.done():
                        life.result()
                        raise _failure(worker)
            return None if stopping.done() else self._gateway.ready
        finally:
            stopping.cancel()
            all_ready.cancel()
            with suppress(asyncio.CancelledError):
                await all_ready

    async def given_up(self) -> str:
        """Returns once no worker is left that answers, nor will be: why."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._gateway.look()
            left = [worker for worker in self.workers if worker.given_up is None and worker.place.role != "prefill"]
            if not left or all(life.done() for life in self._lives):
                reasons = (worker.given_up for worker in self.workers if worker.given_up is not None)
                return next(reasons, "all workers have ended")

    def replace(self, name: str) -> bool:
        """Have a worker leave and be started again, its answers going on; False where there is none of that name."""
        found = [worker for worker in self.workers if worker.place.name == name]
        for worker in found:
            worker.replace()
        return bool(found)

    def end(self) -> None:
        """Have all leave, and start none again."""
        for worker in self.workers:
            worker.stop()

    async def ended(self) -> None:
        """Returns, behind `end`, once no process of theirs is left."""
        await asyncio.gather(*self._lives, return_exceptions=True)
        if self._parcels is not None:
            shutil.rmtree(self._parcels, ignore_errors=True)


def _folder_for_parcels(lenders: int) -> Path:
    """A folder of mode 0700, in the host's memory where that has room for the parcels of so many workers.

    Raises ConfigError.
    """
    memory = Path("/dev/shm")
    try:
        room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > lenders * 2 * AREA_BYTES
        return Path(tempfile.mkdtemp(prefix="redline-", dir=memory if room else None))
    except OSError as error:
        raise ConfigError(f"no folder for what workers hand over: {error}; set TMPDIR to one") from None


def start_worker(
    place: Place, epoch: int, weights: str, inbox: str, outbox: str, parcels: Path | None
) -> "subprocess.Popen[bytes]":
    """A worker's process, which reads its config from a pipe that ends with this process."""
    environment = dict(os.environ)
    if place.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.devices))
    # Ctrl-C, and a supervisor's SIGTERM, reach the whole group, and a child inherits what is blocked: the worker is not
    # interrupted even while it imports, before it can say so itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    process = subprocess.Popen([sys.executable, "-m", "redline.worker.main"], stdin=subprocess.PIPE, env=environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    told = WorkerConfig(
        weights=weights,
        engine=place.engine,
        inbox=inbox,
        outbox=outbox,
        name=place.name,
        epoch=epoch,
        role=place.role,
        cores=place.cores,
        transport=place.transport,
        tells_cache=place.tells_cache,
        parcels=None if parcels is None else str(parcels),
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, which its caller will see
        process.stdin.write(msgspec.json.encode(told) + b"\n")
        process.stdin.flush()
    return process


async def until_silent(link: Link) -> None:
    """Returns once no heartbeat has come for SILENCE_S. Seconds are counted by waking up in each: where this process is
    stopped together with its worker, none pass."""
    silent, beats = 0, link.beats
    while silent < SILENCE_S:
        await asyncio.sleep(1)
        silent, beats = silent + 1 if link.beats == beats and link.ready is not None else 0, link.beats


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def _failure(worker: Supervised) -> Exception:
    """Why a worker could not load its model: in its own words, or that it had none."""
    why = worker.given_up or "the worker has ended"
    return WorkerLost(why) if why.startswith("the worker has ended with code") else ConfigError(why)
