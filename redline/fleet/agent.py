"""The agent of a machine: it joins a server and runs the workers that this orders (`redline agent`).

It decides nothing: which workers run, when one that has ended is started again, and when none is any more, are the
server's orders. What it holds to by itself: a worker runs only while its server is heard of, only one start of a worker
runs at a time, and none outlives the agent.
"""

import asyncio
import logging
import os
import secrets
import shutil
import signal
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from redline import __version__
from redline.errors import ConfigError
from redline.fleet.cluster import address_towards, check_address, check_join, read_key
from redline.fleet.lines import lines_on_stderr
from redline.fleet.process import STOP_SIGNALS, LocalProcess, check_process, folder_for_parcels, start_worker
from redline.limits import open_files
from redline.transport.choice import WITHIN_A_HOST
from redline.wire.channel import AsyncSocketInbox, SocketOutbox
from redline.wire.machines import SAY_S, Machine, Order, Orders, Refused, Running
from redline.worker.config import WorkerConfig

REJOIN = 10  # words in a row that nobody answers, after which the server is looked for anew: its address may be another
ALONE = 60  # likewise, after which its workers are ended: nobody hears them
LEAVE = 5  # likewise, where the agent itself is to end: nobody will tell its workers to

log = logging.getLogger("redline.fleet")


class AgentConfig(NamedTuple):
    """What an agent is told."""

    join: str  # tcp://HOST:PORT of the server
    key_file: Path
    name: str  # of this machine
    listen: str | None = None  # this machine's address; None: the one on the way to the server


def run_agent(config: AgentConfig) -> int:
    """Join, and run workers until one of STOP_SIGNALS comes: 0. Raises ConfigError for what it was told wrongly."""
    check_process()
    agent = agent_of(config)
    with lines_on_stderr("info", as_json=False):
        return asyncio.run(_until_told(agent))


def agent_of(config: AgentConfig) -> "Agent":
    """An agent that has not joined yet. Raises ConfigError for what it is told wrongly.

    The bound on open files is raised, of this process and of the workers that it starts.
    """
    open_files()
    host, port = check_join(config.join, "--join")
    key = read_key(config.key_file, "--key-file")
    listen = config.listen or address_towards(host, port)
    if listen is None:
        raise ConfigError(
            f"--join: no way is known to {host}; is its name right? --listen names this machine's address"
        )
    check_address(listen, "--listen")
    return Agent(config.join, key, config.name, listen)


async def _until_told(agent: "Agent") -> int:
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        if number is not signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup has it ignored
            loop.add_signal_handler(number, agent.leave)
    await agent.live()
    return 0


@dataclass
class _Started:
    """The newest start of a worker here."""

    server: str
    epoch: int
    process: LocalProcess | None  # None: it could not be started
    ended: str | None = None  # how

    @property
    def runs(self) -> bool:
        return self.ended is None


class Agent:
    """The workers of one machine. `live` until told to `leave`."""

    def __init__(self, join: str, key: str, name: str, listen: str) -> None:
        """join: tcp://HOST:PORT of the server. listen: this machine's address, at which it and its workers listen."""
        self.name = name
        self._join = join
        self._key = key
        self._listen = listen
        self._life = secrets.token_hex(8)
        self._inbox = ""
        self._server = ""  # whose orders are followed
        self._orders: dict[str, Order] = {}
        self._started: dict[str, _Started] = {}
        self._unanswered = 0  # words since the server was heard
        self._refused = ""
        self._told_unanswered = False  # that no server has answered yet has been logged
        self._leaving = self._at_once = False
        self._changed = asyncio.Event()
        self._parcels: Path | None = None
        self._watching: set[asyncio.Task[None]] = set()

    def leave(self) -> None:
        """Have it start nothing more, and end once its workers have been told to and have; a second time: at once."""
        self._at_once, self._leaving = self._leaving, True
        self._changed.set()

    async def live(self) -> None:
        """Join, again and again, and run what is ordered; then no process of it is left. Raises ConfigError where
        nothing can listen here."""
        door: SocketOutbox | None = None
        with AsyncSocketInbox(f"tcp://{self._listen}:*", self._key.encode()) as inbox:
            self._inbox = inbox.address
            listening = asyncio.create_task(self._hear(inbox))
            log.info("%s joins %s, and listens at %s", self.name, self._join, self._inbox)
            try:
                while not self._may_end():
                    if door is None or self._unanswered % REJOIN == REJOIN - 1:
                        if door is not None:
                            door.close()
                        door = SocketOutbox(self._join, self._key.encode())
                        door.failed_handshakes()
                    door.put(self._word())
                    await self._pause()
                    self._tell_unanswered(door.failed_handshakes())
                if door is not None:
                    door.put(self._word())
            finally:
                listening.cancel()
                await self._end_all()
                if door is not None:
                    door.close()
                if self._parcels is not None:
                    shutil.rmtree(self._parcels, ignore_errors=True)

    def _may_end(self) -> bool:
        alone = self._at_once or self._unanswered >= LEAVE or not self._server
        return self._leaving and (alone or not any(started.runs for started in self._started.values()))

    async def _pause(self) -> None:
        """Until there is something to say, or for SAY_S. Seconds are counted by waking up in each: while this machine
        sleeps, none pass."""
        self._changed.clear()
        try:
            async with asyncio.timeout(SAY_S):  # `wait_for` may swallow that it is cancelled (Python 3.11)
                await self._changed.wait()
        except TimeoutError:
            self._unanswered += 1
        if self._unanswered == ALONE and self._server:
            log.error("%s has not been heard of for %d s: its workers are ended", self._join, ALONE)
            self._server, self._orders = "", {}
            self._follow()

    def _tell_unanswered(self, failed: int) -> None:
        """Log once why no server has answered yet. failed: connections to it that it has closed at once."""
        if self._server or self._told_unanswered:
            return
        if failed:
            log.error("%s closes every connection: is --key-file the same key as its cluster.key_file?", self._join)
        elif self._unanswered >= REJOIN:
            log.warning("%s has not answered for %d s: is --join the server's cluster.listen?", self._join, REJOIN)
        else:
            return
        self._told_unanswered = True

    def _word(self) -> Machine:
        workers = (
            Running(name=name, epoch=started.epoch, ended=started.ended)
            for name, started in self._started.items()
            if started.server == self._server
        )
        return Machine(
            name=self.name,
            life=self._life,
            inbox=self._inbox,
            version=__version__,
            server=self._server,
            leaving=self._leaving,
            workers=tuple(workers),
        )

    async def _hear(self, inbox: AsyncSocketInbox) -> None:
        while True:
            try:
                messages = await inbox.get()
            except (msgspec.MsgspecError, struct.error) as error:  # who has the key has another version
                log.error("%s says what is not understood: %s", self._join, error)
                continue
            for message in messages:
                match message:
                    case Orders():
                        self._obey(message)
                    case Refused():
                        if message.reason != self._refused:
                            log.error("not taken in: %s", message.reason)
                        self._refused = message.reason
                    case _:
                        pass  # Missed among them: what is lost is said again

    def _obey(self, orders: Orders) -> None:
        self._unanswered, self._refused = 0, ""
        if orders.server != self._server:
            log.info("%s has taken %s in", self._join, self.name)
        self._server, self._orders = orders.server, {order.name: order for order in orders.workers}
        self._follow()

    def _follow(self) -> None:
        """End what is not ordered any more, and start what is and has not been; one start of a worker at a time."""
        for name, started in list(self._started.items()):
            order = self._orders.get(name)
            if order is not None and (order.epoch, self._server) == (started.epoch, started.server):
                continue
            if started.process is not None and started.runs:
                started.process.kill()
            else:
                del self._started[name]
        for name, order in self._orders.items():
            if name not in self._started and not self._leaving:
                self._started[name] = self._start(order)
                self._changed.set()

    def _start(self, order: Order) -> _Started:
        try:
            config = msgspec.json.decode(order.config, type=WorkerConfig)
            if not config.outbox.startswith("tcp://"):
                raise ConfigError(f"its words are to go to {config.outbox}, which is not on the network")
            if config.transport in WITHIN_A_HOST and self._parcels is None:
                self._parcels = folder_for_parcels(1)
            config = msgspec.structs.replace(
                config,
                inbox=f"tcp://{self._listen}:*",
                key=self._key,
                parcels=str(self._parcels) if config.transport in WITHIN_A_HOST else None,
            )
            process = LocalProcess(start_worker(config, order.devices), self._parcels)
        except (OSError, ConfigError, msgspec.MsgspecError) as error:
            log.error("%s could not be started: %s", order.name, error)
            return _Started(self._server, order.epoch, None, f": {self.name} cannot start it: {error}")
        log.info("%s is started (start %d)", order.name, order.epoch)
        started = _Started(self._server, order.epoch, process)
        task = asyncio.create_task(self._watch(order.name, started, process))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        return started

    async def _watch(self, name: str, started: _Started, process: LocalProcess) -> None:
        started.ended = await process.ended
        process.close()
        log.info("%s has ended%s", name, started.ended)
        self._follow()
        self._changed.set()

    async def _end_all(self) -> None:
        self._leaving = True
        for started in self._started.values():
            if started.process is not None:
                started.process.kill()
        if self._watching:
            await asyncio.wait(self._watching)


def check_name(text: str) -> str:
    """The name of a machine. Raises ConfigError."""
    if not 1 <= len(text) <= 63 or not all(char.isascii() and (char.isalnum() or char in "._-") for char in text):
        raise ConfigError(f"--name is {text!r}; expected 1 to 63 letters, digits, ., - or _, as `at` in [[workers]]")
    return text


def this_host() -> str:
    """What this machine calls itself."""
    with suppress(OSError):
        return os.uname().nodename
    return "here"
