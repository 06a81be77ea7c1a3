"""The agent of a machine: it joins a server and runs the workers that the server orders (`redline agent`).

The agent decides nothing: the server's orders set which workers run, and when a worker that has ended is restarted or
given up. The agent itself guarantees three things: its workers run only while the server answers, only one start of a
worker runs at a time, and no worker outlives the agent.
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
from redline.deploy.cluster import address_towards, check_address, check_join, read_key
from redline.deploy.lines import lines_on_stderr
from redline.deploy.process import STOP_SIGNALS, LocalProcess, check_process, folder_for_parcels, start_worker
from redline.errors import ConfigError
from redline.limits import open_files
from redline.messages.channel import AsyncSocketInbox, SocketOutbox
from redline.messages.machines import SAY_S, Machine, Order, Orders, Refused, Running
from redline.transport.choice import WITHIN_A_HOST
from redline.worker.config import WorkerConfig

# In status messages (one every SAY_S) that the server leaves unanswered in a row:
REJOIN = 10  # reconnect, and resolve the server's address again
ALONE = 60  # kill the workers: the server is down
LEAVE = 5  # exit if the agent is leaving: the server will not order its workers to stop

log = logging.getLogger("redline.deploy")


class AgentConfig(NamedTuple):
    """The command line of `redline agent`."""

    join: str  # tcp://HOST:PORT of the server
    key_file: Path
    name: str  # of this machine
    listen: str | None = None  # this machine's address; None: the source address of its route to the server


def run_agent(config: AgentConfig) -> int:
    """Join, and run workers until one of STOP_SIGNALS arrives; returns 0. Raises ConfigError for a wrong `config`."""
    check_process()
    agent = agent_of(config)
    with lines_on_stderr("info", as_json=False):
        return asyncio.run(_until_told(agent))


def agent_of(config: AgentConfig) -> "Agent":
    """An agent that has not joined yet. Raises ConfigError for a wrong `config`.

    Raises the limit on open files of this process, which its workers inherit.
    """
    open_files()
    host, port = check_join(config.join, "--join")
    key = read_key(config.key_file, "--key-file")
    listen = config.listen or address_towards(host, port)
    if listen is None:
        raise ConfigError(
            f"--join: there is no route to {host}; is its name right? --listen sets this machine's address"
        )
    check_address(listen, "--listen")
    return Agent(config.join, key, config.name, listen)


async def _until_told(agent: "Agent") -> int:
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        if number is not signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup sets it to SIG_IGN
            loop.add_signal_handler(number, agent.leave)
    await agent.live()
    return 0


@dataclass
class _Started:
    """The newest start of a worker here."""

    server: str
    epoch: int
    process: LocalProcess | None  # None: it could not be started
    ended: str | None = None  # how it ended, such as " with code 1"; None: it runs

    @property
    def runs(self) -> bool:
        return self.ended is None


class Agent:
    """The workers of one machine. Run `live`, until `leave` is called."""

    def __init__(self, join: str, key: str, name: str, listen: str) -> None:
        """join: tcp://HOST:PORT of the server. listen: this machine's address, where agent and workers listen."""
        self.name = name
        self._join = join
        self._key = key
        self._listen = listen
        self._life = secrets.token_hex(8)
        self._inbox = ""
        self._server = ""  # id of the server that the orders come from
        self._orders: dict[str, Order] = {}
        self._started: dict[str, _Started] = {}
        self._unanswered = 0  # status messages sent since the server's last answer
        self._refused = ""
        self._told_unanswered = False  # it has been logged that no server has answered yet
        self._leaving = self._at_once = False
        self._changed = asyncio.Event()
        self._parcels: Path | None = None
        self._watching: set[asyncio.Task[None]] = set()

    def leave(self) -> None:
        """Start nothing more, and exit once the server has stopped the workers; on the second call, exit at once."""
        self._at_once, self._leaving = self._leaving, True
        self._changed.set()

    async def live(self) -> None:
        """Keep joining, and run the ordered workers; kills them all at the end. Raises ConfigError if `listen` cannot
        be bound."""
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
        """Wait for a change to report, or SAY_S. Unanswered messages are counted by wake-ups, so that the time in which
        this machine is suspended does not count."""
        self._changed.clear()
        try:
            async with asyncio.timeout(SAY_S):  # `wait_for` may swallow a cancellation (Python 3.11)
                await self._changed.wait()
        except TimeoutError:
            self._unanswered += 1
        if self._unanswered == ALONE and self._server:
            log.error("no message from %s for %d s: its workers are killed", self._join, ALONE)
            self._server, self._orders = "", {}
            self._follow()

    def _tell_unanswered(self, failed: int) -> None:
        """Log once why no server has answered yet. failed: connections that the server closed during the handshake."""
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
            except (msgspec.MsgspecError, struct.error) as error:  # the sender has the key, but another version
                log.error("%s sent a message that cannot be decoded: %s", self._join, error)
                continue
            for message in messages:
                match message:
                    case Orders():
                        self._obey(message)
                    case Refused():
                        if message.reason != self._refused:
                            log.error("the server refused this agent: %s", message.reason)
                        self._refused = message.reason
                    case _:
                        pass  # including Missed: every message is repeated with the full state

    def _obey(self, orders: Orders) -> None:
        self._unanswered, self._refused = 0, ""
        if orders.server != self._server:
            log.info("%s has accepted %s", self._join, self.name)
        self._server, self._orders = orders.server, {order.name: order for order in orders.workers}
        self._follow()

    def _follow(self) -> None:
        """Kill workers that are no longer ordered, and start ordered ones that do not run, one start of each at a
        time."""
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
                raise ConfigError(f"its messages would go to {config.outbox}, which is not on the network")
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
    """The host name of this machine."""
    with suppress(OSError):
        return os.uname().nodename
    return "here"
