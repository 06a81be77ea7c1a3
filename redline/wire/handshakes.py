"""Keeps connections that have not finished their handshake few and short, at sockets to which other machines connect.

ZeroMQ accepts whoever connects, and each connection takes a descriptor of the process until its handshake has failed.
So the handshake has a time; and a thread for each such socket hears of every connection that is accepted and, where too
many of a process have not finished, ends the oldest of them. Who has the key connects again by itself where that was
one of its own.

ZeroMQ does not name the connection that has finished, but the kernel counts what each peer has taken: without the key a
peer is sent a greeting alone.
"""

import itertools
import logging
import socket
import struct
import threading
from contextlib import suppress

import zmq

from redline import clock

HANDSHAKE_MS = 5_000  # for the whole handshake, which takes three round trips
MOST_UNFINISHED = 128  # connections of one process
FINISHED_BYTES = 128  # of ours: a greeting has 64, and WELCOME, which only who has the key is sent, 170 more
TELL_S = 60.0  # between two lines about connections that were ended
_BYTES_ACKED = struct.Struct("<120xQ")  # of struct tcp_info (tcp(7)), tcpi_bytes_acked
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_MONITOR_STOPPED
_OTHER_KEY = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
_EVENT = struct.Struct("<Hi")  # of zmq_socket_monitor(3): which, and its value

log = logging.getLogger("redline.wire")


class Unfinished:
    """The connections of a process that may not have finished their handshake, the oldest first. Any thread calls."""

    def __init__(self, most: int = MOST_UNFINISHED) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._ports: dict[int, int] = {}  # by descriptor: at which port it was accepted
        self._told = -TELL_S

    def accepted(self, descriptor: int, port: int) -> None:
        """A connection was accepted at `port`; where there are too many, the oldest that has not finished is ended."""
        with self._lock:
            self._ports.pop(descriptor, None)  # a descriptor that was closed is given out again
            self._ports[descriptor] = port
            if len(self._ports) <= self._most:
                return
            for each, its_port in list(self._ports.items()):
                if _taken_by(each, its_port) < FINISHED_BYTES:
                    break
                del self._ports[each]
            if len(self._ports) <= self._most:
                return
            oldest = next(iter(self._ports))
            _end(oldest, self._ports.pop(oldest))
            if (now := clock.monotonic()) - self._told >= TELL_S:
                self._told = now
                log.warning(
                    "port %d: %d connections have not finished their handshake, as many as there may be; each new one "
                    "ends the oldest",
                    port,
                    self._most,
                )

    def ended(self, descriptor: int, port: int) -> None:
        """A connection that was accepted at `port` has ended. Its descriptor may be another socket's by now."""
        with self._lock:
            if self._ports.get(descriptor) == port:
                del self._ports[descriptor]


_UNFINISHED = Unfinished()
_NUMBERS = itertools.count()


class Handshakes:
    """The handshakes at one socket that will be bound to a TCP address. `close` comes before that of the socket."""

    def __init__(self, at: "zmq.Socket[bytes]") -> None:
        at.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._at = at
        self._failed = 0  # since the start
        self._taken = 0  # of them
        address = f"inproc://handshakes-{next(_NUMBERS)}"
        threading.Thread(
            target=self._follow, args=(at.get_monitor_socket(_EVENTS, address),), name="handshakes", daemon=True
        ).start()

    def take_failed(self) -> int:
        """How many connections have failed since the last call, or since the start, because they have another key."""
        failed = self._failed
        taken, self._taken = self._taken, failed
        return failed - taken

    def close(self) -> None:
        """End the thread."""
        self._at.disable_monitor()

    def _follow(self, monitor: "zmq.Socket[bytes]") -> None:
        unfinished = _UNFINISHED
        with monitor:
            while True:
                try:
                    event, endpoint = monitor.recv_multipart()
                except zmq.ContextTerminated:  # the process ends
                    return
                kind, value = _EVENT.unpack(event)
                try:
                    port = int(endpoint.rpartition(b":")[2] or 0)
                    match kind:
                        case zmq.EVENT_MONITOR_STOPPED:
                            return
                        case zmq.EVENT_ACCEPTED:
                            unfinished.accepted(value, port)
                        case zmq.EVENT_DISCONNECTED:
                            unfinished.ended(value, port)
                        case _:
                            self._failed += value == _OTHER_KEY
                except Exception:  # ZeroMQ's own thread would wait for ever for a reader that has ended
                    log.exception("a connection to %s could not be counted", endpoint.decode())


def _taken_by(descriptor: int, port: int) -> int:
    """Bytes of ours that a connection's peer has taken; enough of them if it is no connection at `port` any more."""
    connection = _at(descriptor, port)
    if connection is None:
        return FINISHED_BYTES
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
        return _BYTES_ACKED.unpack(told)[0]
    except (OSError, struct.error):  # it has just ended
        return FINISHED_BYTES
    finally:
        connection.detach()


def _end(descriptor: int, port: int) -> None:
    """Have ZeroMQ find that the peer has left: it owns the descriptor, and closes it."""
    connection = _at(descriptor, port)
    if connection is not None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.detach()


def _at(descriptor: int, port: int) -> socket.socket | None:
    """A connection that was accepted at `port`, to be detached; None where its descriptor is something else by now."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return None
    with suppress(OSError, IndexError, TypeError):
        if connection.family == socket.AF_INET and connection.getsockname()[1] == port:
            return connection
    connection.detach()
    return None
