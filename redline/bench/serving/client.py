"""Sends requests to an OpenAI server and records the answers with their times. Every wait has a timeout.

A connection is opened before its request is due, if that can be predicted, and is reused for the next request. Times
measured from `Answer.sent` therefore exclude connecting; `vllm bench serve` includes it in TTFT, which corresponds to
measuring from `Answer.taken`.

An answer is complete if its stream contained `[DONE]` or a finish_reason. An answer that ends without either is
"malformed" if the HTTP body is complete, and "dropped" if the connection was closed.
"""

import asyncio
import contextlib
import ssl
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from redline import clock
from redline.bench.serving.connection import ClientConnection, EventSplitter, TooLarge, tls
from redline.bench.serving.dialects import BACKENDS, error_line
from redline.bench.serving.records import Failure, LoadRequest, StreamChunk, TimedAnswer, Usage
from redline.bench.serving.target import ServerTarget
from redline.errors import ConfigError

BODY_BYTES = 1 << 20  # maximum size of an error, or of an answer that is not a stream
AT_ONCE = 64  # connections opened concurrently
AFTER_DONE_S = 1.0  # timeout in seconds for the end of the body after [DONE]


class _Exchange:
    """One request in progress: the receiver of its connection, which becomes a `TimedAnswer`."""

    def __init__(self, client: "LoadClient", ask: LoadRequest, index: int, planned: float) -> None:
        self.client, self.ask, self.index, self.planned = client, ask, index, planned
        self.read = client.dialect.read
        self.taken = client.clock()
        self.connected: float | None = None
        self.sent: float | None = None
        self.first_at: float | None = None
        self.last_at = 0.0
        self.head_at: float | None = None
        self.end = 0.0
        self.status: int | None = None
        self.where = ""
        self.events: EventSplitter | None = None
        self.body = bytearray()
        self.chunks: list[StreamChunk] = []
        self.texts: list[str] = []
        self.thinking: list[str] = []
        self.calls: dict[int, list[Any]] = {}  # by index: id, name, parts of the arguments
        self.usage: Usage | None = None
        self.finish: str | None = None
        self.said_done = False
        self.failure: Failure | None = None
        self.error: str | None = None
        self.kept = False  # the connection was idle before: the server may have closed it
        self.retry = False  # the server had closed the idle connection
        self.plain = False  # return the body unparsed
        self.marked = False  # the end of the body is marked, by a length or by chunked encoding
        self.connection: ClientConnection | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None

    def send(self, request: bytes, connection: ClientConnection, *, kept: bool) -> None:
        """Starts or restarts the request on this connection."""
        self.retry, self.kept, self.connection = False, kept, connection
        self.connected = self.taken if kept else connection.opened
        self.sent = self.last_at = connection.send(request, self)
        self._wait()

    def _wait(self) -> None:
        # One timer, which checks for reads since it was set: setting a timer at every read would cost too much.
        self._timer = None
        if self.done.done() or self.sent is None:
            return
        patience, now = self.client.target.patience, self.client.clock()
        if self.said_done:
            due, why = self.last_at + AFTER_DONE_S, ""
        elif self.first_at is None:
            due, why = self.sent + patience.first, f"no token within {patience.first:g} s"
        else:
            due, why = self.last_at + patience.silence, f"no data on the stream for {patience.silence:g} s"
        if self.taken + patience.whole < due:
            due, why = self.taken + patience.whole, f"the answer did not end within {patience.whole:g} s"
        if now < due:
            self._timer = asyncio.get_running_loop().call_later(due - now + 0.001, self._wait)
        elif self.said_done:
            self.conclude(None, None, self.last_at)
        else:
            self.conclude("stalled", why, now)

    def _wait_anew(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wait()

    def head(self, status: int, headers: dict[str, str], at: float) -> None:
        """Called by the connection."""
        self.head_at = self.last_at = at
        self.status = status
        self.where = headers.get("location", "")
        self.marked = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
        if status == 200 and "event-stream" in headers.get("content-type", "").lower():
            self.events = EventSplitter()

    def data(self, data: bytes, at: float) -> None:
        """Called by the connection."""
        self.last_at = at
        if self.events is None:
            self.body += data
            if self.status != 200 or not self.body.startswith((b"data:", b": ")):
                if len(self.body) > BODY_BYTES:
                    self.conclude("malformed", f"a body that is not a stream has more than {BODY_BYTES >> 10} KiB", at)
                return
            self.events, data = EventSplitter(), bytes(self.body)  # a stream without the content type of one
        try:
            for event in self.events.feed(data):
                self._take(event, at)
        except TooLarge as error:
            self.conclude("malformed", str(error), at)

    def _take(self, data: bytes, at: float) -> None:
        if self.said_done or self.done.done():
            return
        if data.strip() == b"[DONE]":
            self.said_done = True
            return self._wait_anew()
        try:
            said = self.read(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            shown = data[:80].decode(errors="replace")
            return self.conclude("malformed", f"an event cannot be decoded ({error}): {shown!r}", at)
        if said.error is not None:
            return self.conclude("server", said.error, at)
        if said.finish is not None:
            self.finish = said.finish
        if said.usage is not None:
            self.usage = said.usage
        if said.kind is None:
            return None
        characters = len(said.text) + len(said.thinking)
        if said.text:
            self.texts.append(said.text)
        if said.thinking:
            self.thinking.append(said.thinking)
        for call in said.calls:
            characters += len(call.name) + len(call.arguments)
            held = self.calls.setdefault(call.place, ["", "", []])
            held[0] = held[0] or call.id
            held[1] = held[1] or call.name
            held[2].append(call.arguments)
        self.chunks.append(StreamChunk(at=at, kind=said.kind, characters=characters, tokens=said.tokens))
        self.client.chunks += 1
        if self.first_at is None:
            self.first_at = at
            self._wait_anew()  # the timeout of the stream may end before the one of the timer
        return None

    def ended(self, failure: Failure | None, error: str, at: float, untouched: bool) -> None:
        """Called by the connection."""
        self.connection = None
        if failure is not None:
            if self.said_done:
                self.conclude(None, None, at)
            elif untouched and self.kept:
                self.retry = True
                self._settle()
            else:
                self.conclude(failure, error, at)
            return
        if self.status != 200:
            return self.conclude("http", self._refusal(), at)
        if self.plain:
            return self.conclude(None, None, at)
        for event in [bytes(self.body)] if self.events is None else self.events.finish():
            self._take(event, at)
        if self.done.done():
            return
        if self.finish is not None or (self.said_done and self.chunks):
            self.conclude(None, None, at)
        elif self.said_done:
            self.conclude("malformed", "the stream contained [DONE] and nothing else", at)
        else:
            what = "the answer ended without [DONE] and without a finish_reason"
            self.conclude("malformed" if self.marked else "dropped", what, at)

    def _refusal(self) -> str:
        if self.status is not None and 300 <= self.status < 400:
            return f"HTTP {self.status}: a redirect to {self.where or 'nowhere'}, which is not followed"
        return f"HTTP {self.status}: {error_line(bytes(self.body))}".rstrip(": ")

    def conclude(self, failure: Failure | None, error: str | None, at: float) -> None:
        """Ends the exchange; later calls have no effect."""
        if self.done.done():
            return
        self.failure, self.error, self.end = failure, error, at
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self._settle()

    def give_up(self, why: str) -> None:
        """Ends the exchange by the client's decision, as failed by the deadline."""
        if self.retry:
            self.retry, self.failure, self.error, self.end = False, "deadline", why, self.client.clock()
        else:
            self.conclude("deadline", why, self.client.clock())

    def _settle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.done.set_result(None)

    def answer(self) -> TimedAnswer:
        """The exchange as a record."""
        calls = [
            {"id": call, "name": name, "arguments": "".join(parts)}
            for _, (call, name, parts) in sorted(self.calls.items())
        ]
        return TimedAnswer(
            index=self.index,
            ask=self.ask,
            planned=self.planned,
            taken=self.taken,
            connected=self.connected,
            sent=self.sent,
            head=self.head_at,
            end=self.end,
            chunks=tuple(self.chunks),
            text="".join(self.texts),
            thinking="".join(self.thinking),
            calls=tuple(calls),
            usage=self.usage,
            finish=self.finish,
            status=self.status,
            failure=self.failure,
            error=self.error,
        )


class LoadClient:
    """A client for one target. Use it as an async context manager; leaving it closes all connections.

    Entering looks up the model's name if the target has none. Raises ConfigError if the target's address or backend is
    wrong, or if its model is neither named nor listed by the server. chunks: total number received so far.
    """

    def __init__(self, target: ServerTarget) -> None:
        try:
            parts = urlsplit(target.base_url)
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"{target.base_url!r} is not a server address: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{target.base_url!r} is not a server address such as http://127.0.0.1:8000")
        if target.backend not in BACKENDS:
            raise ConfigError(f"--backend {target.backend!r} is unknown; expected one of {', '.join(BACKENDS)}")
        self.target = target
        self.dialect = BACKENDS[target.backend]
        self.chunks = 0
        self._host = parts.hostname
        self._context: ssl.SSLContext | None = tls(target.verify_tls) if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._head = _head(parts.netloc.rpartition("@")[2], target)
        self._idle: list[ClientConnection] = []
        self._all: set[ClientConnection] = set()
        self._running: set[_Exchange] = set()
        self._opening: set[asyncio.Task[Any]] = set()
        self._origin = clock.perf_counter()

    async def __aenter__(self) -> Self:
        if not self.target.model:
            try:
                names = await self.models()
                if not names:
                    raise ConfigError(f"{self.target.base_url} lists no model; name one with --model")
            except BaseException:
                await self.__aexit__(None, None, None)
                raise
            self.target = msgspec.structs.replace(self.target, model=names[0])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in list(self._all):
            connection.close()
        await asyncio.sleep(0)  # transports close in the next iteration of the event loop

    def clock(self) -> float:
        """Seconds since the run began: since the constructor, or the last call of `begin`."""
        return clock.perf_counter() - self._origin

    def begin(self) -> None:
        """Starts the run: resets `clock` to 0."""
        self._origin = clock.perf_counter()

    @property
    def running(self) -> int:
        """Number of requests in progress."""
        return len(self._running)

    def request(self, ask: LoadRequest) -> bytes:
        """The HTTP request of an ask, head and body. Raises ConfigError if the backend cannot express it."""
        try:
            body = msgspec.json.encode(self.dialect.body(ask, self.target))
        except (UnicodeEncodeError, TypeError, ValueError) as error:
            raise ConfigError(f"a request cannot be encoded as JSON: {error}") from None
        return self._request("POST", self._path(self.target.endpoint or self.dialect.path), body)

    async def ask(
        self, ask: LoadRequest, index: int = 0, planned: float = 0.0, request: bytes | None = None
    ) -> TimedAnswer:
        """Sends one request now and waits for its end. Failures are reported in the answer.

        request: the result of `request`; None: it is created now. Raises the errors of `request`.
        """
        request = self.request(ask) if request is None else request
        exchange = _Exchange(self, ask, index, planned)
        await self._exchange(exchange, request)
        return exchange.answer()

    async def get(self, path: str) -> bytes:
        """The body of a GET, of at most 1 MiB. Raises ConfigError, naming the address, for any status but 200."""
        exchange = _Exchange(self, LoadRequest(max_tokens=0), 0, 0.0)
        exchange.plain = True
        await self._exchange(exchange, self._request("GET", self._path(path), b""))
        if exchange.failure is not None:
            raise ConfigError(f"{self.target.base_url}: GET {path} failed: {exchange.error}")
        return bytes(exchange.body)

    async def models(self) -> list[str]:
        """The names that GET /v1/models lists. Raises ConfigError if there is no such list."""
        body = await self.get("/v1/models")
        try:
            return [model.id for model in msgspec.json.decode(body, type=_Models).data]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{self.target.base_url} lists no models at /v1/models: {error}") from None

    async def ready(self, count: int) -> None:
        """Opens connections until `count` are idle. If one cannot be opened, the request that needs it tries again."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with places:
                with contextlib.suppress(OSError):
                    self._idle.append(await self._open())

        await asyncio.gather(*(one() for _ in range(count - len(self._idle))))

    def spare(self) -> None:
        """Starts opening a connection if none is idle, for a request that is due soon."""
        if not self._idle and not self._opening:
            self._keep_task(self.ready(1))

    def cut(self, why: str) -> None:
        """Ends every request in progress, as failed by the deadline."""
        for exchange in list(self._running):
            exchange.give_up(why)

    def _keep_task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return task

    async def _exchange(self, exchange: _Exchange, request: bytes) -> None:
        self._running.add(exchange)
        try:
            connection = self._kept()
            kept = connection is not None
            while True:
                if connection is None:
                    connection = await self._opened_for(exchange)
                if connection is None:
                    return
                exchange.send(request, connection, kept=kept)
                await exchange.done
                if not exchange.retry:
                    return
                exchange.done = asyncio.get_running_loop().create_future()
                connection, kept = None, False
        finally:
            self._running.discard(exchange)
            exchange.give_up("the request was cancelled")

    async def _opened_for(self, exchange: _Exchange) -> ClientConnection | None:
        """Opens a connection. Returns None if that fails; the exchange then contains the failure."""
        opening = self._keep_task(self._open())
        try:
            await asyncio.wait((opening, exchange.done), return_when=asyncio.FIRST_COMPLETED)
            if exchange.done.done():
                return None
            return await opening
        except OSError as error:
            why = str(error) or type(error).__name__
            exchange.conclude("refused", f"no connection: {' '.join(why.split())}", self.clock())
            return None
        finally:
            opening.cancel()

    async def _open(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        limit = self.target.patience.connect
        try:
            async with asyncio.timeout(limit):
                _, connection = await loop.create_connection(
                    lambda: ClientConnection(self.clock, self._idle.append, self._lost),
                    self._host,
                    self._port,
                    ssl=self._context,
                )
        except TimeoutError:
            raise OSError(f"not opened within {limit:g} s") from None
        except UnicodeError as error:
            raise OSError(f"no host name: {error}") from None
        self._all.add(connection)
        return connection

    def _kept(self) -> ClientConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    def _lost(self, connection: ClientConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _path(self, path: str) -> str:
        path = path if path.startswith("/") else f"/{path}"
        # Addresses are often given with the /v1 prefix of the API's paths.
        if self._prefix.endswith("/v1"):
            return self._prefix.removesuffix("/v1") + path if path.startswith("/v1/") or path == "/v1" else path
        return self._prefix + path

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        if not path.isascii() or not path.isprintable() or " " in path:
            raise ConfigError(
                f"the path {path!r} contains characters that HTTP does not allow; see --base-url and --endpoint"
            )
        kind = f"Content-Length: {len(body)}\r\n" if body else ""
        return f"{method} {path} HTTP/1.1\r\n{self._head}{kind}\r\n".encode("latin-1") + body


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _head(host: str, target: ServerTarget) -> str:
    """The header lines of every request. Raises ConfigError for a header that HTTP does not allow."""
    headers = {"Host": host, "Accept": "*/*", "User-Agent": "redline-bench", "Content-Type": "application/json"}
    if target.key:
        headers["Authorization"] = f"Bearer {target.key}"
    given = {name.lower() for name in target.headers}
    headers = {name: value for name, value in headers.items() if name.lower() not in given} | target.headers
    for name, value in headers.items():
        if not name or not (name + value).isascii() or any(sign in name + value for sign in "\r\n\0") or ":" in name:
            raise ConfigError(f"the header {name!r} contains characters that HTTP does not allow")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
