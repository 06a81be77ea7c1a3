"""How messages travel: through memory within a process, through a socket between processes.

A channel has one reader and any number of writers, and keeps each writer's order. A blocking reader drains it, an
asyncio reader awaits it. The reader binds the address, writers connect.

Where a connection is cut its writer connects again, and what was on the way is lost. Every message is numbered by its
writer, so the reader knows: it finds a `Missed` in the place of what is not there.

Over TCP both ends share a key and speak CURVE (encrypted, authenticated, safe from replay). The reader's key pair is
derived from the shared key; its public half never travels, and who does not have it cannot open a connection. Local
sockets are files in a folder that only their owner can enter.
"""

import asyncio
import contextlib
import hashlib
import math
import os
import stat
import struct
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

import zmq
import zmq.asyncio
from zmq.utils import z85

from redline.errors import ConfigError, MessageTooLarge
from redline.wire.codec import Wire, decode, encode
from redline.wire.handshakes import Handshakes
from redline.wire.news import Missed

MAX_MESSAGE_BYTES = 64 << 20  # of one message between processes, as encoded
MOST_AT_ONCE = 32  # messages that a task of an event loop is given: what they set off, 0.3 ms each, runs in one turn
IPC = "ipc://"  # of a local socket's address, before its path
_LINGER_MS = 1000  # how long a closing writer waits for its last messages to leave
_IPC_PATH_BYTES = 107  # sockaddr_un holds 108, the last of them zero
WRITER_BYTES = 8  # of a writer's name
_HEAD = struct.Struct(f"<{WRITER_BYTES}sQ")  # before each message: its writer, and how many it has sent before


class Inbox(Protocol):
    """What a thread reads messages from, in the order of each writer."""

    def drain(self, *, wait: bool, timeout: float | None = None) -> list[Wire]:
        """All messages that are there, which may be none. wait: block until there is one, for `timeout` seconds at
        most (None: for ever)."""
        ...


class AsyncInbox(Protocol):
    """What a task of an event loop reads messages from, in the order of each writer."""

    async def get(self) -> list[Wire]:
        """The next messages, at least one, once there are any."""
        ...


class Outbox(Protocol):
    """What messages are written to."""

    def put(self, message: Wire) -> None:
        """Sends a message; never blocks. Raises MessageTooLarge, and sends nothing, where it is too large to travel."""
        ...


class MemoryChannel:
    """Both ends of a channel within one process, which bounds no message's size.

    Any thread may put; one thread drains, or one task gets.
    """

    def __init__(self) -> None:
        self._messages: deque[Wire] = deque()
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, message: Wire) -> None:
        """Hand over a message, as it is; never blocks."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()
            if self._waiter is not None:
                loop, arrived = self._waiter
                self._waiter = None
                loop.call_soon_threadsafe(arrived.set)

    def drain(self, *, wait: bool, timeout: float | None = None) -> list[Wire]:
        """All messages that are there. wait: block until one is, for `timeout` seconds at most (None: for ever)."""
        if not wait and not self._messages:
            return []  # as most are found between two steps: no lock is needed to see that
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._messages, timeout)
            return self._take()

    async def get(self) -> list[Wire]:
        """All messages that are there, once there is one."""
        while True:
            with self._changed:
                if self._messages:
                    return self._take()
                arrived = asyncio.Event()
                self._waiter = (asyncio.get_running_loop(), arrived)
            try:
                await arrived.wait()
            finally:
                with self._changed:
                    self._waiter = None  # a cancelled reader's loop may be gone when the next message comes

    def _take(self) -> list[Wire]:
        messages = list(self._messages)
        self._messages.clear()
        return messages


def ipc_address(folder: Path, name: str) -> str:
    """The address of a local socket in `folder`, which is made, with mode 0700, where it is not there.

    Raises ConfigError when there can be no such folder, others can enter it, or the path is too long for a socket.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: sockets cannot be put here: {error.strerror}") from None
    facts = folder.stat()
    if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(f"{folder}: others can enter this folder; sockets need one of your own with mode 0700")
    path = folder / name
    if len(os.fsencode(path)) > _IPC_PATH_BYTES:
        raise ConfigError(f"{path}: a socket's path has at most {_IPC_PATH_BYTES} bytes")
    return f"{IPC}{path}"


class _Socket:
    """What the ends of a socket share: closing, and keys.

    Raises ConfigError for an address that is neither ipc nor TCP with a key, and for one that cannot be used.
    """

    def __init__(self, kind: int, address: str, key: bytes | None, most: int = 0) -> None:
        context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
        self._socket = socket = context.socket(kind)
        self._monitor: zmq.Socket[bytes] | None = None  # of a writer
        self._handshakes: Handshakes | None = None  # of a reader, over TCP
        socket.linger = _LINGER_MS
        try:
            if address.startswith("tcp://"):
                _secure(socket, address, key)
            elif not address.startswith(IPC):
                raise ConfigError(f"{address}: an address begins with ipc:// or tcp://")
            if kind == zmq.PULL:
                socket.rcvhwm = 0  # never drop or block: what may wait is bounded where requests are admitted
                socket.setsockopt(zmq.MAXMSGSIZE, _HEAD.size + MAX_MESSAGE_BYTES)
                if not address.startswith(IPC):
                    self._handshakes = Handshakes(socket)
                socket.bind(address)
            else:
                socket.sndhwm = most
                socket.connect(address)
        except zmq.ZMQError as error:
            self._close(linger=0)
            raise ConfigError(f"{address}: {error}") from error
        except ConfigError:
            self._close(linger=0)
            raise

    def close(self) -> None:
        """Close the socket; what was written is sent in the background for a second at most. Safe to call twice."""
        self._close()

    def _close(self, linger: int | None = None) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        if self._handshakes is not None:
            self._handshakes.close()
            self._handshakes = None
        self._socket.close(linger)

    def failed_handshakes(self) -> int:
        """How many connections have failed since the last call because the two ends have different keys; 0 at a
        writer's first call, which begins to count. It sees only that the reader has closed the connection."""
        if self._handshakes is not None:
            return self._handshakes.take_failed()
        if (monitor := self._monitor) is None:
            address = f"inproc://monitor-{os.urandom(8).hex()}"
            self._socket.monitor(address, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
            monitor = self._monitor = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance()).socket(zmq.PAIR)
            monitor.rcvhwm = 0  # with a bound, whoever counts late would hold up the thread that receives
            monitor.connect(address)
        failed = 0
        while monitor.poll(0):
            monitor.recv_multipart()
            failed += 1
        return failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class SocketOutbox(_Socket):
    """The writing end. One thread uses it. Messages wait here until a reader has bound the address and reads them.

    address: ipc://PATH or tcp://HOST:PORT. key: the secret that both ends share, for TCP. writer: the name that its
    messages are numbered under, which no other writer of the address has; None: one drawn at random. most: messages
    that wait at most, more are lost, and the reader finds a `Missed` in their place; 0: any number. Raises ConfigError
    where the address cannot be used.
    """

    def __init__(self, address: str, key: bytes | None = None, writer: bytes | None = None, *, most: int = 0) -> None:
        super().__init__(zmq.PUSH, address, key, most)
        self._writer = writer or os.urandom(WRITER_BYTES)
        self._sent = 0

    def put(self, message: Wire) -> None:
        """Send a message; never blocks. Raises MessageTooLarge, and sends nothing, beyond MAX_MESSAGE_BYTES."""
        data = encode(message)
        if len(data) > MAX_MESSAGE_BYTES:  # the reader would drop it, and the connection, without a word
            raise MessageTooLarge(
                f"the {type(message).__name__.lower()} of this request has {len(data):,} bytes; between processes "
                f"travel {MAX_MESSAGE_BYTES:,} at most: ask for less at once"
            )
        with contextlib.suppress(zmq.Again):  # as many wait as may
            self._socket.send(_HEAD.pack(self._writer, self._sent) + data, zmq.NOBLOCK)
        self._sent += 1


class SocketInbox(_Socket):
    """The reading end, for a thread that blocks. `address` has the port that was chosen where `*` was asked for.

    address, key, ConfigError: as for SocketOutbox.
    """

    def __init__(self, address: str, key: bytes | None = None) -> None:
        super().__init__(zmq.PULL, address, key)
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._heard: dict[bytes, int] = {}

    def drain(self, *, wait: bool, timeout: float | None = None) -> list[Wire]:
        """All messages that have arrived. wait: block until one has, for `timeout` seconds at most (None: for ever)."""
        if wait:
            self._socket.poll(None if timeout is None else max(0, math.ceil(timeout * 1000)))
        return _receive(self._socket, self._heard)


class AsyncSocketInbox(_Socket):
    """The reading end, for one task of an event loop; arguments and errors as for SocketInbox."""

    def __init__(self, address: str, key: bytes | None = None) -> None:
        super().__init__(zmq.PULL, address, key)
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._heard: dict[bytes, int] = {}
        self._readable = zmq.asyncio.Socket.shadow(self._socket)  # pyright: ignore[reportUnknownMemberType]
        self._descriptor = cast("int", self._socket.get(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None  # which watches the descriptor from the first `get` on

    async def get(self) -> list[Wire]:
        """The next MOST_AT_ONCE messages at most, and one at least, once there are any."""
        self._loop = asyncio.get_running_loop()
        while True:
            await self._readable.poll()
            messages = _receive(self._socket, self._heard, MOST_AT_ONCE)
            if messages:
                return messages

    def close(self) -> None:
        """Close the socket, and have its event loop forget the descriptor: the next socket may be given the same."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
            self._loop = None
        super().close()


def _secure(socket: zmq.Socket[bytes], address: str, key: bytes | None) -> None:
    if not key:
        raise ConfigError(f"{address}: a TCP socket needs a shared key")
    secret = z85.encode(hashlib.blake2b(key, digest_size=32, person=b"redline-channel").digest())
    if socket.socket_type == zmq.PULL:
        socket.curve_server = 1
        socket.curve_secretkey = secret
    else:
        socket.curve_serverkey = zmq.curve_public(secret)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def _receive(socket: zmq.Socket[bytes], heard: dict[bytes, int], most: float = math.inf) -> list[Wire]:
    """What has arrived, in order, `most` messages at most, each gap before them told as Missed.

    heard: how many messages each writer has sent. Raises msgspec.ValidationError for what is no message, and
    struct.error for what is shorter than a message's head.
    """
    messages: list[Wire] = []
    while len(messages) < most:
        try:
            data = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            break
        writer, number = _HEAD.unpack_from(data)
        if missed := number - heard.get(writer, 0):
            messages.append(Missed(messages=missed, writer=writer))
        heard[writer] = number + 1
        messages.append(decode(memoryview(data)[_HEAD.size :]))
    return messages
