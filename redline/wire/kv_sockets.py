"""How vLLM's KV events travel: a PUB socket of three frames, and a ROUTER that says again what was missed.

Frames: a topic, the message's number in eight bytes, the highest first, and a batch (`kv_events.py`). Who has missed
some asks the second socket, beginning with a number; it answers with all that it still has, and then with number -1.
Nothing of it is encrypted, and nobody is asked for a key.
"""

import queue
import threading
from collections import deque
from hashlib import blake2b
from types import TracebackType
from typing import NamedTuple, Self, cast

import zmq

from redline import clock
from redline.errors import ConfigError

MOST_KEPT, MOST_KEPT_BYTES = 10_000, 64 << 20  # messages that can be said again
MOST_UNSENT = 100_000  # to one who reads slowly; then he misses some
REPLAY_S = 5.0  # for what was missed to come
_LINGER_MS = 500
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)

_Socket = zmq.Socket[bytes]


class Numbered(NamedTuple):
    """One message of a publisher."""

    number: int  # 0 is the first of its start
    batch: bytes


class Publisher:
    """Says batches to whoever listens. One thread calls `send`, another of its own has the sockets."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        """endpoint: where it can be listened to; replay: where it is asked again. Both are bound: tcp://ADDRESS:PORT or
        ipc://PATH. Raises ConfigError where one cannot be used."""
        self._topic = topic.encode()
        self._pub = _bound(zmq.PUB, endpoint, "endpoint")
        try:
            self._replay = None if replay is None else _bound(zmq.ROUTER, replay, "replay")
            self._wake, self._woken = _pair()
        except ConfigError:
            self._pub.close(linger=0)
            raise
        self._said = 0
        self._unsent: queue.SimpleQueue[Numbered | None] = queue.SimpleQueue()
        self._kept: deque[Numbered] = deque()
        self._kept_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def send(self, batch: bytes) -> None:
        """Say a batch; never blocks."""
        self._unsent.put(Numbered(self._said, batch))
        self._said += 1
        self._wake.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is left, and end the thread; idempotent."""
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
            return  # nobody who knows how to ask
        first = int.from_bytes(asked[1], "big")
        for message in self._kept:
            if message.number >= first:
                socket.send_multipart([who, b"", self._topic, _packed(message.number), message.batch])
        socket.send_multipart([who, b"", b"", _END, b""])


class Subscriber:
    """Listens to one publisher, ours or vLLM's. Use as a context manager. One thread uses it."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        """replay: where it asks for what it has missed, at first for all that is kept; None: it asks nobody. topic:
        with which the topics of messages begin that it reads. Raises ConfigError."""
        self._replay_at = replay
        self._sub = _connected(zmq.SUB, endpoint)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._last = -1  # number
        self._last_hash = b""  # of its batch
        self._again: dict[int, bytes] = {}  # hashes of those said again, that may still come as they were said first

    def receive(self, timeout_s: float) -> list[Numbered]:
        """What has come, in order, waiting so long for the first, and REPLAY_S where some were missed. A number that is
        left out was missed; one that is not higher than the last belongs to another start of the publisher."""
        found: list[Numbered] = []
        wait_ms = max(0, int(1e3 * timeout_s))
        while len(found) < MOST_KEPT and self._sub.poll(wait_ms):
            wait_ms = 0
            frames = self._sub.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
                continue  # no message of this kind
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
        """What was said before it listened, or since `receive`, and is still kept there. None where nobody answers."""
        if self._replay_at is None:
            return []
        found = self._said_from(max(0, self._last), self._replay_at)
        if found and found[0].number == self._last:
            if _hashed(found[0].batch) == self._last_hash:
                del found[0]
            else:  # another start has come as far
                self._starts_anew()
                found = self._said_from(0, self._replay_at)
        hashes = [_hashed(each.batch) for each in found]
        self._again.update((each.number, hashed) for each, hashed in zip(found, hashes, strict=True))
        if found:
            self._last, self._last_hash = found[-1].number, hashes[-1]
        return found

    def close(self) -> None:
        """Listen no more; idempotent."""
        self._sub.close(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _starts_anew(self) -> None:
        """Another start of the publisher speaks: nothing of it has been heard."""
        self._last, self._last_hash = -1, b""
        self._again.clear()

    def _said_from(self, first: int, address: str) -> list[Numbered]:
        """What has this number or a higher one, as far as it is kept and comes in time."""
        found: list[Numbered] = []
        until = clock.monotonic() + REPLAY_S
        socket = _connected(zmq.DEALER, address)
        try:
            socket.send_multipart([b"", _packed(first)])
            while socket.poll(max(0, int(1e3 * (until - clock.monotonic())))):
                frames = socket.recv_multipart()  # an older publisher leaves out the topic
                if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
                    continue  # no answer of this kind
                if frames[-2] == _END:
                    break
                found.append(Numbered(int.from_bytes(frames[-2], "big"), frames[-1]))
        finally:
            socket.close(linger=0)
        return found

    def _was_said_again(self, message: Numbered) -> bool:
        """Whether this has come already; those before it come no more."""
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
    """Two ends by which one thread wakes another."""
    writes, reads = _socket(zmq.PUSH), _socket(zmq.PULL)
    writes.sndhwm = reads.rcvhwm = 0
    name = f"inproc://kv-events-{id(reads)}"
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
        raise ConfigError(f"{address} cannot be listened to: {error}") from None
    return socket
