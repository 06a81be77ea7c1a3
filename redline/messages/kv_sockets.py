"""Sockets of vLLM's KV events: a PUB socket with messages of three frames, and a ROUTER socket that replays missed
messages.

Frames: a topic, the message's number as eight bytes in big-endian order, and a batch (`kv_events.py`). A subscriber
that missed messages sends the number of the first to the ROUTER, which sends all messages that it still has from there
on, then number -1. Nothing is encrypted or authenticated.
"""

import itertools
import queue
import threading
from collections import deque
from contextlib import ExitStack
from hashlib import blake2b
from types import TracebackType
from typing import NamedTuple, Self, cast

import zmq

from redline import clock
from redline.errors import ConfigError

MOST_KEPT, MOST_KEPT_BYTES = 10_000, 64 << 20  # bounds of the replay buffer: messages, and their bytes
MOST_UNSENT = 100_000  # queued messages per slow subscriber; beyond it they are dropped
REPLAY_S = 5.0  # timeout of a replay
_LINGER_MS = 500
_NUMBER_BYTES = 8
_PAIRS = itertools.count()
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)

_Socket = zmq.Socket[bytes]


class Numbered(NamedTuple):
    """One message of a publisher."""

    number: int  # starts at 0 with each start of the publisher
    batch: bytes


class Publisher:
    """Publishes batches. One thread calls `send`; a thread of the publisher owns the sockets."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        """endpoint: address of the PUB socket; replay: address of the ROUTER socket. Both are bound:
        tcp://ADDRESS:PORT or ipc://PATH. Raises ConfigError if one cannot be used."""
        self._topic = topic.encode()
        with ExitStack() as opened:  # closes the sockets if a later one cannot be used
            self._pub = opened.enter_context(_bound(zmq.PUB, endpoint, "endpoint"))
            self._replay = None if replay is None else opened.enter_context(_bound(zmq.ROUTER, replay, "replay"))
            self._wake, self._woken = _pair()
            opened.pop_all()
        self._said = 0
        self._unsent: queue.SimpleQueue[Numbered | None] = queue.SimpleQueue()
        self._kept: deque[Numbered] = deque()
        self._kept_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def send(self, batch: bytes) -> None:
        """Publish a batch; never blocks."""
        self._unsent.put(Numbered(self._said, batch))
        self._said += 1
        self._wake.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is queued, and end the thread; idempotent."""
        if not self._wake.closed:
            self._unsent.put(None)
            self._wake.send(b"", zmq.NOBLOCK)
            self._thread.join()
            self._wake.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._woken in ready:
                    self._woken.recv()
                    if (message := self._unsent.get()) is None:
                        return
                    self._say(message)
                if self._replay is not None and self._replay in ready:
                    self._say_again(self._replay)
        finally:
            for socket in (self._pub, self._replay, self._woken):
                if socket is not None:
                    socket.close(linger=_LINGER_MS)

    def _say(self, message: Numbered) -> None:
        self._pub.send_multipart([self._topic, _packed(message.number), message.batch])
        self._kept.append(message)
        self._kept_bytes += len(message.batch)
        while len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft().batch)

    def _say_again(self, socket: _Socket) -> None:
        who, *asked = socket.recv_multipart()
        if len(asked) != 2 or len(asked[1]) != _NUMBER_BYTES:
            return  # not a replay request
        first = int.from_bytes(asked[1], "big")
        for message in self._kept:
            if message.number >= first:
                socket.send_multipart([who, b"", self._topic, _packed(message.number), message.batch])
        socket.send_multipart([who, b"", b"", _END, b""])


class Subscriber:
    """Receives the events of one publisher, ours or vLLM's. Use as a context manager, from one thread."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        """replay: address for replay requests, the first of which asks for all messages in the buffer; None disables
        replay. topic: prefix of the topics to receive. Raises ConfigError."""
        self._replay_at = replay
        self._sub = _connected(zmq.SUB, endpoint)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._last = -1  # number of the last message
        self._last_hash = b""  # hash of its batch
        self._again: dict[int, bytes] = {}  # hashes of replayed messages that may still arrive on the PUB socket

    def receive(self, timeout_s: float) -> list[Numbered]:
        """The messages that have arrived, in order. Waits up to `timeout_s` for the first, and up to REPLAY_S for a
        replay if some were missed. A gap in the numbers means missed messages; a number not higher than the last one
        belongs to a new start of the publisher."""
        found: list[Numbered] = []
        wait_ms = max(0, int(1e3 * timeout_s))
        while len(found) < MOST_KEPT and self._sub.poll(wait_ms):
            wait_ms = 0
            frames = self._sub.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
                continue  # not a KV event message
            message = Numbered(int.from_bytes(frames[1], "big"), frames[2])
            if self._was_said_again(message):
                continue
            if message.number <= self._last:
                self._starts_anew()
            if message.number > self._last + 1:
                found += self.catch_up()
                if self._was_said_again(message):
                    continue
            found.append(message)
            self._last, self._last_hash = message.number, _hashed(message.batch)
        return found

    def catch_up(self) -> list[Numbered]:
        """Replay the messages sent before this subscriber connected, or since `receive`, that the publisher still
        has. Empty if no replay arrives."""
        if self._replay_at is None:
            return []
        found = self._said_from(max(0, self._last), self._replay_at)
        if found and found[0].number == self._last:
            if _hashed(found[0].batch) == self._last_hash:
                del found[0]
            else:  # a new start of the publisher has reached this number
                self._starts_anew()
                found = self._said_from(0, self._replay_at)
        hashes = [_hashed(each.batch) for each in found]
        self._again.update((each.number, hashed) for each, hashed in zip(found, hashes, strict=True))
        if found:
            self._last, self._last_hash = found[-1].number, hashes[-1]
        return found

    def close(self) -> None:
        """Close the sockets; idempotent."""
        self._sub.close(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _starts_anew(self) -> None:
        """The publisher was restarted: forget the numbers of the previous start."""
        self._last, self._last_hash = -1, b""
        self._again.clear()

    def _said_from(self, first: int, address: str) -> list[Numbered]:
        """Replayed messages from number `first` on, as far as the publisher has them and they arrive within
        REPLAY_S."""
        found: list[Numbered] = []
        until = clock.monotonic() + REPLAY_S
        socket = _connected(zmq.DEALER, address)
        try:
            socket.send_multipart([b"", _packed(first)])
            while socket.poll(max(0, int(1e3 * (until - clock.monotonic())))):
                frames = socket.recv_multipart()  # an older publisher leaves out the topic
                if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
                    continue  # not a replayed message
                if frames[-2] == _END:
                    break
                found.append(Numbered(int.from_bytes(frames[-2], "big"), frames[-1]))
        finally:
            socket.close(linger=0)
        return found

    def _was_said_again(self, message: Numbered) -> bool:
        """Whether this message was replayed before. Replayed messages with lower numbers are no longer expected."""
        while self._again and (first := next(iter(self._again))) <= message.number:
            if self._again.pop(first) == _hashed(message.batch) and first == message.number:
                return True
        return False


def _hashed(batch: bytes) -> bytes:
    return blake2b(batch, digest_size=16).digest()


def _packed(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")


def _socket(kind: int) -> _Socket:
    return cast("zmq.Context[_Socket]", zmq.Context.instance()).socket(kind)


def _pair() -> tuple[_Socket, _Socket]:
    """A connected pair of sockets, by which one thread wakes another.

    libzmq frees an address only some time after its socket is closed, so each pair has a new one."""
    writes, reads = _socket(zmq.PUSH), _socket(zmq.PULL)
    writes.sndhwm = reads.rcvhwm = 0
    name = f"inproc://kv-events-{next(_PAIRS)}"
    reads.bind(name)
    writes.connect(name)
    return writes, reads


def _bound(kind: int, address: str, key: str) -> _Socket:
    socket = _socket(kind)
    socket.sndhwm = MOST_UNSENT
    socket.ipv6 = "[" in address
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"events.{key}: {address} cannot be used: {error}; choose another") from None
    return socket


def _connected(kind: int, address: str) -> _Socket:
    socket = _socket(kind)
    socket.rcvhwm = 0
    socket.ipv6 = "[" in address
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"cannot connect to {address}: {error}") from None
    return socket
