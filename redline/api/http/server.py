"""uvicorn with uvloop and httptools, and the limits that only the connection itself can enforce.

- A request's head is passed to the app only when complete, and its trailers never are, but httptools buffers both as
  they arrive. So the connection counts the bytes read since the parser's last callback.
- A client must send a whole head within `header_seconds` of connecting or of beginning the next request, which it may
  begin until `idle_seconds` after the last response; so a client pool with a shorter timeout never uses a closed
  connection. A TLS handshake has its own `header_seconds`. While a client has unread data, it must read some of it
  every `write_seconds`.
- Requests are not pipelined: if a client sends a second request before the response to the first, it gets that
  response, and then the connection is closed, as RFC 9112 (9.3.2) specifies. uvicorn's queue of such requests is
  unbounded, and a disconnect is not noticed while requests are queued.
- At the connection limit, the connection that has been owing data for longest without progress is closed for a new one
  (`redline.api.http.budget`).
- A client that has sent its whole request may half-close the connection, and still gets its response. Whether it has
  disconnected is detected by sending it something (`redline.api.http.client_disconnects`).
- Received data is read in bounded shares per event loop iteration (`redline.api.http.turns`), and the app is notified
  of a body when it is complete or has grown by much, not at every piece.
- An HTTP/1.0 client supports neither transfer codings (RFC 9112, 6.1) nor interim responses (RFC 9110, 15.2): a body of
  unknown length is sent unframed, and ends with the connection.
- A token must be sent when it is written. Event loops disable Nagle's algorithm, but not for every kind of listening
  socket; with it, a token may wait 40 ms for the client's acknowledgement of the previous one.
"""

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from redline.api.config import Limits
from redline.api.errors import Refusal, answer_to
from redline.api.http.budget import Connections
from redline.api.http.head import check_head, is_without_version
from redline.api.http.listen import SocketListener
from redline.api.http.stream_flusher import DIRECT
from redline.api.http.tls import Tls, server_context
from redline.errors import Overloaded, RedlineError

UNSENT_BYTES = 32 << 10  # TCP_NOTSENT_LOWAT: bytes that the kernel buffers unsent per connection
LINGER_S = 1.0  # seconds for a rejected client to read the response
PROBE_S = 5.0  # seconds between two checks whether a half-closed client has disconnected
ALIVE_S = 15  # seconds between two TCP keepalive probes, which also work while no response is being sent
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # clients ignore any number of them (RFC 9110, 15.2)
COMMENT = b":\n\n"  # a comment of an event stream
UNKNOWN: Any = math.inf  # length of a body that ends with its connection, until its last part is sent

log = logging.getLogger("redline.api")


class HttpConnection(HttpToolsProtocol):
    """One client's connection, within the limits described at the top of this file."""

    transport: asyncio.Transport

    def __init__(self, all: Connections, limits: Limits, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._all = all
        self._limits = limits
        self._accepted = False
        self._beyond = False  # the connection limit is exceeded, and no other connection could be closed
        self._untold_bytes = 0  # read since the parser's last callback other than for a header
        self._refusal: Refusal | None = None  # the reason why a parser callback failed
        self._last = False  # no request is read after the current one
        self._refused = False  # nothing more is read
        self._idle = False  # between requests; no byte of the next has arrived
        self._at_start = True  # before the request line
        self._owed_due: asyncio.TimerHandle | None = None
        self._watched: int | None = None  # the file descriptor, if the client is half-closed
        self._probe_due: asyncio.TimerHandle | None = None
        self._taken_due: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0  # at the time when `_taken_due` was set

    # -- reading

    def accepted(self, transport: asyncio.Transport) -> None:
        """Count a connection; at the limit, one that owes data is closed for it.

        With TLS the handshake follows, and must be complete within `header_seconds`.
        """
        self._accepted = True
        self.transport = transport
        peer: socket.socket | None = transport.get_extra_info("socket")
        if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self.connections.add(self)
        self._beyond = not self._all.enter(self)
        self._expect(self._limits.header_seconds, transport.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request. If there are too many connections, and none could be closed, the client gets 503."""
        if not self._accepted:
            self.accepted(transport)
        super().connection_made(transport)
        if self._beyond and self._all.too_many:
            self._refuse(Overloaded("the server has reached its connection limit; try again later"))
        else:
            self._expect_head()

    def give_way(self) -> None:
        """Close for a new connection (`budget.ClosableConnection`)."""
        self.silence()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read `data` in this event loop iteration or a later one."""
        self._all.turns.read(self, data)

    def wait(self) -> None:
        """Stop reading from the socket (`turns.DataConsumer`)."""
        self.transport.pause_reading()

    def go_on(self) -> None:
        """Read from the socket again, unless the app has paused reading or the connection is closing
        (`turns.DataConsumer`)."""
        if not (self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def feed(self, data: bytes) -> None:
        """Parse received data (`turns.DataConsumer`); reject invalid HTTP (400), too large heads or trailers (431)."""
        if self.parser is None or self._refused or self.transport.is_closing():
            return
        if self._idle and not data.strip(b"\r\n"):  # empty lines before a request are ignored (RFC 9112, 2.2)
            return
        self._untold_bytes += len(data)
        if self._idle:
            self._idle = False
            self._expect_head()
        if self._at_start and not self._is_answering() and is_without_version(data):
            self._refuse(
                Refusal(400, "the request line has no HTTP version; this server reads HTTP/1.1", "http_version")
            )
        elif not self._last:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                pass  # without a body it is served as a normal request; nothing is upgraded
            except httptools.HttpParserError:
                if not self._last:
                    self._refuse(self._refusal or Refusal(400, "this is not a valid HTTP request", "invalid_request"))
        if self._untold_bytes > self._limits.header_bytes and not self._refused:
            most = self._limits.header_bytes
            self._refuse(Refusal(431, f"the headers or trailers are more than {most} bytes", "headers_too_large"))

    def on_message_begin(self) -> None:
        """A request begins. Raises ValueError, which stops the parser for good, if another one is being answered."""
        self._at_start = False
        if self._is_answering():
            self.cycle.keep_alive, self._last = False, True
            raise ValueError("a second request before the response to the first")  # the parser stops here
        super().on_message_begin()
        self.scope["extensions"] = cast("dict[str, dict[object, object]]", {DIRECT: self})

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Raises Refusal (431), which stops the parser, beyond `limits.headers` lines."""
        if len(self.headers) >= self._limits.headers:
            self._refusal = Refusal(431, f"there are more than {self._limits.headers} headers", "headers_too_large")
            raise self._refusal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: stop its timer.

        Raises Refusal as `check_head` does, and (400) for a body combined with an Upgrade header.
        """
        self._untold_bytes = 0
        assert self.parser is not None
        version = self.parser.get_http_version()
        try:
            self.url = check_head(version, self.parser.get_method(), self.url, self.headers)
        except Refusal as refusal:
            self._refusal = refusal
            raise
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if has_body and self.parser.should_upgrade():
            # The parser skips the body, and would parse it as the next request.
            self._refusal = Refusal(
                400, "Upgrade is not supported: send a body as HTTP/1.1, without an Upgrade header", "no_upgrade"
            )
            raise self._refusal
        if version == "1.0":
            self.expect_100_continue = False  # RFC 9110, 10.1.1
        super().on_headers_complete()
        self.headers = []  # trailers are added here: they are counted, but are not headers of the request
        self._owed_in_time()
        self._all.owes(self)  # its body, which the app times; without a body `on_message_complete` follows at once

    def on_chunk_header(self) -> None:
        """A chunk of the body begins: restart the count of header and trailer bytes."""
        self._untold_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Add a part of the body; beyond 64 KiB unread by the app, wake the app and pause reading until it has read
        them."""
        self._untold_bytes = 0
        if not self.cycle.response_complete:
            self._all.owes(self)
            self.cycle.body += body
            if len(self.cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
                self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """The request is complete; it starts in this event loop iteration, and is counted for it."""
        self._at_start = True
        self._untold_bytes = 0
        self._all.turns.whole()
        if not self.cycle.response_complete:
            self._all.owes_nothing(self)
        elif not self.transport.is_closing():  # it was answered before its body had arrived
            self._idle = True
            self._expect(self._limits.idle_seconds, self._head_is_late)
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._expect(self._limits.header_seconds, self._head_is_late)

    def _expect(self, seconds: float, otherwise: Callable[[], None]) -> None:
        self._owed_in_time()
        self._all.owes(self)
        self._owed_due = self.loop.call_later(seconds, otherwise)

    def _owed_in_time(self) -> None:
        if self._owed_due is not None:
            self._owed_due.cancel()
            self._owed_due = None

    def _head_is_late(self) -> None:
        if self.transport.get_write_buffer_size():
            self._expect_head()  # the client is still reading the last response, which has its own timer
        elif self._untold_bytes:
            self._refuse(Refusal(408, f"the headers took more than {self._limits.header_seconds:g} s", "timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: RedlineError) -> None:
        """Respond without the app, and close; close at once if the client would read it as part of another response."""
        log.info("rejected a request on a connection: %s", error)
        if self._is_answering() and self.cycle.response_started:
            self.transport.abort()
            return
        self.silence()
        answer = answer_to(error)
        headers = {"content-type": "application/json", "content-length": len(answer.body), "connection": "close"}
        lines = [f"{name}: {value}\r\n".encode() for name, value in {**headers, **answer.headers}.items()]
        self.transport.write(b"".join([STATUS_LINE[answer.status], *lines, b"\r\n", answer.body]))
        # Closing with unread data sends a reset, and the client may then lose the response.
        self._refused = True
        self.transport.write_eof()
        self._expect(LINGER_S, self.transport.abort)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has half-closed. Returns True, which keeps the connection, if a response to a whole request is
        due."""
        if not self._is_answering() or self.cycle.more_body or self._refused:
            return False
        self.cycle.keep_alive, self._last = False, True
        peer: socket.socket = self.transport.get_extra_info("socket")
        if peer.family in (socket.AF_INET, socket.AF_INET6):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ALIVE_S)
        self._forget_departure()
        self._watched = peer.fileno()
        self._all.departures.watch(self._watched, self._has_left)
        self._probe()
        return True

    def _has_left(self) -> None:
        self.silence()
        self.transport.abort()

    def _probe(self) -> None:
        """Send something that a waiting client ignores; if the client is gone, its system answers with a reset."""
        self._probe_due = None
        if not self._is_answering():
            return
        if not (self.flow.write_paused or self.transport.is_closing()):
            if self.cycle.response_started:
                if self.cycle.chunked_encoding or self.cycle.expected_content_length == UNKNOWN:
                    self._write_part(COMMENT)  # only event streams have no content-length
            elif self.scope["http_version"] == "1.1":
                self.transport.write(CONTINUE)
        self._probe_due = self.loop.call_later(PROBE_S, self._probe)

    def _forget_departure(self) -> None:
        if self._watched is not None:
            self._all.departures.forget(self._watched)
            self._watched = None
        if self._probe_due is not None:
            self._probe_due.cancel()
            self._probe_due = None

    def silence(self) -> None:
        """Notify a responding app that its client has disconnected; the app's later output is dropped."""
        if self._is_answering():
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False  # else the app would have 100 Continue written after the end
            self.cycle.message_event.set()

    # -- writing

    @property
    def lags(self) -> bool:
        """Whether the client has not yet read earlier data (`stream_flusher.ImmediateWriter`)."""
        return self.flow.write_paused

    def write_part(self, body: bytes) -> bool:
        """Write a part of a streamed body, chunked as uvicorn does it (`stream_flusher.ImmediateWriter`)."""
        if self.flow.write_paused or self.cycle.disconnected or self.cycle.response_complete:
            return False
        self._write_part(body)
        return True

    def _write_part(self, body: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self.cycle.chunked_encoding else body)

    def pause_writing(self) -> None:
        """The client reads too slowly: from now on it must read something every `limits.write_seconds`."""
        super().pause_writing()
        self._expect_taken()

    def resume_writing(self) -> None:
        """The client has caught up: stop its timer, unless the response is complete."""
        super().resume_writing()
        if not self._nothing_follows():
            self._forget_taken()

    def on_response_complete(self) -> None:
        """The response is written: the client has to read it, and to send the head of its next request in time."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's timer stops at the first byte of a head, ours at the last
        self._expect_taken()
        if self.transport.is_closing():
            self._all.owes(self)  # the client has to read the response
        else:
            self._idle = True
            self._expect(self._limits.idle_seconds, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended: cancel its timers, and notify the app."""
        self._owed_in_time()
        self._forget_taken()
        self._forget_departure()
        self._all.leave(self)
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        old: Any = _until_close(cycle, app)
        super()._start_asgi_task(cycle, old if cycle.scope["http_version"] == "1.0" else app)

    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def _nothing_follows(self) -> bool:
        """Whether the amount of unsent data can only shrink: the app waits, or has sent its whole response."""
        return self.flow.write_paused or not self._is_answering()

    def _expect_taken(self) -> None:
        self._forget_taken()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        if self._unsent_bytes:
            self._taken_due = self.loop.call_later(self._limits.write_seconds, self._look_what_is_taken)

    def _forget_taken(self) -> None:
        if self._taken_due is not None:
            self._taken_due.cancel()
            self._taken_due = None

    def _look_what_is_taken(self) -> None:
        self._taken_due = None
        if not self._nothing_follows():
            return
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._expect_taken()
            return
        log.info("closed a connection: its client read nothing for %g s", self._limits.write_seconds)
        self.transport.abort()


def _until_close(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Wraps `app` for clients without transfer codings: a body without content-length is sent unframed, and uvicorn
    closes the connection after it."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                    cycle.chunked_encoding, cycle.expected_content_length = False, UNKNOWN
            elif cycle.expected_content_length == UNKNOWN and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_on)

    return serve


class Server(uvicorn.Server):
    """uvicorn's server without signal handlers, which its caller installs, and with `SocketListener` for accepting
    connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._listeners: list[SocketListener] = []
        self._taking: set[asyncio.Task[None]] = set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Install no signal handlers, unlike uvicorn."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`."""
        await super().startup(sockets=None if sockets is None else [])
        for at in sockets or ():
            at.listen(self.config.backlog)
            at.setblocking(False)
            self._listeners.append(SocketListener(at, self._take_soon))
            self._listeners[-1].open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, close `sockets`, and return once every connection has ended."""
        for listener in self._listeners:
            listener.close()
        await super().shutdown(sockets)

    def _take_soon(self, connection: socket.socket) -> None:
        task = asyncio.create_task(self.take(connection))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    async def take(self, connection: socket.socket) -> None:
        """Serve an accepted connection; `serve` must be running."""
        config, protocol, loop = self.config, self.config.http_protocol_class, asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: protocol(config=config, server_state=self.server_state, app_state=self.lifespan.state),  # type: ignore[call-arg]
                connection,
            )
        except OSError as error:  # the client has disconnected
            log.debug("a connection could not be served: %s", error)
            connection.close()

    def abort(self) -> None:
        """Close every connection now, dropping unsent data, and cancel every request's task."""
        for connection in cast("list[HttpConnection]", list(self.server_state.connections)):
            connection.silence()
            connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()  # a task that waits for a thread would not notice the disconnect


def uvicorn_config(
    app: ASGIApp,
    limits: Limits,
    host: str,
    port: int,
    tls: tuple[str, str] | None = None,
    connections: Connections | None = None,
) -> uvicorn.Config:
    """The settings for `Server`: uvloop, httptools, and connections within `limits`. Port 0 selects a free one.

    tls: PEM files of a certificate, with its chain, and of its key; raises OSError if they cannot be used. connections:
    shared with other servers of the process; `limits` do not limit the number of connections then.
    """
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=partial(  # type: ignore[arg-type]
            _protocol,
            Connections(limits) if connections is None else connections,
            limits,
            None if tls is None else server_context(*tls),
        ),
        ws="none",
        lifespan="off",
        access_log=False,  # the app writes access lines itself
        log_config=None,
        server_header=False,
        proxy_headers=False,  # nothing here depends on the client's address
        log_level="warning",
    )


def _protocol(
    connections: Connections, limits: Limits, context: ssl.SSLContext | None, **uvicorns: Any
) -> asyncio.Protocol:
    connection = HttpConnection(connections, limits, **uvicorns)
    return connection if context is None else Tls(context, connection)
