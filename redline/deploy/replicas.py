"""`redline serve` with several API replicas: this process listens, starts workers and replicas, and restarts those that
end. Streams do not pass through it, so the failure of a replica ends only that replica's streams."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from redline.api.admin import create_desk_app
from redline.api.auth.keys import SECRET
from redline.api.http.budget import Connections
from redline.api.responses.store import ResponseStore
from redline.api.telemetry.metrics import Metrics
from redline.api.telemetry.scrape import create_metrics_app
from redline.deploy.admin_aggregator import AdminAggregator
from redline.deploy.config import ServeConfig
from redline.deploy.connection_balancer import ConnectionBalancer
from redline.deploy.fleet import Fleet, ReplicaStart
from redline.deploy.front import Doors, end, limits_of, serve_beside
from redline.deploy.process import STOP_SIGNALS
from redline.deploy.replica import ReplicaConfig
from redline.deploy.signals import Signals
from redline.deploy.supervised_process import SILENCE_S, ProcessEnd, SupervisedProcess, until_silent
from redline.deploy.supervisor import Supervisor
from redline.errors import WorkerLost
from redline.messages.channel import WRITER_BYTES, AsyncSocketInbox, SocketOutbox, ipc_address
from redline.messages.news import Ready, Stop

LEAVE_S = 5.0  # for a replica to end its streams with an error and exit
IDLE_S = 0.05  # between two checks whether answers still run

log = logging.getLogger("redline.deploy")


class SupervisedReplica(SupervisedProcess):
    """One API replica through all its starts."""

    def __init__(
        self, name: str, config: ServeConfig, fleet: Fleet, sockets: Path, changed: Callable[[str], None]
    ) -> None:
        """sockets: the folder for its sockets. changed: called with its name when it begins to serve, and when it has
        ended."""
        proven = asyncio.Event()
        proven.set()  # the deployment was checked before, so a failed start is not due to a mistake in it
        super().__init__(name, again=config.resume_s > 0, proven=proven)
        self._config = config
        self._fleet = fleet
        self._sockets = sockets
        self._changed = changed

    async def _start(self, epoch: int) -> ProcessEnd:
        name, clock = f"{self.name}.{epoch}", asyncio.get_running_loop().time
        says, told = (ipc_address(self._sockets, f"{name}.{kind}") for kind in ("says", "told"))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs, AsyncSocketInbox(says) as inbox, SocketOutbox(told) as outbox:
            writer = os.urandom(WRITER_BYTES)
            config = ReplicaConfig(
                name=name,
                config=self._config,
                inbox=told,
                outbox=says,
                writer=writer,
                door=theirs.fileno(),
                secret=SECRET,
            )
            process = _start_process(config)
            theirs.close()
            start = ReplicaStart(self.name, epoch, outbox, writer, ours, process.pid)
            self._fleet.enter(start)
            waiter = ThreadPoolExecutor(1, thread_name_prefix="waiter")  # its own: the loop's executor is shared
            ended = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(waiter, process.wait))
            following = asyncio.create_task(self._follow(start, inbox))
            silence = asyncio.create_task(until_silent(start))
            stopping = asyncio.create_task(self._stopping.wait())
            began, why = clock(), "it was stopped"
            try:
                await asyncio.wait({ended, following, stopping, silence}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    why = f"it has ended with code {process.returncode}"
                elif silence.done():
                    why = f"it has sent no heartbeat for {SILENCE_S} s"
                elif following.done():
                    why = "its messages could not be processed"
            finally:
                for task in (silence, stopping):
                    task.cancel()
                if self._stopping.is_set() and not ended.done():
                    outbox.put(Stop())
                    with suppress(TimeoutError):
                        await asyncio.wait_for(asyncio.shield(ended), LEAVE_S)
                if process.poll() is None:
                    process.kill()
                await ended
                self._fleet.leave(start, why)
                self._changed(self.name)
                following.cancel()
                await asyncio.wait({following})
                if not following.cancelled() and (error := following.exception()) is not None:
                    log.error("messages of %s could not be processed", name, exc_info=error)
                waiter.shutdown(wait=False)
                if process.stdin is not None:
                    with suppress(BrokenPipeError):
                        process.stdin.close()
                for left in self._sockets.glob(f"{name}.*"):
                    left.unlink(missing_ok=True)
            return ProcessEnd(why, start.use is not None, clock() - began)

    async def _follow(self, start: ReplicaStart, inbox: AsyncSocketInbox) -> None:
        while True:
            serves = start.use is not None
            self._fleet.hear(start, await inbox.get())
            if start.use is not None and not serves:
                self._is_ready()
                self._changed(self.name)


def _start_process(config: ReplicaConfig) -> "subprocess.Popen[bytes]":
    """Start a replica's process. It reads its config from a pipe, and exits when the pipe closes with this process."""
    # As for a worker: signals reach the whole process group, and must not interrupt it before it ignores them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    command = [sys.executable, "-m", "redline.deploy.replica"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[config.door])
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, which the caller will notice
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    return process


async def serve_replicas(
    sockets: Path, config: ServeConfig, doors: Doors, signals: Signals, announce: Callable[[Ready], None]
) -> int:
    """Serve until a stop signal (returns 0), or until all workers or all replicas have been given up (returns 1).

    announce: called once every replica answers. Raises as `serve.serve`.
    """
    if config.responses_file is not None:
        ResponseStore(Path(config.responses_file)).close()  # created here: replicas creating it together could lock it
    desk: AdminAggregator
    fleet = Fleet(Metrics(config.names[0]), sockets, lambda start, ask: desk.answer(start, ask))
    supervisor = Supervisor(config, fleet, sockets)
    desk = AdminAggregator(fleet, config.drain_s, signals.end, supervisor.replace, supervisor.turn)
    doorman = ConnectionBalancer(doors.api, fleet.replicas.values)

    def changed(of: str) -> None:
        if not any(start.of == of for start in fleet.replicas.values()):
            desk.ended(of)
        doorman.look()

    replicas = [
        SupervisedReplica(f"replica-{number}", config, fleet, sockets, changed) for number in range(config.api_replicas)
    ]
    if config.keys_file is not None:
        signals.reload = desk.reload_soon
    beside = serve_beside(
        config,
        doors,
        lambda own: create_desk_app(desk, own, fleet.metrics),
        lambda own: create_metrics_app(fleet.metrics, own, desk.scrape),
        Connections(limits_of(config)),
    )
    lives = [asyncio.create_task(replica.live()) for replica in replicas]
    serving = asyncio.create_task(_until_none_is_left(replicas, lives))
    try:
        ready = await supervisor.start(signals.stop, serving)
        if ready is None and fleet.ready is None:
            return 0
        if ready is not None and await _until_known(fleet, signals.stop, serving):
            announce(ready)
        stopping, given_up = asyncio.create_task(signals.stop.wait()), asyncio.create_task(supervisor.given_up())
        await asyncio.wait({stopping, given_up, serving}, return_when=asyncio.FIRST_COMPLETED)
        lost = not stopping.done()
        if lost:
            log.error("%s; stopping", given_up.result() if given_up.done() else serving.exception())
        else:
            log.info("stopping")
            fleet.begin_drain("the server is stopping")
            await _drain(fleet, config.drain_s, {given_up, serving}, signals.now)
        stopping.cancel()
        given_up.cancel()
        return int(lost)
    finally:
        for replica in replicas:
            replica.stop()
        await asyncio.wait(lives)
        doorman.close()
        serving.cancel()
        for server in beside:
            await end(*server)
        supervisor.end()
        await supervisor.ended()


async def _until_none_is_left(replicas: Sequence[SupervisedReplica], lives: "Sequence[asyncio.Task[None]]") -> None:
    """Raises WorkerLost with the reason once no replica is left and none will be restarted."""
    await asyncio.gather(*lives)
    reasons = (f"{replica.name}: {replica.given_up}" for replica in replicas if replica.given_up is not None)
    raise WorkerLost(next(reasons, "all replicas of the API have ended"))


async def _until_known(fleet: Fleet, stop: asyncio.Event, serving: "asyncio.Task[None]") -> bool:
    """Returns once every replica knows a worker that answers; False if `stop` is set before. Raises as `serving`."""
    while not fleet.known and not stop.is_set():
        if serving.done():
            serving.result()
        await asyncio.sleep(0.01)
    return not stop.is_set()


async def _drain(
    fleet: Fleet, seconds: float, ends: "set[asyncio.Task[str] | asyncio.Task[None]]", now: asyncio.Event
) -> None:
    """Wait until no replica reads or answers a request; at most `seconds`, or until one of `ends` is done or `now` is
    set."""
    until = asyncio.get_running_loop().time() + seconds
    while not fleet.drained and asyncio.get_running_loop().time() < until:
        if now.is_set() or any(task.done() for task in ends):
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(now.wait(), IDLE_S)
