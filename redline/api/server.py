"""uvicorn as we run it: uvloop and httptools, and what only the connection itself can bound.

- A request's head never reaches the app before it is complete, and its trailers never do, but httptools stores both as
  they come. So the connection counts what it has read since the parser last told of anything.
- A client owes a whole head `header_seconds` after it has connected or begun to send its next one: it may do that until
  `idle_seconds` after its last answer, so a pool that keeps connections for shorter never meets a closed one. And
  while it has not taken what was written, it must take some of it every `write_seconds`.
- One request at a time: who sends the next before the answer to the last gets that answer, and then the end of the
  connection, as RFC 9112 (9.3.2) has it. uvicorn's queue of such requests has no bound, and a client that leaves is
  not noticed behind one.
- At the most connections that there may be, the one that has owed a head for longest makes room for a new one.
- What has arrived is read in shares, a turn of the event loop each (`redline.api.turns`), and the app is told of a body
  when it is whole or has grown by much, not of each piece.
- A token must leave when it is written. Event loops turn Nagle's delay off, but not on every way that a listening
  socket can be made; with it, a token may wait 40 ms for the client's acknowledgement of the one before.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from redline import clock
from redline.api.config import Limits
from redline.api.errors import Refusal, answer_to
from redline.api.pour import DIRECT
from redline.api.turns import Turns
from redline.errors import Overloaded, RedlineError

RESERVED_FILES = 128  # descriptors that are not connections: sockets to the worker, pipes, files
UNSENT_BYTES = 128 << 10  # that the kernel takes of a connection before its client has room for them
LINGER_S = 1.0  # for a client that was refused, to read that it was
TELL_FULL_S = 60.0  # between two lines that say that the server is full

log = logging.getLogger("redline.api")


class Connections:
    """All connections of one server: how many there may be, and which owe a request's head.

    `owing` has those first that have owed it for longest; a refused connection stands there until it ends.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.most = max(1, min(limits.connections, open_files(limits.connections + RESERVED_FILES) - RESERVED_FILES))
        self.turns = Turns()
        self.owing: dict[Connection, None] = {}
        self._told = -TELL_FULL_S

    def make_room(self) -> bool:
        """Close the connection that has owed a head for longest; False where none owes one. It logs once a minute."""
        if (now := clock.monotonic()) - self._told >= TELL_FULL_S:
            self._told = now
            log.warning("%d connections are open, the most that there may be", self.most)
        oldest = next(iter(self.owing), None)
        if oldest is None:
            return False
        del self.owing[oldest]
        oldest.transport.abort()
        return True


def open_files(wanted: int) -> int:
    """How many files this process may open, once its soft limit is raised to `wanted` as far as the hard one allows.

    It is more than `wanted` where the soft limit was higher before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return wanted if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


class Connection(HttpToolsProtocol):
    """One client's connection, within the bounds at the top of this file."""

    transport: asyncio.Transport

    def __init__(self, all: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._all = all
        self._limits = all.limits
        self._untold_bytes = 0  # read since the parser last told of anything but a header
        self._refusal: Refusal | None = None  # why a callback of the parser gave up
        self._last = False  # no request is read after the one that is answered now
        self._refused = False  # nothing is read any more
        self._idle = False  # between requests, nothing of the next has come
        self._head_due: asyncio.TimerHandle | None = None
        self._taken_due: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0  # when `_taken_due` was set

    # -- reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a client in; when full, another that owes a head makes room, and where none does the client gets 503."""
        peer: socket.socket | None = transport.get_extra_info("socket")
        if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        super().connection_made(transport)
        if len(self.connections) > self._all.most and not self._all.make_room():
            self._refuse(Overloaded("the server has as many connections as it can hold; try again later"))
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Read `data` in a turn of the event loop that has room for it."""
        self._all.turns.read(self, data)

    def wait(self) -> None:
        """Stop reading from the socket (`turns.Reader`)."""
        self.transport.pause_reading()

    def go_on(self) -> None:
        """Read from the socket again, unless the app holds it back or the connection ends (`turns.Reader`)."""
        if not (self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def feed(self, data: bytes) -> None:
        """Parse what has arrived (`turns.Reader`); refuse, with 400 or 431, what is no HTTP or beyond the bounds."""
        if self.parser is None or self._refused:
            return
        self._untold_bytes += len(data)
        if self._idle:
            self._idle = False
            self._expect_head()
        if not self._last:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                pass  # without a body it is a request as any other; nothing is upgraded
            except httptools.HttpParserError:
                if not self._last:
                    self._refuse(self._refusal or Refusal(400, "this is not a valid HTTP request", "invalid_request"))
        if self._untold_bytes > self._limits.header_bytes and not self._refused:
            most = self._limits.header_bytes
            self._refuse(Refusal(431, f"the headers or trailers are more than {most} bytes", "headers_too_large"))

    def on_message_begin(self) -> None:
        """A request begins. Raises ValueError, which stops the parser for good, while another is being answered."""
        if self._is_answering():
            self.cycle.keep_alive, self._last = False, True
            raise ValueError("a second request before the answer to the first")  # the parser stops here
        super().on_message_begin()
        self.scope["extensions"] = cast("dict[str, dict[object, object]]", {DIRECT: self})

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header line. Raises Refusal (431), which stops the parser, beyond `limits.headers` lines."""
        if len(self.headers) >= self._limits.headers:
            self._refusal = Refusal(431, f"there are more than {self._limits.headers} headers", "headers_too_large")
            raise self._refusal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole: its time is over. Raises Refusal (400) for a body with an Upgrade header."""
        self._untold_bytes = 0
        assert self.parser is not None
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if has_body and self.parser.should_upgrade():
            # The parser skips the body, and would read it as the next request.
            self._refusal = Refusal(
                400, "nothing is upgraded: send a body as HTTP/1.1, without an Upgrade header", "no_upgrade"
            )
            raise self._refusal
        super().on_headers_complete()
        self._forget_head()

    def on_chunk_header(self) -> None:
        """A chunk of the body begins: bytes of headers and trailers are counted from nothing again."""
        self._untold_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body; past 64 KiB untaken, wake the app and read no more until it has taken them."""
        self._untold_bytes = 0
        if not self.cycle.response_complete:
            self.cycle.body += body
            if len(self.cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
                self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """The request is whole: what it asks for is begun in this turn, and counted."""
        self._all.turns.whole()
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._expect(self._limits.header_seconds, self._head_is_late)

    def _expect(self, seconds: float, otherwise: Callable[[], None]) -> None:
        self._forget_head()
        self._all.owing[self] = None
        self._head_due = self.loop.call_later(seconds, otherwise)

    def _forget_head(self) -> None:
        self._all.owing.pop(self, None)
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _head_is_late(self) -> None:
        if self.transport.get_write_buffer_size():
            self._expect_head()  # it is still taking the last answer, which has a time of its own
        elif self._untold_bytes:
            self._refuse(Refusal(408, f"the headers took more than {self._limits.header_seconds:g} s", "timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: RedlineError) -> None:
        """Answer without the app, and close. Close at once where the client would read it as part of another answer."""
        log.info("refused a connection: %s", error)
        if self._is_answering() and self.cycle.response_started:
            self.transport.abort()
            return
        self.silence()
        answer = answer_to(error)
        headers = {"content-type": "application/json", "content-length": len(answer.body), "connection": "close"}
        lines = [f"{name}: {value}\r\n".encode() for name, value in {**headers, **answer.headers}.items()]
        self.transport.write(b"".join([STATUS_LINE[answer.status], *lines, b"\r\n", answer.body]))
        # Closing with data unread is a reset, and a client that is reset may lose the answer.
        self._refused = True
        if self.transport.can_write_eof():  # TLS has no such half
            self.transport.write_eof()
        self._expect(LINGER_S, self.transport.abort)

    def silence(self) -> None:
        """Tell the app, where it is answering, that its client has left; what it still sends is not written."""
        if self._is_answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    # -- writing

    def write_part(self, body: bytes) -> bool:
        """Write a part of a streamed body, in the chunk that uvicorn would make of it (`pour.Direct`)."""
        if self.flow.write_paused or self.cycle.disconnected or self.cycle.response_complete:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def pause_writing(self) -> None:
        """The client lags: it must take something every `limits.write_seconds`."""
        super().pause_writing()
        self._expect_taken()

    def resume_writing(self) -> None:
        """The client has caught up: unless the answer is complete, nothing has to be taken within a time any more."""
        super().resume_writing()
        if not self._nothing_follows():
            self._forget_taken()

    def on_response_complete(self) -> None:
        """The answer is written: from now on the client has to take it, and to send the head of its next request."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's time ends with the first byte of a head, ours with the last
        self._expect_taken()
        if not self.transport.is_closing():
            self._idle = True
            self._expect(self._limits.idle_seconds, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended: cancel its timers, and tell the app."""
        self._forget_head()
        self._forget_taken()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def _nothing_follows(self) -> bool:
        """Whether unsent bytes can only become fewer: the app waits, or has sent its whole answer."""
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
        log.info("closed a connection: its client took nothing for %g s", self._limits.write_seconds)
        self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn, but signals are its caller's, who has a worker to stop as well."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Install no signal handlers, where uvicorn installs its own."""
        yield

    async def take(self, connection: socket.socket) -> None:
        """Serve a connection that another process has accepted; `serve` is running, with no sockets of its own.

        Raises OSError where the client has left, or does not speak TLS.
        """
        config, protocol = self.config, self.config.http_protocol_class
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol(config=config, server_state=self.server_state, app_state=self.lifespan.state),  # type: ignore[call-arg]
            connection,
            ssl=config.ssl,
        )

    def abort(self) -> None:
        """End every connection now, with what its client has not taken yet, and cancel every request's task."""
        for connection in cast("list[Connection]", list(self.server_state.connections)):
            connection.silence()
            connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()  # one that encodes in a thread would not notice


def uvicorn_config(
    app: ASGIApp, limits: Limits, host: str, port: int, tls: tuple[str, str] | None = None
) -> uvicorn.Config:
    """The settings for `Server`: uvloop, httptools, and connections within `limits`. Port 0 takes a free one.

    tls: PEM files of a certificate, with its chain, and of its key.
    """
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=partial(Connection, Connections(limits)),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        access_log=False,  # the app writes its own
        log_config=None,
        server_header=False,
        ssl_certfile=tls[0] if tls else None,
        ssl_keyfile=tls[1] if tls else None,
        proxy_headers=False,  # nothing here depends on who the client is
        log_level="warning",
    )
