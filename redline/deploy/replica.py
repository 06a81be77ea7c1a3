"""The process of one API replica: reads its config, and serves the connections that it receives until it is stopped.

Its standard input is a pipe from its supervisor, which writes one line and keeps the pipe open. When the supervisor
dies for any reason, the pipe closes and the replica exits. The supervisor sends it the lists of workers and of other
replicas (`messages.replicas`); jobs and their results are exchanged with the workers directly.
"""

import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from redline.api.admin import jobs_of, status_of
from redline.api.auth.auth_state import measure_lag
from redline.api.gateway.worker_monitor import CHECK_S
from redline.api.http.budget import Connections
from redline.api.telemetry.metrics import OwnMetrics
from redline.api.telemetry.metrics_aggregator import packed
from redline.chat.template import style_of
from redline.chat.tokenizer import Tokenizer
from redline.deploy.config import ServeConfig
from redline.deploy.connection_balancer import take
from redline.deploy.front import Front, end, limits_of, open_front
from redline.deploy.lines import lines_on_stderr
from redline.deploy.process import STOP_SIGNALS
from redline.deploy.questions import Questions
from redline.messages.base import Record
from redline.messages.channel import AsyncSocketInbox, SocketOutbox
from redline.messages.news import Missed, Stop
from redline.messages.replicas import AtWorker, Drain, OfKey, ReplicaQuery, ReplicaReply, Roster, Start, Use
from redline.model.spec import spec_of
from redline.router.worker_registry import WorkerHandle

SWITCH_S = 0.0005  # interpreter switch interval: the event loop waits at most this long for a thread that tokenizes
_PR_SET_PDEATHSIG = 1  # of prctl(2)

log = logging.getLogger("redline.deploy")


class ReplicaConfig(Record, frozen=True):
    """One line of JSON on the replica's standard input."""

    name: str  # of this start
    config: ServeConfig
    inbox: str  # address on which it receives messages of its supervisor
    outbox: str  # address to which it sends messages for its supervisor
    writer: bytes  # the sender id of its messages to workers
    door: int  # descriptor of the socket through which it receives connections
    secret: bytes  # key of the hash that names API keys without a name


class _Worker:
    """One start of a worker, and this replica's sockets to it."""

    def __init__(self, start: Start, writer: bytes) -> None:
        self.start = start
        self.inbox = AsyncSocketInbox(start.outbox)
        self.outbox = SocketOutbox(start.inbox, writer=writer)
        self.link: WorkerHandle | None = None
        self.following: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self.following is not None:
            self.following.cancel()
            await asyncio.wait({self.following})
            if not self.following.cancelled() and (error := self.following.exception()) is not None:
                log.error("messages of %s could not be processed", self.start.worker, exc_info=error)
        self.inbox.close()
        self.outbox.close()


class _Replica:
    """Everything runs in one event loop."""

    def __init__(self, told: ReplicaConfig, outbox: SocketOutbox) -> None:
        config = told.config
        folder = Path(config.weights)
        self._name = told.name
        self._writer = told.writer
        self._outbox = outbox
        self._questions = Questions()
        self._front: Front = open_front(
            config,
            Tokenizer.open(folder),
            style_of(folder, spec_of(folder).chat),
            OwnMetrics(config.names[0]),
            Connections(limits_of(config)),
            replica=told.name,
            secret=told.secret,
            scrape=self._scrape,
        )
        self._workers: dict[str, _Worker] = {}
        self._door = socket.socket(fileno=told.door)
        self._door.setblocking(False)
        self._taken = 0
        self._coming = 0  # received connections that the server has not accepted yet
        self._roster = 0
        self._frozen = False
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def live(self, inbox: AsyncSocketInbox) -> None:
        """Serve until a Stop message arrives."""
        gateway, edge, server, spans = self._front
        serving = asyncio.create_task(server.serve(sockets=[]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().add_reader(self._door, self._take)
        beside = [asyncio.create_task(work) for work in (self._hear(inbox), self._beat(), measure_lag(gateway.metrics))]
        beside.append(asyncio.create_task(edge.follow_keys()))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({stopping, serving, *beside}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asyncio.get_running_loop().remove_reader(self._door)
            stopping.cancel()
            gateway.fail_all("the server is stopping")
            await end(server, serving)
            gateway.close()
            for task in beside:
                task.cancel()
            for worker in self._workers.values():
                await worker.close()
            await gateway.ended()
            if spans is not None:
                await asyncio.to_thread(spans.close)
        for task in (serving, *beside):
            if task.done() and not task.cancelled():
                task.result()  # re-raise if the task failed on its own

    # -- from the supervisor

    async def _hear(self, inbox: AsyncSocketInbox) -> None:
        while True:
            for message in await inbox.get():
                match message:
                    case Roster():
                        self._follow(message)
                    case Use():
                        self._other(message)
                    case ReplicaQuery():
                        if message.what == "reload":  # a task of its own, since it reads a file
                            self._keep(asyncio.create_task(self._reload(message)))
                        else:
                            self._outbox.put(ReplicaReply(number=message.number, body=self._answer(message)))
                    case ReplicaReply():
                        self._questions.told(message)
                    case Drain():
                        self._front.edge.draining = message.reason
                    case Stop():
                        self._stop.set()
                    case Missed():
                        pass  # a lost roster is noticed by its number and sent again; other messages are repeated
                    case _:
                        raise AssertionError(f"unexpected message to a replica: {type(message).__name__}")

    def _follow(self, roster: Roster) -> None:
        """Process the lists of workers and replicas."""
        self._roster = roster.number
        gateway, keyring = self._front.gateway, self._front.edge.keyring
        for gone in gateway.peers.keep(roster.replicas):
            for account in () if keyring is None else keyring.accounts.values():
                account.forget(gone)
        for start in roster.starts:
            worker = self._workers.get(start.worker)
            if worker is None or worker.start.epoch != start.epoch:
                if worker is not None:
                    self._part(worker, "another start of it has begun")
                worker = self._join(start)
            link = worker.link
            assert link is not None
            if start.draining and not link.draining:
                gateway.monitor.drain(link)
            if start.lost is not None:
                self._part(worker, start.lost, asked=start.asked)
        gateway.peers.apply()

    def _join(self, start: Start) -> _Worker:
        worker = self._workers[start.worker] = _Worker(start, self._writer)
        gateway = self._front.gateway
        worker.link = gateway.monitor.join(start.worker, worker.outbox, start.role, start.epoch, start.inbox)
        worker.following = asyncio.create_task(gateway.monitor.follow(worker.link, worker.inbox))
        return worker

    def _part(self, worker: _Worker, reason: str, *, asked: bool = False) -> None:
        """A worker's start has ended; idempotent."""
        assert worker.link is not None
        if worker.link.lost is None:
            if worker.following is not None:
                worker.following.cancel()  # its remaining messages refer to jobs that no longer exist
            self._front.gateway.monitor.mark_down(worker.link, reason, asked=asked)
            self._keep(asyncio.create_task(worker.close()))

    def _other(self, use: Use) -> None:
        """Process another replica's heartbeat: its running and waiting requests."""
        self._front.gateway.peers.update(use)
        if (keyring := self._front.edge.keyring) is not None:
            for of_key in use.keys:
                if (account := keyring.accounts.get(of_key.name)) is not None:
                    account.heard(use.replica, of_key)

    def _answer(self, ask: ReplicaQuery) -> bytes:
        gateway, edge = self._front.gateway, self._front.edge
        match ask.what:
            case "metrics":
                return packed(gateway.metrics.registry)
            case "status":
                return msgspec.json.encode(status_of(gateway, edge))
            case "request":
                return msgspec.json.encode(jobs_of(gateway, ask.about))
            case "reload":
                raise AssertionError("it is answered once the file has been read")

    async def _reload(self, ask: ReplicaQuery) -> None:
        said = await self._front.edge.reload()
        self._outbox.put(ReplicaReply(number=ask.number, body=said.encode()))

    # -- to the supervisor

    async def _beat(self) -> None:
        while True:
            self._front.gateway.monitor.check_heartbeats()
            self._outbox.put(self._use())
            if not self._frozen and self._front.gateway.ready is not None:
                self._frozen = True
                gc.collect()
                gc.freeze()  # these objects are permanent; a full collection over them would stall every stream
            await asyncio.sleep(CHECK_S)

    def _use(self) -> Use:
        gateway, edge, server = self._front[:3]
        accounts = () if edge.keyring is None else edge.keyring.accounts.values()
        return Use(
            replica=self._name,
            roster=self._roster,
            ready=gateway.ready is not None,
            draining=edge.draining is not None,
            taken=self._taken,
            connections=len(server.server_state.connections) + self._coming,
            busy=len(server.server_state.tasks),
            waiting=gateway.requests.waiting,
            waiting_tokens=gateway.requests.waiting_tokens,
            running=gateway.requests.running,
            load=gateway.requests.requests,
            workers=tuple(
                AtWorker(worker=link.name, epoch=link.epoch, jobs=link.jobs, tokens=link.queued_tokens)
                for link in gateway.workers
                if link.ready is not None
            ),
            keys=tuple(
                OfKey(
                    name=account.name,
                    running=account.running,
                    requests=account.requests,
                    tokens=account.tokens,
                    left=account.left(),
                )
                for account in accounts
                if account.requests
            ),
        )

    async def _scrape(self) -> bytes:
        """/metrics of the whole server; of this replica only if the supervisor does not answer."""
        told = await self._questions.ask(self._outbox, "metrics")
        return self._front.gateway.metrics.expose() if told is None else told

    # -- connections

    def _take(self) -> None:
        try:
            connections = take(self._door)
        except EOFError:  # the supervisor has ended; the pipe on standard input closes too
            asyncio.get_running_loop().remove_reader(self._door)
            return
        self._taken += len(connections)
        self._coming += len(connections)
        for connection in connections:
            self._keep(asyncio.create_task(self._serve(connection)))

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await self._front.server.take(connection)
        finally:
            self._coming -= 1

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def main() -> int:
    """Serve until stopped; returns 0. An unexpected error is logged, and the process exits with code 1."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # signals reach the whole process group; the parent sends Stop
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if sys.platform == "linux":  # SIGCONT when the parent dies: a replica stopped by SIGSTOP could not exit
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    told = msgspec.json.decode(sys.stdin.buffer.readline(), type=ReplicaConfig)
    threading.Thread(target=_leave_with_parent, name="parent", daemon=True).start()
    sys.setswitchinterval(SWITCH_S)
    with lines_on_stderr(told.config.log_level, as_json=told.config.access_log == "json"):
        return uvloop.run(_run(told))


async def _run(told: ReplicaConfig) -> int:
    with AsyncSocketInbox(told.inbox) as inbox, SocketOutbox(told.outbox) as outbox:
        try:
            await _Replica(told, outbox).live(inbox)
        except Exception:  # the outermost handler
            log.exception("unexpected error in %s", told.name)
            return 1
    return 0


def _leave_with_parent(leave: Callable[[int], object] = os._exit) -> None:
    while os.read(0, 4096):
        pass
    leave(1)  # no clean shutdown: the supervisor is gone


if __name__ == "__main__":
    sys.exit(main())
