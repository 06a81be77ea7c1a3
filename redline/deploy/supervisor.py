"""Starts the workers of a deployment, and restarts those that end (`supervised_process.py`) if they are wanted.

Each start of a worker has an epoch and its own sockets. Late messages of an earlier start are not read, so they cannot
be mistaken for messages of its successor. The reason why a start ended is logged, and kept until the next one has ended
too (`WorkerHandle.previous_end`).
"""

import asyncio
import logging
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec

from redline.api.gateway.worker_monitor import CHECK_S, WorkerMonitor
from redline.deploy.config import ServeConfig, WorkerSpec
from redline.deploy.machines import Machines
from redline.deploy.process import LocalProcess, Process, folder_for_parcels, start_worker
from redline.deploy.supervised_process import SILENCE_S, ProcessEnd, SupervisedProcess, until_silent
from redline.errors import ConfigError, WorkerLost
from redline.messages.channel import IPC, AsyncSocketInbox, Outbox, SocketOutbox, ipc_address
from redline.messages.codec import Wire
from redline.messages.machines import Listening, Order
from redline.messages.news import Ready, Role, Stop
from redline.router.roles import refusal
from redline.router.worker_registry import WorkerHandle, WorkerRegistry
from redline.transport.choice import WITHIN_A_HOST
from redline.worker.config import WorkerConfig

STOP_S = 10.0  # for a worker to abort its jobs, check that all pages are free, and exit
WORDS_S = 0.5  # for the last message of a worker that has ended to arrive
REPLACED = "it is replaced"  # reason of an end that the operator requested: the worker is restarted
SPARED = "it is scaled down"  # reason of an end that the autoscaler requested: the worker is idle until it is wanted
PATIENCE_S = 2.0  # for a machine to join, before a warning that a worker waits for it

log = logging.getLogger("redline.deploy")


State = Literal["idle", "starting", "ready", "ending", "given up"]
"""Of a worker. idle: it is scaled down and does not run; ending: it is scaled down and still drains."""


class WorkerStatus(NamedTuple):
    """The status of one worker of a deployment, as the autoscaler sees it.

    spare: it runs only on demand. role: the role that it has, or will start with. failed: why its last start failed, if
    it is idle for that reason.
    """

    name: str
    state: State
    spare: bool
    role: Role = "both"
    failed: str | None = None


class Follower(Protocol):
    """Receives starts, messages and ends of workers: a `WorkerMonitor` if this process has the API, else a `Fleet`."""

    workers: WorkerRegistry

    @property
    def ready(self) -> Ready | None:
        """The limits of jobs; None while no worker can answer."""
        ...

    def join(
        self, name: str, outbox: Outbox, role: Role = "both", epoch: int = 1, inbox: str = "", at: str | None = None
    ) -> WorkerHandle:
        """A worker has been started. outbox: sends to it. inbox: the address that it reads. at: its machine; None: this
        machine."""
        ...

    def receive(self, worker: WorkerHandle, messages: Sequence[Wire]) -> None:
        """Process messages of a worker."""
        ...

    def drain(self, worker: WorkerHandle) -> None:
        """A worker is to be replaced."""
        ...

    def mark_down(self, worker: WorkerHandle, reason: str, *, asked: bool = False) -> None:
        """A worker has ended; idempotent. asked: it ended on request."""
        ...

    def check_heartbeats(self) -> None:
        """Check for workers without heartbeats; called every CHECK_S."""
        ...


class Supervised(SupervisedProcess):
    """One worker through all its starts."""

    def __init__(
        self,
        place: WorkerSpec,
        weights: str,
        gateway: Follower,
        sockets: Path,
        parcels: Path | None,
        *,
        again: bool,
        proven: asyncio.Event,
        drain_s: float,
        machines: Machines | None = None,
    ) -> None:
        """sockets: the folder for its sockets. parcels: the folder for KV transfer buffers. again, proven: as in
        `SupervisedProcess`.

        drain_s: seconds that its answers get to finish when it is replaced. machines: the other machines, if any.
        """
        super().__init__(place.name, again=again, proven=proven)
        self.place = place
        self.role: Role = place.role  # its current role, with which it will also be restarted
        self._machines = machines
        self._weights = weights
        self._gateway = gateway
        self._sockets = sockets
        self._parcels = parcels
        self._drain_s = drain_s
        self._replacing = asyncio.Event()
        self._runs = False  # a start is in progress or running
        self._failed: str | None = None
        if place.spare:
            self._wanted.clear()

    def replace(self) -> None:
        """Drain it (no new jobs, running answers finish), stop it, and restart it."""
        self._replacing.set()

    def want(self, role: Role) -> None:
        """Have it run, with `role` at first."""
        self.role, self._failed = role, None
        self._wanted.set()

    def spare(self) -> None:
        """Drain it and stop it; it is started again once it is wanted."""
        self._wanted.clear()
        self._replacing.set()

    @property
    def seat(self) -> WorkerStatus:
        """Its status."""
        link = next((link for link in self._gateway.workers if link.name == self.name), None)
        state: State = "idle"
        if self.given_up is not None:
            state = "given up"
        elif not self._wanted.is_set():
            state = "ending" if self._runs else "idle"
        else:
            state = "ready" if self._runs and link is not None and link.ready is not None else "starting"
        return WorkerStatus(self.name, state, self.place.spare, self.role, self._failed)

    def _rests(self, why: str) -> bool:
        if not self.place.spare:
            return False
        log.error("%s: %s; the autoscaler skips it for now", self.name, why)
        self._wanted.clear()
        self._failed, self._in_a_row = why, 0
        return True

    async def _start(self, epoch: int) -> ProcessEnd:
        self._runs = True
        self._replacing.clear()
        try:
            end = await self._run(epoch)
        finally:
            self._runs = False
        if end.why == SPARED:
            log.info("%s has ended, and is idle until it is wanted", self.name)
        return end

    async def _run(self, epoch: int) -> ProcessEnd:
        name, clock = f"{self.place.name}.{epoch}", asyncio.get_running_loop().time
        if not await self._place_is_there():
            return ProcessEnd("the server is stopping", ready=False, seconds=0.0)
        jobs, deltas = self._addresses(name)
        with AsyncSocketInbox(deltas, self._key) as inbox, _Later(self._key) as outbox:
            if jobs.startswith(IPC):
                outbox.open(jobs)
            link = self._gateway.join(self.place.name, outbox, self.role, epoch, outbox.address, self.place.at)
            try:
                process = self._process(epoch, jobs, inbox.address)
            except OSError as error:
                self._gateway.mark_down(link, f"no process can be started: {error}")
                raise
            link.pid, ended, began = process.pid, process.ended, clock()
            following = asyncio.create_task(self._follow(link, inbox, outbox))
            silence = asyncio.create_task(until_silent(link))
            stopping = asyncio.create_task(self._stopping.wait())
            leaving = asyncio.create_task(process.leaving.wait())
            ready_at: float | None = None
            try:
                first = asyncio.create_task(_until(lambda: link.ready is not None))
                await asyncio.wait({ended, following, stopping, first, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if link.ready is not None:
                    ready_at = clock()
                    self._is_ready()
                    if self.place.spare:
                        log.info("%s takes requests, %.1f s after its start", link.name, ready_at - began)
                    replacing = asyncio.create_task(self._drained(link, leaving))
                    ends = {ended, following, stopping, silence, replacing}
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    replacing.cancel()
                    if replacing.done() and not replacing.cancelled():
                        self._gateway.mark_down(link, REPLACED if self._wanted.is_set() else SPARED, asked=True)
                elif leaving.done():
                    self._gateway.mark_down(link, REPLACED, asked=True)
                first.cancel()
                if ended.done() and not stopping.done():
                    await asyncio.wait({following}, timeout=WORDS_S)  # its last message may give the reason
                why = self._why(link, process, silence.done(), ready_at is not None)
            finally:
                for task in (silence, stopping, leaving):
                    task.cancel()
                await self._end(link, process, ready=ready_at is not None)
                following.cancel()
                await asyncio.wait({following})
                if not following.cancelled() and (error := following.exception()) is not None:
                    log.error("messages of %s could not be processed", self.place.name, exc_info=error)
                self._gateway.mark_down(link, "the server is stopping")  # no effect if another reason was given before
            seconds = 0.0 if ready_at is None else clock() - ready_at
            return ProcessEnd(why, ready_at is not None, seconds, excused=why in (REPLACED, SPARED) or process.gone)

    async def _place_is_there(self) -> bool:
        """Returns once its machine has joined; False if it is stopped before."""
        if self.place.at is None:
            return True
        assert self._machines is not None, "a worker on another machine, and no address for that machine to join"
        joined = asyncio.create_task(self._machines.joined(self.place.at))
        stopping = asyncio.create_task(self._stopping.wait())
        if not (await asyncio.wait({joined}, timeout=PATIENCE_S))[0]:
            log.warning("%s waits for machine %s to join at %s", self.place.name, self.place.at, self._machines.address)
        await asyncio.wait({joined, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (joined, stopping):
            task.cancel()
        return not self._stopping.is_set()

    @property
    def _key(self) -> bytes | None:
        return None if self._machines is None else self._machines.key.encode()

    def _addresses(self, name: str) -> tuple[str, str]:
        """The addresses for its jobs and for its messages. Unix sockets on this machine; if another machine has to
        reach them, any free port of the address by which machines reach one another."""
        port = "" if self._machines is None else f"tcp://{self._machines.host}:*"
        jobs = ipc_address(self._sockets, f"{name}.jobs")
        deltas = ipc_address(self._sockets, f"{name}.deltas")
        if self._machines is None:
            return jobs, deltas
        if self.place.at is not None:
            return port, port
        return (jobs if self.place.transport is None else port), deltas

    def _process(self, epoch: int, jobs: str, deltas: str) -> Process:
        """Start its process, on this machine or on that of its place. Raises OSError."""
        place = self.place
        told = WorkerConfig(
            weights=place.weights or self._weights,
            engine=place.engine,
            inbox=jobs,
            outbox=deltas,
            name=place.name,
            epoch=epoch,
            role=self.role,
            cores=place.cores,
            transport=place.transport,
            tells_cache=place.tells_cache,
            alone=place.alone,
            events=place.events,
        )
        if place.at is not None and self._machines is not None:  # the agent fills in address, key and folder
            config = msgspec.json.encode(told)
            return self._machines.start(
                place.at, Order(name=place.name, epoch=epoch, config=config, devices=place.devices)
            )
        told = msgspec.structs.replace(
            told,
            parcels=None if self._parcels is None else str(self._parcels),
            key=None if self._machines is None else self._machines.key,
        )
        return LocalProcess(start_worker(told, place.devices), self._parcels)

    async def _drained(self, link: WorkerHandle, leaving: "asyncio.Task[bool]") -> None:
        """Wait until it is to be replaced, or its machine leaves; then drain it: its answers get at most drain_s
        seconds."""
        replacing = asyncio.create_task(self._replacing.wait())
        try:
            await asyncio.wait({replacing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            replacing.cancel()
        log.info("%s is replaced" if self._wanted.is_set() else "%s is draining", link.name)
        self._gateway.drain(link)
        until = asyncio.get_running_loop().time() + self._drain_s
        while link.jobs and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)

    async def _follow(self, link: WorkerHandle, inbox: AsyncSocketInbox, outbox: "_Later") -> None:
        """Forward the worker's messages to the gateway until it is lost or reports its end."""
        while link.lost is None:
            messages = await inbox.get()
            if not outbox.address and isinstance(first := messages[0], Listening):
                outbox.open(first.inbox)
                link.inbox, messages = first.inbox, messages[1:]
            self._gateway.receive(link, messages)

    def _why(self, link: WorkerHandle, process: Process, silent: bool, ready: bool) -> str:
        if link.lost in (REPLACED, SPARED):
            return link.lost
        if link.lost is not None:
            at = "" if self.place.at is None else f"{self.place.at}: "
            return f"the worker has ended: {link.lost}" if ready else f"{at}{link.lost}"
        if process.ended.done():
            while_loading = "" if ready else " while it was loading the model"
            why = f"the worker has ended{process.ended.result()}{while_loading}"
        elif silent:
            why = f"the worker has sent no heartbeat for {SILENCE_S} s"
        else:
            why = "the worker's messages could not be processed"
        self._gateway.mark_down(link, why)
        return why

    async def _end(self, link: WorkerHandle, process: Process, *, ready: bool) -> None:
        """End the process. If it was sent Stop, it has STOP_S to check its pages and exit; if it reported its own end,
        it has STOP_S to exit. If it sends no heartbeats or is still loading, it is killed at once."""
        if ready and not process.ended.done() and not self._gateway.workers.is_silent(link):
            if self._stopping.is_set() or link.lost in (REPLACED, SPARED):
                link.outbox.put(Stop())
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.ended), STOP_S)
        if not process.ended.done():
            process.kill()
        await process.ended
        if link.inbox.startswith(IPC):
            Path(link.inbox.removeprefix(IPC)).unlink(missing_ok=True)  # a killed worker leaves its socket file
        process.close()


class _Later:
    """An outbox with an address that becomes known later, as a worker chooses its own port; until then it queues."""

    def __init__(self, key: bytes | None) -> None:
        self.address = ""  # of the reader, once it is known
        self._key = key
        self._outbox: SocketOutbox | None = None
        self._waiting: deque[Wire] = deque()
        self._opened = ExitStack()

    def open(self, address: str) -> None:
        """Connect to the reader, and send the queued messages. Raises ConfigError."""
        self.address = address
        key = self._key if address.startswith("tcp://") else None
        self._outbox = self._opened.enter_context(SocketOutbox(address, key))
        while self._waiting:
            self._outbox.put(self._waiting.popleft())

    def put(self, message: Wire) -> None:
        """As `Outbox.put`."""
        if self._outbox is None:
            self._waiting.append(message)
        else:
            self._outbox.put(message)

    def __enter__(self) -> "_Later":
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()


class Supervisor:
    """All workers of a deployment: `start`, then `given_up` while they serve, then `end` and `ended`."""

    def __init__(self, config: ServeConfig, gateway: Follower, sockets: Path, machines: Machines | None = None) -> None:
        again, places = config.resume_s > 0, config.places
        here = [place for place in places if place.at is None]
        lenders = sum(place.transport in WITHIN_A_HOST for place in here)
        self._parcels = folder_for_parcels(lenders) if lenders else None
        self._proven = asyncio.Event()
        self.workers = [
            Supervised(
                place,
                config.weights,
                gateway,
                sockets,
                self._parcels,
                again=again,
                proven=self._proven,
                drain_s=config.drain_s,
                machines=machines,
            )
            for place in places
        ]
        self._gateway = gateway
        self._lives: list[asyncio.Task[None]] = []

    async def start(self, stop: asyncio.Event, serving: "asyncio.Task[None]") -> Ready | None:
        """Start all workers that always run. Returns the limits of jobs once one worker can answer and each other is
        ready, or has failed at least once and is being restarted; None if `stop` is set before.

        If no worker is left that could answer, raises ConfigError with the reason that the first of them reported, or
        WorkerLost if that one ended without a reason. Raises WorkerLost if `serving` ends first.
        """
        self._lives = [asyncio.create_task(worker.live()) for worker in self.workers]
        settled = asyncio.create_task(self._settled())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({settled, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return None
            if serving.done():
                raise WorkerLost(f"the server has failed while the model was loading: {serving.exception()}")
            return settled.result()
        finally:
            for task in (stopping, settled):
                task.cancel()

    async def _settled(self) -> Ready:
        """The part of `start` that waits for the workers."""
        awaited, said = [worker for worker in self.workers if not worker.place.spare], set[str]()
        while True:
            for life in self._lives:
                if life.done():
                    life.result()
            ready = self._gateway.ready
            if ready is None and (failed := self._hopeless()) is not None:
                raise _failure(failed)
            for worker in awaited:
                if (why := worker.down) is not None and worker.name not in said and not self._proven.is_set():
                    said.add(worker.name)
                    then = "it is restarted once another worker is ready"
                    log.error("%s: %s; %s", worker.name, why, "it is given up" if worker.given_up else then)
            if ready is not None and all(worker.ready.is_set() or worker.has_failed for worker in awaited):
                return ready
            await asyncio.sleep(0.01)

    def _hopeless(self) -> Supervised | None:
        """The first worker that is down, if no worker is left that could still become ready to answer."""
        starts = [worker for worker in self.workers if worker.down is None and worker.seat.state != "idle"]
        if any(worker.role != "prefill" or not self._proven.is_set() for worker in starts):
            return None
        return next((worker for worker in self.workers if worker.down is not None), None)

    async def given_up(self) -> str:
        """Returns the reason once no worker can answer and none will be restarted."""
        while True:
            await asyncio.sleep(CHECK_S)
            self._gateway.check_heartbeats()
            left = [
                worker
                for worker in self.workers
                if worker.given_up is None and (worker.role != "prefill" or worker.place.spare)
            ]
            if not left or all(life.done() for life in self._lives):
                reasons = (worker.given_up for worker in self.workers if worker.given_up is not None)
                return next(reasons, "all workers have ended")

    @property
    def seats(self) -> Sequence[WorkerStatus]:
        """The status of all workers."""
        return [worker.seat for worker in self.workers]

    def want(self, name: str, role: Role) -> str | None:
        """Start an idle worker. Returns None, or the reason for a refusal. Raises KeyError for an unknown name."""
        worker = self._of(name)
        if worker.seat.state != "idle":
            return f"{name} is {worker.seat.state}"
        worker.want(role)
        return None

    def spare(self, name: str) -> str | None:
        """Drain and stop a worker; its unfinished answers resume on others. Returns None, or the reason for a refusal.
        Raises KeyError for an unknown name."""
        worker = self._of(name)
        if not worker.place.spare or worker.seat.state != "ready":
            return f"{name} {'always runs' if not worker.place.spare else f'is {worker.seat.state}'}"
        worker.spare()
        return None

    def _of(self, name: str) -> Supervised:
        worker = next((worker for worker in self.workers if worker.place.name == name), None)
        if worker is None:
            raise KeyError(name)
        return worker

    def replace(self, name: str) -> tuple[Literal["draining", "starting"] | None, str]:
        """Drain and restart a worker; its unfinished answers resume on others. Start one that was given up.

        Returns what it does now, or None and the reason for a refusal. Raises KeyError for an unknown name.
        """
        worker = self._of(name)
        match worker.seat.state:
            case "ready":
                worker.replace()
                return "draining", ""
            case "given up":
                log.info("%s was given up (%s), and is restarted", name, worker.given_up)
                worker.begin_anew()
                self._lives[self.workers.index(worker)] = asyncio.create_task(worker.live())
                return "starting", ""
            case "starting":
                return None, f"{name} is being started already"
            case "idle" | "ending":
                return None, f"{name} is scaled down; the autoscaler starts it when it is needed"

    def turn(self, name: str, role: Role) -> str | None:
        """Switch a worker's role while it serves. Returns None, or the reason for a refusal.

        Raises KeyError for an unknown name.
        """
        worker = self._of(name)
        if not isinstance(self._gateway, WorkerMonitor):
            return "role switches need a single API process that knows all requests: leave api_replicas out"
        link = next((link for link in self._gateway.workers if link.name == name), None)
        if link is None or worker.given_up is not None:
            return f"{name} does not run: {worker.given_up or 'it has not been started yet'}"
        if worker.seat.state == "idle":
            return f"{name} does not run: {SPARED}"
        if link.role == role:
            return None
        if (why_not := refusal(self._gateway.workers, link, role)) is None:
            worker.role = role
            self._gateway.switch_role(link, role)
        return why_not

    def end(self) -> None:
        """Stop all workers, and restart none."""
        for worker in self.workers:
            worker.stop()

    async def ended(self) -> None:
        """After `end`: wait until all worker processes have ended."""
        await asyncio.gather(*self._lives, return_exceptions=True)
        if self._parcels is not None:
            shutil.rmtree(self._parcels, ignore_errors=True)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def _failure(worker: Supervised) -> Exception:
    """The error of a worker that could not load its model: ConfigError with its reason, or WorkerLost without one."""
    why = worker.down or "the worker has ended"
    return WorkerLost(why) if why.startswith("the worker has ended with code") else ConfigError(why)
