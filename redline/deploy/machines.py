"""Machines other than the server's own: their agents join here, and start and stop workers on the server's orders.

An agent reports once a second which workers run; the server answers each report with the full list of workers that are
to run. Every message contains the full state, so neither side has to remember what it has sent.
"""

import asyncio
import logging
import secrets
import struct
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from redline import __version__
from redline.deploy.by_ray import agents_by_ray, check_ray
from redline.deploy.cluster import read_key
from redline.deploy.config import ServeConfig
from redline.errors import ConfigError
from redline.messages.channel import AsyncSocketInbox, SocketOutbox
from redline.messages.codec import Wire
from redline.messages.machines import SAY_S, Machine, Order, Orders, Refused

# In reports of an agent that did not arrive; one is due every SAY_S.
QUIET = 5  # another agent may join under its name; a worker that was to be killed there counts as ended
GONE = 60  # the machine is down: its workers count as ended

log = logging.getLogger("redline.deploy")


class RemoteProcess:
    """A worker's process on another machine, as that machine's agent reports it."""

    pid: int | None = None

    def __init__(self, machine: "_Joined", order: Order) -> None:
        self.order = order
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.gone = False
        self.leaving = asyncio.Event()
        self.wanted = True
        self._machine = machine

    def kill(self) -> None:
        """Have its agent kill it at once; idempotent."""
        if self.wanted:
            self.wanted = False
            self._machine.say()

    def close(self) -> None:
        """Does nothing: its agent removes the files that it leaves."""

    def end(self, how: str, *, gone: bool = False) -> None:
        """The process has ended. gone: because its machine is down."""
        if not self.ended.done():
            self.gone = gone
            self.ended.set_result(how)


@dataclass
class _Joined:
    """An agent that has joined."""

    server: str
    word: Machine  # its newest report
    outbox: SocketOutbox
    unheard: int = 0  # reports in a row that did not arrive
    processes: dict[str, RemoteProcess] = field(default_factory=dict)  # the newest start of each worker

    def say(self) -> None:
        """Send it the list of workers that are to run."""
        wanted = (process.order for process in self.processes.values() if process.wanted)
        self.outbox.put(Orders(server=self.server, workers=tuple(wanted)))

    def hear(self, word: Machine) -> None:
        """Process its report on its workers."""
        self.word, self.unheard = word, 0
        if word.server != self.server:
            return  # the agent has not received our first orders yet
        runs = {(each.name, each.epoch): each for each in word.workers}
        for name, process in self.processes.items():
            running = runs.get((name, process.order.epoch))
            if running is not None and running.ended is not None:
                process.end(running.ended)
            elif running is None and not process.wanted:
                process.end(" as ordered")
            if word.leaving:
                process.leaving.set()

    def lose(self, why: str) -> None:
        """The agent has ended or is down: mark all its processes as ended."""
        for process in self.processes.values():
            process.end(f": {why}", gone=True)
        self.outbox.close()


class Machines:
    """All agents that have joined. Run `live` while workers run; the context manager closes the socket at its end."""

    def __init__(self, listen: str, key: str) -> None:
        """listen: ADDRESS:PORT, where agents join. Raises ConfigError if it cannot be bound."""
        self.host = listen.rpartition(":")[0]
        self.key = key
        self._server = secrets.token_hex(8)
        self._joined: dict[str, _Joined] = {}
        self._refused: dict[str, str] = {}  # by name, the `life` of the last agent that was refused
        self._strangers_told: int | None = None  # checks since failed handshakes were last logged
        self._news = asyncio.Event()  # set, and replaced by a new one, whenever a machine joins or leaves
        try:
            self._door = AsyncSocketInbox(f"tcp://{listen}", key.encode())
        except ConfigError as error:
            raise ConfigError(f"cluster.listen: {error}") from None
        self._door.failed_handshakes()

    @property
    def address(self) -> str:
        """The address where agents join; if port 0 was configured, with the port that was chosen."""
        return self._door.address

    async def live(self) -> None:
        """Receive reports of agents, and send them orders, until cancelled."""
        hearing = asyncio.create_task(self._hear())
        try:
            while True:
                await asyncio.sleep(SAY_S)
                self._look()
        finally:
            hearing.cancel()

    async def joined(self, name: str) -> None:
        """Returns once a machine of that name has joined and accepts orders."""
        while (machine := self._joined.get(name)) is None or machine.word.leaving:
            await self._news.wait()

    def start(self, at: str, order: Order) -> RemoteProcess:
        """Have a machine that has joined start a worker. Raises OSError if it has left."""
        machine = self._joined.get(at)
        if machine is None or machine.word.leaving:
            raise OSError(f"{at} has left")
        process = machine.processes[order.name] = RemoteProcess(machine, order)
        machine.say()
        return process

    def close(self) -> None:
        """Have every machine kill its workers of this server, and close the socket."""
        for machine in self._joined.values():
            for process in machine.processes.values():
                process.wanted = False
            machine.say()
            machine.lose("the server is stopping")
        self._joined.clear()
        self._door.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _hear(self) -> None:
        while True:
            try:
                messages: Iterable[Wire] = await self._door.get()
            except (msgspec.MsgspecError, struct.error) as error:  # the sender has the key, but another version
                log.error("an agent sent a message that cannot be decoded: %s", error)
                continue
            for message in messages:
                if isinstance(message, Machine):
                    self._take(message)

    def _take(self, word: Machine) -> None:
        known = self._joined.get(word.name)
        if known is None or known.word.life != word.life:
            if (why_not := self._why_not(known, word)) is not None:
                if self._refused.get(word.name) != word.life:  # logged once, as the agent retries each second
                    log.warning("the agent of %s is refused: %s", word.name, why_not)
                self._refused[word.name] = word.life
                with self._outbox(word) as outbox:
                    outbox.put(Refused(reason=why_not))
                return
            if known is not None:
                known.lose(f"the agent of {word.name} was restarted")
            log.info("%s has joined, from %s", word.name, word.inbox)
            known = self._joined[word.name] = _Joined(self._server, word, self._outbox(word))
            known.say()
        left = word.leaving and not any(each.ended is None for each in word.workers)
        if word.leaving and not known.word.leaving:
            log.info("%s leaves", word.name)
        known.hear(word)
        if left and word.server == self._server:
            known.lose(f"{word.name} has left")
            del self._joined[word.name]
        self._tell()

    def _why_not(self, known: _Joined | None, word: Machine) -> str | None:
        if word.version != __version__:
            return f"it runs Redline {word.version}, and the server {__version__}"
        if word.leaving:
            return "it leaves"
        if not word.inbox.startswith("tcp://"):
            return f"it listens at {word.inbox}, which is not on the network"
        if known is not None and known.unheard < QUIET:
            return f"another agent has joined as {word.name}: wait {QUIET} s, or give one of them another --name"
        return None

    def _outbox(self, word: Machine) -> SocketOutbox:
        return SocketOutbox(word.inbox, self.key.encode())

    def _tell_of_strangers(self) -> None:
        """Log connections of agents with another key: at once, and then once a minute."""
        failed = self._door.failed_handshakes()
        if self._strangers_told is not None:
            self._strangers_told += 1
        if failed and (self._strangers_told is None or self._strangers_told >= GONE):
            self._strangers_told = 0
            log.warning(
                "%s: %d connections were refused: is the --key-file of each agent the same key as cluster.key_file?",
                self.address,
                failed,
            )

    def _look(self) -> None:
        self._tell_of_strangers()
        for name, machine in list(self._joined.items()):
            machine.unheard += 1
            if machine.unheard == QUIET:
                log.warning("no report from the agent of %s for %d s", name, QUIET)
            if machine.unheard >= QUIET:
                for process in machine.processes.values():
                    if not process.wanted:
                        process.end(f": {name} sends no reports", gone=True)
            if machine.unheard >= GONE:
                machine.lose(f"no report from the agent of {name} for {GONE} s")
                del self._joined[name]
                self._tell()
            else:
                machine.say()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


@asynccontextmanager
async def open_machines(config: ServeConfig) -> AsyncGenerator[Machines | None]:
    """The machines of a deployment, which may join while inside; None if the deployment has no [cluster].

    Raises ConfigError if the key file or the listen address cannot be used.
    """
    cluster = config.cluster
    if cluster is None:
        yield None
        return
    if cluster.kind == "ray":
        check_ray()
    key = read_key(Path(cluster.key_file), "cluster.key_file")
    with Machines(cluster.listen, key) as machines:
        log.info("machines join at %s", machines.address)
        living = asyncio.create_task(machines.live())
        try:
            async with agents_by_ray(config, machines.address) if cluster.kind == "ray" else nullcontext():
                yield machines
        finally:
            living.cancel()
