"""The HTTP application: the routes, and the code around every request.

`ErrorMiddleware` handles what every request needs: keys, header size, request id, and exceptions, which end only
their own request. The generating routes are plain ASGI, which is the cheapest way to send a token.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redline import clock
from redline.api.anthropic.events import MESSAGES, messages_error
from redline.api.auth.access import OPEN_PATHS, Headers, check_page, check_single, header
from redline.api.auth.auth_state import AuthState
from redline.api.auth.quota import CALLER, Caller, KeyAccount
from redline.api.body import ResponseBody
from redline.api.config import ApiConfig
from redline.api.dialect import Dialect
from redline.api.errors import Refusal, WholeResponse
from redline.api.gateway.gateway import Gateway
from redline.api.gateway.generation import Generation
from redline.api.handlers import Handlers, Respond, json_response, send_json, send_whole
from redline.api.http.cors import Cors, check_origins
from redline.api.http.stream_flusher import DIRECT
from redline.api.http.unpack import check_encoding, unpacked
from redline.api.openai.dialects import CHAT, COMPLETIONS, openai_error
from redline.api.openapi.document import openapi
from redline.api.openapi.operation import Operation
from redline.api.openapi.operations import operations
from redline.api.openapi.page import page
from redline.api.page.chat_page import FILES, EngineView, page_routes
from redline.api.page.render import PATH as RENDER_PATH
from redline.api.page.render import Renderer
from redline.api.responses.events import KeptResponses, responses
from redline.api.responses.store import ResponseStore
from redline.api.telemetry.metrics import Metrics
from redline.api.telemetry.request_span import RequestSpan
from redline.errors import Overloaded, RequestError

QUIET_PATHS = {
    "/health",
    "/live",
    "/ping",
    "/load",
    "/metrics",
}  # polled by machines every few seconds: logged at debug level only
REQUEST_ID_CHARS = 128
SHOWN_PATH_CHARS = 200

access_log = logging.getLogger("redline.access")
log = logging.getLogger("redline.api")

Begin = Callable[[bytes, Scope], Awaitable[Respond]]  # starts processing a body
Teller = Callable[[Exception, str], WholeResponse]  # converts an exception and the request's id
NO_TELLERS: Mapping[str, Teller] = MappingProxyType({})


def create_app(
    gateway: Gateway,
    config: ApiConfig,
    edge: AuthState | None = None,
    scrape: Callable[[], Awaitable[bytes]] | None = None,
) -> ASGIApp:
    """The API of a gateway. edge: `AuthState(config)` if it is shared with others. scrape: returns the text of
    /metrics; None: the gateway's metrics.

    Raises ConfigError if the keys file cannot be read or is empty, or if an origin is invalid.
    """
    edge = edge or AuthState(config)
    path = config.responses_file
    store = ResponseStore(Path(path)) if path else None
    if store is not None:
        gateway.at_end(store.close)
    dialects: dict[str, Dialect[Any]] = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": COMPLETIONS,
        "/v1/messages": MESSAGES,
        "/v1/responses": (of_responses := responses(store, config.limits)),
    }
    table = operations(config)
    document = openapi(table, open_paths(config), keys=config.keys_file is not None)
    listed: dict[Any, str] = {}
    for one in table:
        listed.setdefault((one.url, one.handler), f"{one.method} {one.url}")
    api = Handlers(gateway, config, edge, scrape, of_responses, list(listed.values()), document, page(document))
    gateway.metrics.health(lambda: api.unready is None)
    bodies = _Bodies(config.limits.bodies_bytes)
    owners = [api, EngineView(gateway, edge), *([] if store is None else [KeptResponses(store)])]
    routes = [*(page_routes() if config.page else ()), *_served(table, owners, config, bodies)]
    for path, dialect in dialects.items():
        routes.append(Route(path, _Post(partial(api.generate, dialect), config, bodies), methods=["POST"]))
    if config.page:
        renderer = Renderer()
        gateway.at_end(renderer.ended)
        routes.append(Route(RENDER_PATH, _Post(partial(_render, renderer), config, bodies), methods=["POST"]))
    tellers = {path: dialect.error for path, dialect in dialects.items()}
    router = Router(routes, redirect_slashes=False)
    hint = "; GET /version lists the routes; admin routes have an address of their own, which the server's start prints"
    border = ErrorMiddleware(router, edge, config, gateway.metrics, tellers, hint)
    origins = check_origins(config.cors_origins)
    return Cors(border, origins) if origins else border


async def _render(renderer: Renderer, body: bytes, scope: Scope) -> Respond:
    return partial(send_json, body=await renderer.answer(body))


def open_paths(config: ApiConfig) -> set[str]:
    """Paths without a key: the page's files are the same for everyone."""
    return OPEN_PATHS | FILES.keys() if config.page else OPEN_PATHS


def _served(table: Sequence[Operation], owners: Sequence[object], config: ApiConfig, bodies: "_Bodies") -> list[Route]:
    """The routes of the operations with a handler, which is a method of one of the owners."""
    methods: dict[tuple[str, Any], list[str]] = {}
    for operation in table:
        if operation.handler is not None:
            methods.setdefault((operation.path, operation.handler), []).append(operation.method)
    posts = {operation.handler for operation in table if operation.body is not None}
    routes: list[Route] = []
    for (path, handler), names in methods.items():
        [owner] = [one for one in owners if getattr(type(one), handler.__name__, None) is handler]
        bound = partial(handler, owner)
        routes.append(Route(path, _Post(bound, config, bodies) if handler in posts else _encoded(bound), methods=names))
    return routes


def _encoded(handler: Callable[[Request], Awaitable[Response | ResponseBody]]) -> Callable[..., Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        told = await handler(request)
        return told if isinstance(told, Response) else json_response(told)

    return endpoint


class ErrorMiddleware:
    """Wraps every request: keys, header size, request id, errors, and the access log line."""

    def __init__(
        self,
        app: ASGIApp,
        edge: AuthState,
        config: ApiConfig,
        counted: Metrics,
        tellers: Mapping[str, Teller] = NO_TELLERS,
        hint: str = "",
    ) -> None:
        """tellers: converters of exceptions, by path; on other paths Anthropic's clients get errors in Anthropic's
        format, others in OpenAI's. hint: appended to the message of a 404."""
        self._app = app
        self._tellers = tellers
        self._hint = hint
        self._edge = edge
        self._open = open_paths(config)
        self._local = config.local
        self._origins = check_origins(config.cors_origins)
        self._header_bytes = config.limits.header_bytes
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self  # so that the router raises its 404 and 405
        began = clock.perf_counter()
        status, complete = 0, False
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id = header(headers, b"x-request-id")
        if not 0 < len(request_id) <= REQUEST_ID_CHARS or not _is_plain(request_id):
            request_id = uuid.uuid4().hex.encode()
        traced = header(headers, b"traceparent"), header(headers, b"tracestate")
        passage = RequestSpan(
            request_id.decode(),
            scope["method"],
            scope["path"],
            (traced[0].decode("latin-1"), traced[1].decode("latin-1")),
        )
        scope["passage"] = passage
        self._edge.passages.begin(passage)

        tell = self._tellers.get(scope["path"], messages_error if _is_anthropics(scope) else openai_error)
        # Anthropic's SDK reads the id from a header of its own.
        ids = [(name, request_id) for name in (b"x-request-id", b"request-id")[: 1 + (tell is messages_error)]]

        async def send_on(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *ids]
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            if sum(len(name) + len(value) for name, value in headers) > self._header_bytes:
                raise Refusal(431, f"the headers are more than {self._header_bytes} bytes", "headers_too_large")
            check_single(headers)
            account: KeyAccount | None = None
            if self._edge.keyring is None:
                check_page(scope["method"], headers, self._local, self._origins)
            elif scope["path"] not in self._open:
                scope["account"] = account = self._edge.keyring.account(headers)
            self._edge.check(scope["method"])
            CALLER.set(Caller(request_id.decode(), account, clock.monotonic(), _timeout_s(headers), passage))
            if account is not None and scope["method"] == "POST" and scope["path"] != RENDER_PATH:
                with account.request():
                    await self._app(scope, receive, send_on)
            else:
                await self._app(scope, receive, send_on)
        except HTTPException as error:
            await send_whole(send_on, _no_route(scope, error, tell, request_id.decode(), self._hint))
        except Exception as error:  # the last place to catch an exception so that it ends only one request
            answer = tell(error, request_id.decode())
            self._counted.rejected(error)
            if not status:
                await send_whole(send_on, answer)
        except asyncio.CancelledError:
            pass  # the server is shutting down, and has closed the connection
        finally:
            self._counted.answered(scope, status)
            self._edge.passages.end(passage, status)
            _tell(scope, status, complete, clock.perf_counter() - began, request_id, json_lines=self._edge.json_lines)


def _tell(scope: Scope, status: int, complete: bool, seconds: float, request_id: bytes, *, json_lines: bool) -> None:
    """Write the access log line. Its only client-controlled parts are the path, percent-encoded, and the id, if
    printable."""
    level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
    if not access_log.isEnabledFor(level):
        return
    path = quote(scope["path"], safe="/:@!$&'()*+,;=")
    path = path if len(path) <= SHOWN_PATH_CHARS else path[:SHOWN_PATH_CHARS] + "..."
    generation: Generation | None = scope.get("generation")
    account: KeyAccount | None = scope.get("account")
    prompt = 0 if generation is None else sum(map(len, generation.prompts))
    said = 0 if generation is None else generation.completion_tokens
    workers = [] if generation is None else generation.workers
    if json_lines:
        line = {
            "method": scope["method"],
            "path": path,
            "status": status or None,
            "ms": round(seconds * 1000, 1),
            "prompt_tokens": prompt,
            "completion_tokens": said,
            "workers": workers,
            "key": None if account is None else account.name,
            "id": request_id.decode(),
            "complete": complete,
        }
        access_log.log(level, "request", extra={"fields": line})
        return
    access_log.log(
        level,
        "%s %s %s, %.0f ms%s%s%s, id %s%s",
        scope["method"],
        path,
        status or "-",
        seconds * 1000,
        "" if generation is None else f", tokens {prompt} + {said}",
        f", on {', '.join(workers)}" if workers else "",
        "" if account is None else f", key {account.name}",
        request_id.decode(),
        "" if complete else ", the client disconnected",
    )


MOST_TIMEOUT_S = 86400.0


def _timeout_s(headers: Headers) -> float | None:
    """The value of X-Request-Timeout, in seconds. Raises RequestError."""
    said = header(headers, b"x-request-timeout")
    if not said:
        return None
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not 0.001 <= seconds <= MOST_TIMEOUT_S:  # also rejects NaN
        raise RequestError(
            f"X-Request-Timeout must be a number of seconds from 0.001 to {MOST_TIMEOUT_S:g}",
            "X-Request-Timeout",
        )
    return seconds


def _is_anthropics(scope: Scope) -> bool:
    """Whether the client uses Anthropic's API, for paths that belong to no dialect."""
    return f"{scope['path']}/".startswith("/v1/messages/") or bool(header(scope["headers"], b"anthropic-version"))


def _no_route(scope: Scope, error: HTTPException, tell: Teller, request_id: str, hint: str) -> WholeResponse:
    """Convert the router's own 404 and 405."""
    if error.status_code == 405:
        refusal = Refusal(405, f"{scope['method']} is not allowed for {scope['path']}", "method_not_allowed")
    else:
        refusal = Refusal(
            error.status_code,
            f"there is no route {scope['path'][:SHOWN_PATH_CHARS]}{hint}",
            "not_found",
        )
    return tell(refusal, request_id)._replace(
        headers={key.lower(): value for key, value in (error.headers or {}).items()}
    )


def _is_plain(value: bytes) -> bool:
    return all(33 <= byte < 127 for byte in value)


class _Bodies:
    """Counts the bytes of all bodies being read or encoded, and rejects more beyond the limit.

    The first FREE_BYTES of each body do not count, so that clients with large bodies do not block small ones.
    """

    FREE_BYTES = 64 << 10

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0

    def grow(self, size: int, part: int) -> int:
        """Add `part` bytes to a body of `size` bytes; returns its new size. Raises Overloaded."""
        grown = size + part
        counted = max(grown - self.FREE_BYTES, 0) - max(size - self.FREE_BYTES, 0)
        if self._bytes + counted > self._most:
            raise Overloaded(f"bodies of {self._bytes} bytes are being read already; try again later")
        self._bytes += counted
        return grown


class _Body:
    """A body, counted while it is read and its request is started, until the `with` block is left."""

    def __init__(self, bodies: _Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    def __enter__(self) -> "_Body":
        return self

    def __exit__(self, *_: object) -> None:
        self._size = self._bodies.grow(self._size, -self._size)

    async def read(self, scope: Scope, receive: Receive, most: int) -> bytes | None:
        """Read the whole body; None if the client disconnected.

        Raises Refusal (413) as soon as the body is known to exceed `most` bytes, 400 or 415 for compression other than
        gzip, and Overloaded.
        """
        packed = check_encoding(header(scope["headers"], b"content-encoding"))
        too_large = Refusal(413, f"the body is more than {most} bytes", "body_too_large")
        declared = header(scope["headers"], b"content-length")
        if declared.isdigit() and int(declared[:20]) > most:
            raise too_large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part: bytes = message.get("body", b"")
            if len(body) + len(part) > most:
                raise too_large
            self._size = self._bodies.grow(self._size, len(part))
            body += part
            if not message.get("more_body", False):
                return await self._unpacked(bytes(body), most) if packed else bytes(body)

    async def _unpacked(self, data: bytes, most: int) -> bytes:
        """Raises Refusal (400, 413) and Overloaded."""
        body = bytearray()
        async for piece in unpacked(data):
            if len(body) + len(piece) > most:
                raise Refusal(413, f"the decompressed body is more than {most} bytes", "body_too_large")
            self._size = self._bodies.grow(self._size, len(piece))
            body += piece
        return bytes(body)


class _Post:
    """A route that reads the whole body, within its limits, starts the request, and responds.

    The body is released once the request has started: an answer may take an hour.
    """

    def __init__(self, begin: Begin, config: ApiConfig, bodies: _Bodies) -> None:
        self._begin = begin
        self._limits = config.limits
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as until_begun, _Departure(receive) as departure:
            passage: RequestSpan = scope["passage"]
            body = await self._read(until_begun.enter_context(_Body(self._bodies)), scope, receive)
            passage.did("read", passage.began)
            if body is None:
                return
            departure.watch()
            respond = await self._begin(body, scope)
            if (generation := scope.get("generation")) is not None:
                generation.direct = scope.get("extensions", {}).get(DIRECT)
            del body
            until_begun.close()
            await respond(send)

    async def _read(self, body: _Body, scope: Scope, receive: Receive) -> bytes | None:
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await body.read(scope, receive, self._limits.body_bytes)
        except TimeoutError:
            raise Refusal(408, f"the body took more than {self._limits.body_seconds} s", "timeout") from None


class _Departure:
    """While watching, cancels the task that serves a request if the client disconnects, whatever the task waits for:
    no more text is encoded, and jobs are aborted. The cancellation ends at the `with` block."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watching: asyncio.Task[None] | None = None
        self._left = False

    def __enter__(self) -> "_Departure":
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        return self

    def watch(self) -> None:
        """Start watching: the body has been read, so that the connection's next message is its end."""
        self._watching = asyncio.create_task(self._wait())

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        if self._watching is not None:
            self._watching.cancel()
        return self._left and self._task.uncancel() == 0 and kind is asyncio.CancelledError

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()
