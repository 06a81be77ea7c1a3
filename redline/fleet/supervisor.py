"""Starts the workers of a deployment, and starts each again that ends (`kept.py`), unless it is not wanted then.

A start of a worker has an epoch and sockets of its own. Whatever an earlier one still says is read by nobody, so it
cannot be taken for the word of the one that has its place. Why a start has ended is said in the log, and kept until the
next one has ended too (`Link.before`).
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

from redline.api.gateway import LOOK_S, Gateway
from redline.errors import ConfigError, WorkerLost
from redline.fleet.config import Place, ServeConfig
from redline.fleet.kept import SILENCE_S, End, Kept, until_silent
from redline.fleet.machines import Machines
from redline.fleet.process import LocalProcess, Process, folder_for_parcels, start_worker
from redline.route.links import Link, Links
from redline.route.roles import refusal
from redline.transport.choice import WITHIN_A_HOST
from redline.wire.channel import IPC, AsyncSocketInbox, Outbox, SocketOutbox, ipc_address
from redline.wire.codec import Wire
from redline.wire.machines import Listening, Order
from redline.wire.news import Ready, Role, Stop
from redline.worker.config import WorkerConfig

STOP_S = 10.0  # for a worker to abort what runs, prove its pages and leave
WORDS_S = 0.5  # for the last message of a worker that has ended to arrive
REPLACED = "it is replaced"  # by itself: why a start has ended that the operator wanted to end
SPARED = "it is not wanted for now"  # likewise, of a worker that is not started again until it is
PATIENCE_S = 2.0  # for a machine to join, after which it is said that a worker waits for it

log = logging.getLogger("redline.fleet")


State = Literal["idle", "starting", "ready", "ending", "given up"]
"""Of a worker. idle: it is not to run; ending: it is not to run, and still does."""


class Seat(NamedTuple):
    """One worker of a deployment, as whoever starts and ends workers sees it.

    spare: it runs only while it is wanted. role: that it has, or will have. failed: why its last start has failed,
    where it is idle for that.
    """

    name: str
    state: State
    spare: bool
    role: Role = "both"
    failed: str | None = None


class Follower(Protocol):
    """Who is told of the workers: the gateway, where the API is this process, else `fleet.Fleet`."""

    links: Links

    @property
    def ready(self) -> Ready | None:
        """What jobs may be like; None while no worker can answer."""
        ...

    def join(
        self, name: str, outbox: Outbox, role: Role = "both", epoch: int = 1, inbox: str = "", at: str | None = None
    ) -> Link:
        """A worker has been started. outbox: leads to it. inbox: the address that it reads. at: its machine; None: this
        one."""
        ...

    def take(self, link: Link, messages: Sequence[Wire]) -> None:
        """Take in what a worker says."""
        ...

    def drain(self, link: Link) -> None:
        """A worker is to be replaced."""
        ...

    def lose(self, link: Link, reason: str, *, asked: bool = False) -> None:
        """A worker has ended; idempotent. asked: it was to end."""
        ...

    def look(self) -> None:
        """To be called every LOOK_S: who has fallen silent?"""
        ...


class Supervised(Kept):
    """One worker through all its starts."""

    def __init__(
        self,
        place: Place,
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
        """sockets: the folder for its sockets. parcels: for what it hands over. again, proven: as `Kept` has them.

        drain_s: for its answers to end, where it is replaced. machines: beside this one; None: there are none.
        """
        super().__init__(place.name, again=again, proven=proven)
        self.place = place
        self.role: Role = place.role  # that it has now, and will be started again with
        self._machines = machines
        self._weights = weights
        self._gateway = gateway
        self._sockets = sockets
        self._parcels = parcels
        self._drain_s = drain_s
        self._replacing = asyncio.Event()
        self._runs = False  # a start of it has begun and has not ended
        self._failed: str | None = None
        if place.spare:
            self._wanted.clear()

    def replace(self) -> None:
        """Have it answer nothing new, leave once its answers have ended, and be started again."""
        self._replacing.set()

    def want(self, role: Role) -> None:
        """Have it run, with this role at first."""
        self.role, self._failed = role, None
        self._wanted.set()

    def spare(self) -> None:
        """Have it answer nothing new, leave once its answers have ended, and run again once it is wanted."""
        self._wanted.clear()
        self._replacing.set()

    @property
    def seat(self) -> Seat:
        """What is to be said of it."""
        link = next((link for link in self._gateway.links if link.name == self.name), None)
        state: State = "idle"
        if self.given_up is not None:
            state = "given up"
        elif not self._wanted.is_set():
            state = "ending" if self._runs else "idle"
        else:
            state = "ready" if self._runs and link is not None and link.ready is not None else "starting"
        return Seat(self.name, state, self.place.spare, self.role, self._failed)

    def _rests(self, why: str) -> bool:
        if not self.place.spare:
            return False
        log.error("%s: %s; it is left out for now", self.name, why)
        self._wanted.clear()
        self._failed, self._in_a_row = why, 0
        return True

    async def _start(self, epoch: int) -> End:
        self._runs = True
        self._replacing.clear()
        try:
            end = await self._run(epoch)
        finally:
            self._runs = False
        if end.why == SPARED:
            log.info("%s has ended, and is idle until it is wanted", self.name)
        return end

    async def _run(self, epoch: int) -> End:
        name, clock = f"{self.place.name}.{epoch}", asyncio.get_running_loop().time
        if not await self._place_is_there():
            return End("the server is stopping", ready=False, seconds=0.0)
        jobs, deltas = self._addresses(name)
        with AsyncSocketInbox(deltas, self._key) as inbox, _Later(self._key) as outbox:
            if jobs.startswith(IPC):
                outbox.open(jobs)
            link = self._gateway.join(self.place.name, outbox, self.role, epoch, outbox.address, self.place.at)
            try:
                process = self._process(epoch, jobs, inbox.address)
            except OSError as error:
                self._gateway.lose(link, f"no process can be started: {error}")
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
                        self._gateway.lose(link, REPLACED if self._wanted.is_set() else SPARED, asked=True)
                elif leaving.done():
                    self._gateway.lose(link, REPLACED, asked=True)
                first.cancel()
                if ended.done() and not stopping.done():
                    await asyncio.wait({following}, timeout=WORDS_S)  # it may have spoken just before it ended
                why = self._why(link, process, silence.done(), ready_at is not None)
            finally:
                for task in (silence, stopping, leaving):
                    task.cancel()
                await self._end(link, process, ready=ready_at is not None)
                following.cancel()
                await asyncio.wait({following})
                if not following.cancelled() and (error := following.exception()) is not None:
                    log.error("what %s said could not be taken in", self.place.name, exc_info=error)
                self._gateway.lose(link, "the server is stopping")  # where nothing else has been said
            seconds = 0.0 if ready_at is None else clock() - ready_at
            return End(why, ready_at is not None, seconds, excused=why in (REPLACED, SPARED) or process.gone)

    async def _place_is_there(self) -> bool:
        """Returns once its machine has joined; False where it is told to stop before."""
        if self.place.at is None:
            return True
        assert self._machines is not None, "a worker on another machine, and no place for that to join"
        joined = asyncio.create_task(self._machines.joined(self.place.at))
        stopping = asyncio.create_task(self._stopping.wait())
        if not (await asyncio.wait({joined}, timeout=PATIENCE_S))[0]:
            log.warning("%s waits for %s to join at %s", self.place.name, self.place.at, self._machines.address)
        await asyncio.wait({joined, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (joined, stopping):
            task.cancel()
        return not self._stopping.is_set()

    @property
    def _key(self) -> bytes | None:
        return None if self._machines is None else self._machines.key.encode()

    def _addresses(self, name: str) -> tuple[str, str]:
        """Where it reads its jobs, and where its words are read. Files of this machine; or, where another has to reach
        them, any free port of the address by which machines reach one another."""
        port = "" if self._machines is None else f"tcp://{self._machines.host}:*"
        jobs = ipc_address(self._sockets, f"{name}.jobs")
        deltas = ipc_address(self._sockets, f"{name}.deltas")
        if self._machines is None:
            return jobs, deltas
        if self.place.at is not None:
            return port, port
        return (jobs if self.place.transport is None else port), deltas

    def _process(self, epoch: int, jobs: str, deltas: str) -> Process:
        """Its process, here or where its place is. Raises OSError."""
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
        if place.at is not None and self._machines is not None:  # which has its own address, key and folder
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

    async def _drained(self, link: Link, leaving: "asyncio.Task[bool]") -> None:
        """Returns once it is to be replaced, or its machine leaves, and its answers have ended or had drain_s seconds
        to."""
        replacing = asyncio.create_task(self._replacing.wait())
        try:
            await asyncio.wait({replacing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            replacing.cancel()
        log.info("%s is replaced" if self._wanted.is_set() else "%s ends what it has begun", link.name)
        self._gateway.drain(link)
        until = asyncio.get_running_loop().time() + self._drain_s
        while link.jobs and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)

    async def _follow(self, link: Link, inbox: AsyncSocketInbox, outbox: "_Later") -> None:
        """Hands on what it says, until it says that it ends."""
        while link.lost is None:
            messages = await inbox.get()
            if not outbox.address and isinstance(first := messages[0], Listening):
                outbox.open(first.inbox)
                link.inbox, messages = first.inbox, messages[1:]
            self._gateway.take(link, messages)

    def _why(self, link: Link, process: Process, silent: bool, ready: bool) -> str:
        if link.lost in (REPLACED, SPARED):
            return link.lost
        if link.lost is not None:
            at = "" if self.place.at is None else f"{self.place.at}: "
            return f"the worker has ended: {link.lost}" if ready else f"{at}{link.lost}"
        if process.ended.done():
            while_loading = "" if ready else " while it was loading the model"
            why = f"the worker has ended{process.ended.result()}{while_loading}"
        elif silent:
            why = f"the worker has not been heard of for {SILENCE_S} s"
        else:
            why = "the worker's messages are not read any more"
        self._gateway.lose(link, why)
        return why

    async def _end(self, link: Link, process: Process, *, ready: bool) -> None:
        """Leaves no process behind. One that is told to stop has STOP_S to prove its pages, one that has said its last
        words as long to leave; one that nothing is heard of, or that still loads, has nothing to lose."""
        if ready and not process.ended.done() and not self._gateway.links.is_silent(link):
            if self._stopping.is_set() or link.lost in (REPLACED, SPARED):
                link.outbox.put(Stop())
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.ended), STOP_S)
        if not process.ended.done():
            process.kill()
        await process.ended
        if link.inbox.startswith(IPC):
            Path(link.inbox.removeprefix(IPC)).unlink(missing_ok=True)  # which it has left there where it was killed
        process.close()


class _Later:
    """An outbox whose reader may be found later: a worker chooses its own port. What is put before then waits."""

    def __init__(self, key: bytes | None) -> None:
        self.address = ""  # of its reader, once it is open
        self._key = key
        self._outbox: SocketOutbox | None = None
        self._waiting: deque[Wire] = deque()
        self._opened = ExitStack()

    def open(self, address: str) -> None:
        """Its reader is there. Raises ConfigError."""
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
        """Start all workers that run in any case. Returns what jobs may be like once one answers and each other is
        ready, or has failed at least once and is started again; None where `stop` was set before.

        Raises where no worker is left that could answer: ConfigError with the reason that the first of them has given,
        WorkerLost where it had no time to give one. Raises WorkerLost where `serving` has ended meanwhile.
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
        """As `start`, for the workers' part."""
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
                    then = "it is started again once another worker is ready"
                    log.error("%s: %s; %s", worker.name, why, "it is given up" if worker.given_up else then)
            if ready is not None and all(worker.ready.is_set() or worker.has_failed for worker in awaited):
                return ready
            await asyncio.sleep(0.01)

    def _hopeless(self) -> Supervised | None:
        """The first worker that is down, where no worker is left that could answer as things are."""
        starts = [worker for worker in self.workers if worker.down is None and worker.seat.state != "idle"]
        if any(worker.role != "prefill" or not self._proven.is_set() for worker in starts):
            return None
        return next((worker for worker in self.workers if worker.down is not None), None)

    async def given_up(self) -> str:
        """Returns once no worker is left that answers, nor will be: why."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._gateway.look()
            left = [
                worker
                for worker in self.workers
                if worker.given_up is None and (worker.role != "prefill" or worker.place.spare)
            ]
            if not left or all(life.done() for life in self._lives):
                reasons = (worker.given_up for worker in self.workers if worker.given_up is not None)
                return next(reasons, "all workers have ended")

    @property
    def seats(self) -> Sequence[Seat]:
        """All of them."""
        return [worker.seat for worker in self.workers]

    def want(self, name: str, role: Role) -> str | None:
        """Have an idle worker run: None, or why it cannot. Raises KeyError where there is none of that name."""
        worker = self._of(name)
        if worker.seat.state != "idle":
            return f"{name} is {worker.seat.state}"
        worker.want(role)
        return None

    def spare(self, name: str) -> str | None:
        """Have a worker run no more, its answers going on: None, or why it cannot. Raises KeyError where there is none
        of that name."""
        worker = self._of(name)
        if not worker.place.spare or worker.seat.state != "ready":
            return f"{name} {'runs in any case' if not worker.place.spare else f'is {worker.seat.state}'}"
        worker.spare()
        return None

    def _of(self, name: str) -> Supervised:
        worker = next((worker for worker in self.workers if worker.place.name == name), None)
        if worker is None:
            raise KeyError(name)
        return worker

    def replace(self, name: str) -> tuple[Literal["draining", "starting"] | None, str]:
        """Have a worker leave and be started again, its answers going on; have one that was given up be started.

        Returns what it does now, or None and why it cannot. Raises KeyError where there is none of that name.
        """
        worker = self._of(name)
        match worker.seat.state:
            case "ready":
                worker.replace()
                return "draining", ""
            case "given up":
                log.info("%s was given up (%s), and is started anew", name, worker.given_up)
                worker.begin_anew()
                self._lives[self.workers.index(worker)] = asyncio.create_task(worker.live())
                return "starting", ""
            case "starting":
                return None, f"{name} is being started already"
            case "idle" | "ending":
                return None, f"{name} is to run only once it is wanted, and is started anew then"

    def turn(self, name: str, role: Role) -> str | None:
        """Have a worker take another role while it serves: None, or why it cannot.

        Raises KeyError where there is none of that name.
        """
        worker = self._of(name)
        if not isinstance(self._gateway, Gateway):
            return "roles change where one process knows all requests: leave api_replicas out"
        link = next((link for link in self._gateway.links if link.name == name), None)
        if link is None or worker.given_up is not None:
            return f"{name} does not run: {worker.given_up or 'it has not been started yet'}"
        if worker.seat.state == "idle":
            return f"{name} does not run: {SPARED}"
        if link.role == role:
            return None
        if (why_not := refusal(self._gateway.links, link, role)) is None:
            worker.role = role
            self._gateway.turn(link, role)
        return why_not

    def end(self) -> None:
        """Have all leave, and start none again."""
        for worker in self.workers:
            worker.stop()

    async def ended(self) -> None:
        """Returns, behind `end`, once no process of theirs is left."""
        await asyncio.gather(*self._lives, return_exceptions=True)
        if self._parcels is not None:
            shutil.rmtree(self._parcels, ignore_errors=True)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def _failure(worker: Supervised) -> Exception:
    """Why a worker could not load its model: in its own words, or that it had none."""
    why = worker.down or "the worker has ended"
    return WorkerLost(why) if why.startswith("the worker has ended with code") else ConfigError(why)
