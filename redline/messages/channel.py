"""How messages travel: through memory within a process, through a socket between processes.

A channel has one reader and any number of writers, and keeps each writer's order. A blocking reader drains it, an
asyncio reader awaits it. The reader binds the address, writers connect.

When a connection is cut, its writer reconnects, and the messages in flight are lost. Every writer numbers its messages,
so the reader detects the loss: it receives a `Missed` in the place of the lost messages.

Over TCP both ends share a key and use CURVE (encrypted, authenticated, protected against replay). The reader's key pair
is derived from the shared key; its public half is never sent, so a peer without the key cannot open a connection. Local
sockets are files in a folder that only its owner can enter.
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
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

import zmq
import zmq.asyncio
from zmq.utils import z85

from redline.errors import ConfigError, MessageTooLarge
from redline.messages.codec import Wire, decode, encode
from redline.messages.handshakes import Handshakes
from redline.messages.news import Missed

MAX_MESSAGE_BYTES = 64 << 20  # of one encoded message between processes
# Frames per `get` of an asyncio reader: handling one takes 0.3 ms, and all run in one iteration of the event loop.
MOST_AT_ONCE = 32
IPC = "ipc://"  # scheme of a local socket's address, followed by its path
_LINGER_MS = 1000  # how long a closed socket keeps sending its last messages
_IPC_PATH_BYTES = 107  # sockaddr_un.sun_path has 108 bytes, the last of them zero
WRITER_BYTES = 8  # size of a writer's name
# Header of each frame: the writer's name, and how many messages it sent before.
_HEAD = struct.Struct(f"<{WRITER_BYTES}sQ")


class Inbox(Protocol):
    """The reading end of a channel for a thread; keeps the order of each writer."""

    def drain(self, *, wait: bool, timeout: float | None = None) -> list[Wire]:
        """All messages that have arrived, possibly none. wait: block until there is one, for at most `timeout`
        seconds (None: no limit)."""
        ...


class AsyncInbox(Protocol):
    """The reading end of a channel for a task of an event loop; keeps the order of each writer."""

    async def get(self) -> list[Wire]:
        """Wait for messages and return them; at least one."""
        ...


class Outbox(Protocol):
    """The writing end of a channel."""

    def put(self, message: Wire) -> None:
        """Send a message; never blocks. Raises MessageTooLarge, and sends nothing, if it is too large for the
        channel."""
        ...


class MemoryChannel:
    """Both ends of a channel within one process, without a limit on a message's size.

    Any thread may put; one thread drains, or one task gets.
    """

    def __init__(self) -> None:
        self._messages: deque[Wire] = deque()
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, message: Wire) -> None:
        """Append a message without encoding it; never blocks."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()
            if self._waiter is not None:
                loop, arrived = self._waiter
                self._waiter = None
                loop.call_soon_threadsafe(arrived.set)

    def drain(self, *, wait: bool, timeout: float | None = None) -> list[Wire]:
        """All messages that have arrived. wait: block until there is one, for at most `timeout` seconds (None: no
        limit)."""
        if not wait and not self._messages:
            return []  # the usual case between two steps; checked without the lock
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._messages, timeout)
            return self._take()

    async def get(self) -> list[Wire]:
        """Wait until there is a message and return all."""
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
                    self._waiter = None  # a cancelled reader's loop may be closed when the next message comes

    def _take(self) -> list[Wire]:
        messages = list(self._messages)
        self._messages.clear()
        return messages


def ipc_address(folder: Path, name: str) -> str:
    """The address of a local socket in `folder`, which is created with mode 0700 if it does not exist.

    Raises ConfigError if the folder cannot be created, if other users can enter it, or if the path is too long for a
    socket.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot create sockets in this folder: {error.strerror}") from None
    facts = folder.stat()
    if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(f"{folder}: other users can enter this folder; use one of your own with mode 0700")
    path = folder / name
    if len(os.fsencode(path)) > _IPC_PATH_BYTES:
        raise ConfigError(f"{path}: a socket's path has at most {_IPC_PATH_BYTES} bytes")
    return f"{IPC}{path}"


class _Socket:
    """Common part of both ends of a socket: opening, CURVE keys, closing.

    Raises ConfigError for an address that is neither ipc nor TCP with a key, and for an address that cannot be used.
    """

    def __init__(self, kind: int, address: str, key: bytes | None, most: int = 0) -> None:
        context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
        self._socket = socket = context.socket(kind)
        self._monitor: zmq.Socket[bytes] | None = None  # only in a writer
        self._handshakes: Handshakes | None = None  # only in a reader over TCP
        socket.linger = _LINGER_MS
        try:
            if address.startswith("tcp://"):
                _secure(socket, address, key)
            elif not address.startswith(IPC):
                raise ConfigError(f"{address}: an address must begin with ipc:// or tcp://")
            if kind == zmq.PULL:
                socket.rcvhwm = 0  # never drop or block: admission control bounds the number of queued messages
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
        """Close the socket; messages already put are sent in the background for at most one second. Idempotent."""
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
        """Number of connections since the last call that failed because the two ends have different keys. A writer's
        first call returns 0 and starts the count; a writer sees only that the reader closed the connection."""
        if self._handshakes is not None:
            return self._handshakes.take_failed()
        if (monitor := self._monitor) is None:
            address = f"inproc://monitor-{os.urandom(8).hex()}"
            self._socket.monitor(address, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
            monitor = self._monitor = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance()).socket(zmq.PAIR)
            # With a limit, a late call would block the thread that receives.
            monitor.rcvhwm = 0
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
    """The writing end, used by one thread. Messages are queued here until a reader has bound the address and receives
    them.

    address: ipc://PATH or tcp://HOST:PORT. key: the secret that both ends share, for TCP. writer: the name under which
    messages are numbered, unique among the writers of the address; None: a random name. most: maximum number of queued
    messages; beyond it messages are dropped, and the reader receives a `Missed` in their place; 0: no limit. Raises
    ConfigError if the address cannot be used.
    """

    def __init__(self, address: str, key: bytes | None = None, writer: bytes | None = None, *, most: int = 0) -> None:
        super().__init__(zmq.PUSH, address, key, most)
        self._writer = writer or os.urandom(WRITER_BYTES)
        self._sent = 0

    def put(self, message: Wire) -> None:
        """Send a message; never blocks. Raises MessageTooLarge, and sends nothing, if it is larger than
        MAX_MESSAGE_BYTES."""
        self.put_all((message,))

    def put_all(self, messages: Sequence[Wire]) -> None:
        """Send messages in one frame, which costs both ends about as much as one message; never blocks. Raises
        MessageTooLarge, and sends nothing, if they are together larger than MAX_MESSAGE_BYTES."""
        data = encode(messages)
        if len(data) > MAX_MESSAGE_BYTES:  # the reader would close the connection without an error message
            raise MessageTooLarge(
                f"the {type(messages[0]).__name__.lower()} message of this request has {len(data):,} bytes; the limit "
                f"between processes is {MAX_MESSAGE_BYTES:,}: request less at once"
            )
        with contextlib.suppress(zmq.Again):  # the queue is full (`most`)
            self._socket.send(_HEAD.pack(self._writer, self._sent) + data, zmq.NOBLOCK)
        self._sent += len(messages)


class SocketInbox(_Socket):
    """The reading end, for a thread that blocks. `address` contains the chosen port if the port was given as `*`.

    address, key, ConfigError: as for SocketOutbox.
    """

    def __init__(self, address: str, key: bytes | None = None) -> None:
        super().__init__(zmq.PULL, address, key)
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._heard: dict[bytes, int] = {}

    def drain(self, *, wait: bool, timeout: float | None = None) -> list[Wire]:
        """All messages that have arrived. wait: block until there is one, for at most `timeout` seconds (None: no
        limit)."""
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
        # Set by the first `get`; the loop then watches the descriptor.
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self) -> list[Wire]:
        """Wait for messages and return those of at most MOST_AT_ONCE frames, at least one."""
        self._loop = asyncio.get_running_loop()
        while True:
            await self._readable.poll()
            messages = _receive(self._socket, self._heard, MOST_AT_ONCE)
            if messages:
                return messages

    def close(self) -> None:
        """Close the socket and unregister its descriptor from the event loop: the next socket may get the same
        descriptor."""
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
    """The messages that have arrived, in order, of at most `most` frames; a `Missed` is inserted at each gap in a
    writer's numbers.

    heard: number of messages received from each writer. Raises msgspec.ValidationError for data that is not a message,
    and struct.error for data shorter than the header.
    """
    messages: list[Wire] = []
    frames = 0
    while frames < most:
        frames += 1
        try:
            data = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            break
        writer, number = _HEAD.unpack_from(data)
        if missed := number - heard.get(writer, 0):
            messages.append(Missed(messages=missed, writer=writer))
        arrived = decode(memoryview(data)[_HEAD.size :])
        heard[writer] = number + len(arrived)
        messages += arrived
    return messages
