"""One HTTP/1.1 connection of the load generator, and the splitting of a response's body into server-sent events.

It uses asyncio's Protocol and httptools' parser directly, for two reasons. First, the time of a chunk must be that of
the read which completed it, before parsing and before a task is woken: a general HTTP client passes bodies through
queues and coroutines, so times taken there include the load of the event loop. Second, every token costs CPU time of
the load generator, which must not limit the measurement. Data is parsed in the next iteration of the event loop, after
every ready socket has been read: a step of the engine sends a token to all streams at once, and the last of 64 would
otherwise be timed after the parsing of the other 63. Redirects are not followed, since another server would be timed.
"""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from redline.bench.serving.records import Failure

HEAD_BYTES = 64 << 10  # maximum size of a response's head
EVENT_BYTES = 16 << 20  # maximum size of one event


class TooLarge(Exception):
    """The response exceeds a limit of this module, which the message names."""


class EventSplitter:
    """Splits a byte stream, in arbitrary pieces, into the data of its server-sent events.

    Lines end with LF, CRLF or CR; comments and fields other than `data` are skipped; several data lines are joined by
    LF, according to the standard.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._swallow_lf = False  # the last read ended with CR: the next may start with its LF

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that these bytes complete. Raises TooLarge for an event larger than EVENT_BYTES."""
        if self._swallow_lf or b"\r" in data:
            data = self._plain(data)
        rest = self._rest
        if rest:
            start = len(rest) - 1
            rest += data
            end = rest.rfind(b"\n\n", start)
            if end < 0:
                if len(rest) > EVENT_BYTES:
                    raise TooLarge(f"one event has more than {EVENT_BYTES >> 20} MiB")
                return []
            whole = bytes(rest[:end])
            del rest[: end + 2]
        else:
            end = data.rfind(b"\n\n")
            if end + 2 != len(data) or end < 0:
                rest += data[end + 2 :] if end >= 0 else data
                if end < 0:
                    return []
            whole = data[:end]
            if whole.startswith(b"data: ") and b"\n" not in whole:
                return [whole[6:]]
        return [found for piece in whole.split(b"\n\n") if (found := _data(piece)) is not None]

    def finish(self) -> list[bytes]:
        """The data of a last event without its empty line, at the end of the stream."""
        found = _data(bytes(self._rest))
        self._rest.clear()
        return [] if found is None else [found]

    def _plain(self, data: bytes) -> bytes:
        if self._swallow_lf and data.startswith(b"\n"):
            data = data[1:]
            self._swallow_lf = False
        if data:
            self._swallow_lf = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data(piece: bytes) -> bytes | None:
    """The joined data lines of one event without its empty line; None if it has no data."""
    if piece.startswith(b"data: ") and b"\n" not in piece:
        return piece[6:]
    lines = [line[5:].removeprefix(b" ") for line in piece.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class ResponseReceiver(Protocol):
    """Receives the response to one request. at: the time of the read, on the connection's clock."""

    def head(self, status: int, headers: dict[str, str], at: float) -> None:
        """The response's head. headers: names in lower case."""
        ...

    def data(self, data: bytes, at: float) -> None:
        """A part of the body."""
        ...

    def ended(self, failure: Failure | None, error: str, at: float, untouched: bool) -> None:
        """The response is complete (failure None) or has failed. untouched: no byte of it was received."""
        ...


class ClientConnection(asyncio.Protocol):
    """One connection, for one request at a time. clock: in seconds. free: called when it is ready for the next request.

    lost: called once when the connection is closed. opened: the time at which it was established.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        free: Callable[["ClientConnection"], None],
        lost: Callable[["ClientConnection"], None],
    ) -> None:
        self._clock, self._free, self._lost = clock, free, lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._file = -1  # file descriptor of the socket, if bytes can be written to it directly
        self._receiver: ResponseReceiver | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._at = 0.0
        self._read: list[tuple[float, bytes]] = []  # received, not yet parsed
        self._bytes = 0
        self._headers: dict[str, str] = {}
        self._in_body = False
        self.opened = 0.0
        self.used = False  # it has sent a request
        self.usable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.opened = self._clock()
        self.usable = True
        if transport.get_extra_info("ssl_object") is None:
            self._file = transport.get_extra_info("socket").fileno()

    def send(self, request: bytes, receiver: ResponseReceiver) -> float:
        """Sends a request; `receiver` gets the response. Returns the time at which its first byte was written."""
        assert self._transport is not None
        assert self._receiver is None
        self._receiver = receiver
        self._parser = httptools.HttpResponseParser(self)
        self._bytes = 0
        self._headers = {}
        self._in_body = False
        self.used = True
        at = self._clock()
        if self._file >= 0:
            # uvloop's transports write at the end of an event loop iteration: the first of 64 requests sent in one
            # iteration would wait for the 63 others. The transport cannot contain bytes of an earlier request.
            with contextlib.suppress(OSError):
                request = request[os.write(self._file, request) :]
        if request:
            self._transport.write(request)
        return at

    def close(self) -> None:
        """Closes the connection at once. The receiver of an unfinished response is not called again."""
        self._receiver = None
        self._close()

    def _close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._read:
            self._loop.call_soon(self._parse_all)
        self._read.append((self._clock(), data))

    def _parse_all(self) -> None:
        read, self._read = self._read, []
        for at, data in read:
            self._at = at
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        if self._receiver is None or self._parser is None:
            return self._close()  # data without a request
        self._bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("malformed", "the server answered with a protocol upgrade")
        except httptools.HttpParserCallbackError as error:
            reason = error.__context__ or error
            if not isinstance(reason, TooLarge):
                raise reason from None
            self._fail("malformed", str(reason))
        except httptools.HttpParserError as error:
            self._fail("malformed", f"invalid HTTP: {error}")
        if not self._in_body and self._bytes > HEAD_BYTES:
            self._fail("malformed", f"the response's head has more than {HEAD_BYTES >> 10} KiB")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser: one header, or a trailer."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser: the head is complete."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status >= 200 and self._receiver is not None:
            self._in_body = True
            self._receiver.head(status, self._headers, self._at)

    def on_body(self, data: bytes) -> None:
        """Called by the parser: a part of the body."""
        if self._receiver is not None:
            self._receiver.data(data, self._at)

    def on_message_complete(self) -> None:
        """Called by the parser: the response is complete; one with status 100 to 199 precedes the actual one."""
        assert self._parser is not None
        if not self._in_body:
            self._headers = {}
            return
        self._end(None, "", keep=self._parser.should_keep_alive())

    def eof_received(self) -> bool:
        self._parse_all()
        self._at = self._clock()
        self._gone(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._parse_all()
        self._at = self._clock()
        self._gone(exc)
        self._lost(self)

    def _gone(self, error: Exception | None) -> None:
        self.usable = False
        if self._receiver is None:
            return
        headers = self._headers
        unmarked = "content-length" not in headers and "chunked" not in headers.get("transfer-encoding", "").lower()
        if error is None and self._in_body and unmarked:
            return self._end(None, "", keep=False)  # a body without a length ends with its connection
        why = f": {error}" if error else ""
        where = "within the response" if self._bytes else "before it answered"
        self._fail("dropped", f"the server closed the connection {where}{why}")

    def _fail(self, failure: Failure, error: str) -> None:
        self._end(failure, error, keep=False)

    def _end(self, failure: Failure | None, error: str, *, keep: bool) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is None or not (keep and self.usable):
            self._close()
        else:
            self._free(self)  # before calling the receiver, which may need a connection for the next request
        if receiver is not None:
            receiver.ended(failure, error, self._at, self._bytes == 0)


def tls(verify: bool) -> ssl.SSLContext:
    """The TLS context. verify: False accepts any certificate."""
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context
