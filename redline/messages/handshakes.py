"""Limits the number and duration of unfinished handshakes at sockets that accept connections from other machines.

ZeroMQ accepts every TCP connection, and each takes a file descriptor of the process until its handshake has failed. So
the handshake has a timeout, and one thread for each such socket counts the accepted connections: if too many
connections of the process have not finished their handshake, it closes the oldest of them. A peer that has the key
reconnects by itself if its connection was closed.

ZeroMQ does not report which connection finished its handshake, but the kernel counts the bytes that each peer has
acknowledged: a peer without the key is sent only a greeting.
"""

import itertools
import logging
import socket
import struct
import threading
from contextlib import suppress

import zmq

from redline import clock

HANDSHAKE_MS = 5_000  # timeout of the whole handshake, which takes three round trips
MOST_UNFINISHED = 128  # unfinished connections per process
FINISHED_BYTES = 128  # sent by us: the greeting has 64 bytes; WELCOME, sent only to a peer with the key, 170 more
TELL_S = 60.0  # minimum time between two log lines about closed connections
_BYTES_ACKED = struct.Struct("<120xQ")  # tcpi_bytes_acked in struct tcp_info (tcp(7))
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_MONITOR_STOPPED
_OTHER_KEY = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
_EVENT = struct.Struct("<Hi")  # event of zmq_socket_monitor(3): its kind and value

log = logging.getLogger("redline.messages")


class Unfinished:
    """The connections of a process that may not have finished their handshake, oldest first. Thread-safe."""

    def __init__(self, most: int = MOST_UNFINISHED) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._ports: dict[int, int] = {}  # descriptor -> local port that accepted it
        self._told = -TELL_S

    def accepted(self, descriptor: int, port: int) -> None:
        """Add a connection accepted at `port`. If there are too many, close the oldest unfinished one."""
        with self._lock:
            self._ports.pop(descriptor, None)  # the kernel reuses the numbers of closed descriptors
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
                    "port %d: %d connections have not finished their handshake, which is the limit; each new "
                    "connection closes the oldest one",
                    port,
                    self._most,
                )

    def ended(self, descriptor: int, port: int) -> None:
        """Remove a connection accepted at `port`, which has ended. Its descriptor may belong to another socket by
        now."""
        with self._lock:
            if self._ports.get(descriptor) == port:
                del self._ports[descriptor]


_UNFINISHED = Unfinished()
_NUMBERS = itertools.count()


class Handshakes:
    """Watches the handshakes at one socket, before it is bound to a TCP address. Call `close` before closing the
    socket."""

    def __init__(self, at: "zmq.Socket[bytes]") -> None:
        at.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._at = at
        self._failed = 0  # total since the start
        self._taken = 0  # of these, already returned by `take_failed`
        address = f"inproc://handshakes-{next(_NUMBERS)}"
        threading.Thread(
            target=self._follow, args=(at.get_monitor_socket(_EVENTS, address),), name="handshakes", daemon=True
        ).start()

    def take_failed(self) -> int:
        """Number of connections since the last call that failed because their key differs."""
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
                except zmq.ContextTerminated:  # the process is shutting down
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
                except Exception:  # without a reader, ZeroMQ's own thread would block for ever
                    log.exception("a connection to %s could not be counted", endpoint.decode())


def _taken_by(descriptor: int, port: int) -> int:
    """Bytes sent by us that a connection's peer has acknowledged; FINISHED_BYTES if it is no longer a connection at
    `port`."""
    connection = _at(descriptor, port)
    if connection is None:
        return FINISHED_BYTES
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
        return _BYTES_ACKED.unpack(told)[0]
    except (OSError, struct.error):  # the connection has just been closed
        return FINISHED_BYTES
    finally:
        connection.detach()


def _end(descriptor: int, port: int) -> None:
    """Shut a connection down, so that ZeroMQ sees it as closed by the peer: ZeroMQ owns the descriptor and closes
    it."""
    connection = _at(descriptor, port)
    if connection is not None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.detach()


def _at(descriptor: int, port: int) -> socket.socket | None:
    """A connection accepted at `port`, to be detached by the caller; None if the descriptor is something else by
    now."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return None
    with suppress(OSError, IndexError, TypeError):
        if connection.family == socket.AF_INET and connection.getsockname()[1] == port:
            return connection
    connection.detach()
    return None
