"""The HTTP application: the routes, the code around every request, and whole and streamed responses.

`ErrorMiddleware` handles what every request needs: keys, header size, request id, and exceptions, which end only
their own request. The generating routes are plain ASGI, which is the cheapest way to send a token.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redline import __version__, clock
from redline.api.anthropic.events import MESSAGES, count_answer, messages_error
from redline.api.anthropic.requests import read_count
from redline.api.ask import Prompt
from redline.api.auth.access import OPEN_PATHS, Headers, check_page, check_single, header
from redline.api.auth.auth_state import AuthState
from redline.api.auth.quota import CALLER, Caller, KeyAccount
from redline.api.config import ApiConfig, Defaults, Limits
from redline.api.dialect import A, Dialect, EventStream, Reply
from redline.api.errors import Answer, Refusal
from redline.api.gateway.gateway import Gateway
from redline.api.gateway.generation import Generation
from redline.api.http.cors import Cors, check_origins
from redline.api.http.stream_flusher import DIRECT
from redline.api.http.unpack import check_encoding, unpacked
from redline.api.openai.answers import (
    detokenize_answer,
    gather,
    tokenize_answer,
    tokenizer_info,
)
from redline.api.openai.dialects import CHAT, COMPLETIONS, openai_error
from redline.api.openai.requests import read_detokenize, read_tokenize
from redline.api.openapi.document import openapi
from redline.api.openapi.operations import operations
from redline.api.openapi.page import PAGE_HEADERS, page
from redline.api.page.chat_page import FILES, EngineView, page_routes
from redline.api.page.render import PATH as RENDER_PATH
from redline.api.page.render import Renderer
from redline.api.paging import page_limit
from redline.api.responses.events import KeptResponses, count_input, responses
from redline.api.responses.requests import ResponsesRequest, read_input_tokens
from redline.api.responses.store import ResponseStore
from redline.api.telemetry import metrics
from redline.api.telemetry.metrics import Metrics
from redline.api.telemetry.request_span import RequestSpan
from redline.chat.conversation import Conversation
from redline.errors import ModelNotFound, Overloaded, RequestError

QUIET_PATHS = {
    "/health",
    "/live",
    "/ping",
    "/load",
    "/metrics",
}  # polled by machines every few seconds: logged at debug level only
REQUEST_ID_CHARS = 128
SHOWN_PATH_CHARS = 200
SHOWN_TYPES = 16  # dropped tool types named in the warning header
WARNING = "x-redline-warning"
NO_HEADERS: Mapping[str, str] = MappingProxyType({})

access_log = logging.getLogger("redline.access")
log = logging.getLogger("redline.api")

T = TypeVar("T")
Respond = Callable[[Send], Awaitable[None]]
Begin = Callable[[bytes, Scope], Awaitable[Respond]]  # starts processing a body
Teller = Callable[[Exception, str], Answer]  # converts an exception and the request's id
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
    api = _Api(gateway, config, edge, scrape)
    gateway.metrics.health(lambda: api.unready is None)
    bodies = _Bodies(config.limits.bodies_bytes)
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
    count_input_tokens = partial(api.count_input_tokens, of_responses)
    routes = [
        *(page_routes() if config.page else [Route("/", api.version)]),
        Route("/engine", EngineView(gateway, edge).stream),
        Route("/live", api.live),
        Route("/health", api.health),
        Route("/ping", api.health, methods=["GET", "POST"]),
        Route("/load", api.load),
        Route("/metrics", api.metrics),
        Route("/version", api.version),
        Route("/v1/models", api.models),
        Route("/tokenizer_info", api.tokenizer_info),
        Route("/openapi.json", api.openapi),
        Route("/docs", api.docs),
        Route("/v1/models/{id:path}", api.one_model),
        *(
            Route(path, _Post(partial(api.generate, dialect), config, bodies), methods=["POST"])
            for path, dialect in dialects.items()
        ),
        Route("/v1/messages/count_tokens", _Post(api.count_tokens, config, bodies), methods=["POST"]),
        Route("/v1/responses/input_tokens", _Post(count_input_tokens, config, bodies), methods=["POST"]),
        Route("/tokenize", _Post(api.tokenize, config, bodies), methods=["POST"]),
        Route("/detokenize", _Post(api.detokenize, config, bodies), methods=["POST"]),
    ]
    if config.page:
        renderer = Renderer()
        gateway.at_end(renderer.ended)
        routes.append(Route(RENDER_PATH, _Post(partial(_render, renderer), config, bodies), methods=["POST"]))
    if store is not None:
        kept = KeptResponses(store)
        routes.append(Route("/v1/responses/{id}", kept.read))
        routes.append(Route("/v1/responses/{id}/input_items", kept.input_items))
        routes.append(Route("/v1/responses/{id}", kept.delete, methods=["DELETE"]))
    api.routes = [f"{_method(route)} {route.path_format}" for route in routes if not route.path.startswith("/page/")]
    tellers = {path: dialect.error for path, dialect in dialects.items()}
    router = Router(routes, redirect_slashes=False)
    hint = "; GET /version lists the routes; admin routes have an address of their own, which the server's start prints"
    border = ErrorMiddleware(router, edge, config, gateway.metrics, tellers, hint)
    origins = check_origins(config.cors_origins)
    return Cors(border, origins) if origins else border


async def _render(renderer: Renderer, body: bytes, scope: Scope) -> Respond:
    return partial(_send_json, body=await renderer.answer(body))


def open_paths(config: ApiConfig) -> set[str]:
    """Paths without a key: the page's files are the same for everyone."""
    return OPEN_PATHS | FILES.keys() if config.page else OPEN_PATHS


def _method(route: Route) -> str:
    return next((method for method in ("GET", "DELETE") if method in (route.methods or ())), "POST")


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
            await _send(send_on, _no_route(scope, error, tell, request_id.decode(), self._hint))
        except Exception as error:  # the last place to catch an exception so that it ends only one request
            answer = tell(error, request_id.decode())
            self._counted.rejected(error)
            if not status:
                await _send(send_on, answer)
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


MOST_MODELS = 1000  # page size of the list of models


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


def _no_route(scope: Scope, error: HTTPException, tell: Teller, request_id: str, hint: str) -> Answer:
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


SEND_BYTES = 1 << 20  # larger bodies are sent in parts, so that the event loop serves others in between


async def _send(send: Send, answer: Answer) -> None:
    headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer.body))]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    for start in range(0, len(answer.body), SEND_BYTES):
        part = answer.body[start : start + SEND_BYTES]
        more = start + SEND_BYTES < len(answer.body)
        await send({"type": "http.response.body", "body": part, "more_body": more})


async def _send_json(send: Send, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> None:
    await _send(send, Answer(200, body, dict(headers)))


def _warning(left_out: Sequence[str]) -> dict[str, str]:
    """The header that names the dropped tool and item types, restricted to plain characters."""
    types = [re.sub("[^A-Za-z0-9_.-]", "?", one[:64]) for one in left_out[:SHOWN_TYPES]]
    more = ["..."] if len(left_out) > SHOWN_TYPES else []
    return {WARNING: f"ignored, since only function tools are supported: {', '.join(types + more)}"} if types else {}


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


class _Api:
    """The handlers of the routes."""

    def __init__(
        self, gateway: Gateway, config: ApiConfig, edge: AuthState, scrape: Callable[[], Awaitable[bytes]] | None
    ) -> None:
        self._gateway = gateway
        self._edge = edge
        self._scrape = scrape
        self._limits = config.limits
        self._defaults = config.defaults
        self._names = config.served_model_names
        self._created = int(clock.now())
        self.routes: list[str] = []
        document = openapi(operations(config), open_paths(config), keys=config.keys_file is not None)
        self._document, self._page = msgspec.json.encode(document), page(document)

    async def version(self, request: Request) -> Response:
        """Name, version and routes of this server."""
        return json_response({"name": "redline", "version": __version__, "models": self._names, "routes": self.routes})

    async def live(self, request: Request) -> Response:
        """Always 200: this process is alive. `health` reports on the model."""
        return json_response({"status": "live"})

    @property
    def unready(self) -> dict[str, str] | None:
        """Why the server is not ready, for `health`: the model is loading or stalled, the server drains, or its
        worker is down. None: it is ready."""
        if self._gateway.ready is None:
            return {"status": "worker lost" if self._gateway.workers.lost else "loading"}
        if self._edge.draining is not None:
            return {"status": "draining", "reason": self._edge.draining}
        if (trouble := self._gateway.workers.trouble) is not None:
            return {"status": "stalled", "reason": trouble}
        return None

    async def health(self, request: Request) -> Response:
        """200 while the model is ready, else 503 with the reason."""
        why_not = self.unready
        return json_response({"status": "ready"} if why_not is None else why_not, 200 if why_not is None else 503)

    async def metrics(self, request: Request) -> Response:
        text = self._gateway.metrics.expose() if self._scrape is None else await self._scrape()
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def load(self, request: Request) -> Response:
        """vLLM's /load: the number of running and waiting requests."""
        return json_response({"server_load": self._gateway.requests.requests + self._gateway.peers.load})

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html", headers=PAGE_HEADERS)

    async def models(self, request: Request) -> Response:
        """The list of models in OpenAI's and Anthropic's format combined. ?limit, ?after_id, ?before_id: paging, as
        Anthropic's clients use it."""
        query = request.query_params
        begin = 1 + self._place(after, "after_id") if (after := query.get("after_id")) else 0
        end = self._place(before, "before_id") if (before := query.get("before_id")) else len(self._names)
        names, limit = self._names[begin:end], page_limit(query.get("limit"), MOST_MODELS, MOST_MODELS)
        some = names[-limit:] if before else names[:limit]
        return json_response(
            {
                "object": "list",
                "data": [self._card(name) for name in some],
                "has_more": len(some) < len(names),
                "first_id": some[0] if some else None,
                "last_id": some[-1] if some else None,
            }
        )

    async def one_model(self, request: Request) -> Response:
        return json_response(self._card(self._model(request.path_params["id"])))

    def _place(self, name: str, param: str) -> int:
        if name not in self._names:
            raise RequestError(f"{param} is {name[:100]!a}, which is not a served model", param)
        return self._names.index(name)

    def _card(self, name: str) -> dict[str, Any]:
        """A model in OpenAI's format, with vLLM's `max_model_len`, and in Anthropic's."""
        ready = self._gateway.ready
        length = ready.max_model_len if ready else None
        allowed = [tokens for tokens in (length, self._limits.most_max_tokens) if tokens is not None]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "redline",
            "max_model_len": length,
            "type": "model",
            "display_name": name,
            "created_at": clock.strftime("%Y-%m-%dT%H:%M:%SZ", clock.gmtime(self._created)),
            "lifecycle": "active",
            "max_input_tokens": length,
            "max_tokens": min(allowed, default=None),
        }

    async def tokenizer_info(self, request: Request) -> Response:
        """vLLM's /tokenizer_info: the fields of tokenizer_config.json, with the chat template."""
        body = tokenizer_info(self._gateway.encoder.tokenizer.config, self._gateway.max_model_len)
        return Response(body, media_type="application/json")

    async def generate(self, dialect: Dialect[A], body: bytes, scope: Scope) -> Respond:
        """Parse a body by a dialect, and start generation."""
        passage: RequestSpan = scope["passage"]
        began = clock.perf_counter()
        asked = await self._read(body, dialect.read)
        passage.did("parse", began)
        passage.model = model = self._model(asked.model)
        if dialect.recall is not None:
            asked = await dialect.recall(asked)
        gateway = self._gateway
        max_model_len = gateway.max_model_len  # raises if no worker is ready, as `begin` does
        scope["generation"] = generation = await gateway.begin(asked.ask)  # for the access log line
        if warning := _warning(asked.left_out):
            log.info("%s, request %s", warning[WARNING], passage.id)
        # Nothing may raise from here on: `_reply` closes the generation.
        reply = Reply(asked, model, int(clock.now()), generation, gateway.encoder.tokenizer, max_model_len)
        return partial(self._reply, dialect, reply, warning)

    async def _reply(self, dialect: Dialect[A], reply: Reply[A], headers: Mapping[str, str], send: Send) -> None:
        with reply.generation as generation:
            if reply.asked.stream is not None:
                await self._stream(send, generation, dialect.stream(reply), max(reply.openings), headers)
                return
            choices = await gather(generation)
            cost = generation.n * sum(reply.openings) + sum(choice.entries for choice in choices)
            body = await self._gateway.encoder.in_thread(ENTRY_CHARS * cost, dialect.answer, reply, choices)
            if dialect.keep is not None:
                body = await dialect.keep(reply, choices, body)
            await _send_json(send, body, headers)

    async def _stream(
        self, send: Send, generation: Generation, stream: EventStream, opening: int, headers: Mapping[str, str]
    ) -> None:
        """Send a streamed response. The status is sent at admission, or after REFUSAL_S at the latest, so that a
        request that the engine rejects at once gets an error status. Later errors are sent as an error event, which
        ends the stream. opening: entries before the first output token of a choice."""
        started = False

        async def start() -> None:
            nonlocal started
            started = True
            more = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({**STREAM_START, "headers": [*STREAM_START["headers"], *more]})
            await write(stream.open())

        async def write(body: bytes) -> None:
            if body:
                await _send_parts(send, body)
                generation.wrote()

        generation.break_silence(KEEPALIVE_S)
        try:
            if await generation.admitted(REFUSAL_S):
                await start()
            async for batches in generation:
                if not started:
                    await start()
                cost = ENTRY_CHARS * opening * sum(batch.first for batch in batches)
                await write(await self._gateway.encoder.in_thread(cost, stream.write, batches))
                if generation.silent:
                    await write(stream.keepalive())
                if not opening:  # else the first batch of a choice may need a thread
                    await write(await generation.pour(stream.write))
            await send({"type": "http.response.body", "body": await stream.close(), "more_body": False})
        except Exception as error:
            if not started:
                raise
            await send({"type": "http.response.body", "body": stream.fail(error), "more_body": False})

    async def tokenize(self, body: bytes, scope: Scope) -> Respond:
        request = await self._read(body, read_tokenize)
        self._model(request.model)
        param = "messages" if isinstance(request.prompt, Conversation) else "prompt"
        tokens = await self._encoded(request.prompt, param)
        token_bytes = self._gateway.encoder.tokenizer.token_bytes if request.token_strs else None
        answer = await self._gateway.encoder.in_thread(
            len(tokens), tokenize_answer, tokens, self._gateway.max_model_len, token_bytes
        )
        return partial(_send_json, body=answer)

    async def count_tokens(self, body: bytes, scope: Scope) -> Respond:
        """Anthropic's count_tokens: the number of tokens of a message's prompt."""
        request = await self._read(body, read_count)
        self._model(request.model)
        return partial(_send_json, body=count_answer(len(await self._encoded(request.conversation, "messages"))))

    async def count_input_tokens(self, dialect: Dialect[ResponsesRequest], body: bytes, scope: Scope) -> Respond:
        """OpenAI's input_tokens: the number of tokens of a response's input."""
        asked = await self._read(body, read_input_tokens)
        self._model(asked.model)
        if dialect.recall is not None:
            asked = await dialect.recall(asked)
        [prompt] = asked.ask.prompts
        tokens = await self._encoded(prompt, "input")
        return partial(_send_json, body=count_input(len(tokens)), headers=_warning(asked.left_out))

    async def _encoded(self, prompt: Prompt, param: str) -> Sequence[int]:
        """Token ids of a prompt. Raises RequestError for more tokens than a request may have."""
        most = self._limits.tokens
        tokens = await self._gateway.encoder.encode(prompt, param, most)
        if len(tokens) > most:
            raise RequestError(f"{param} is {len(tokens)} tokens; at most {most} in one request", param)
        return tokens

    async def detokenize(self, body: bytes, scope: Scope) -> Respond:
        most = self._gateway.max_model_len
        request = await self._gateway.encoder.in_thread(len(body) // 64, read_detokenize, body, most)
        self._model(request.model)
        decode = self._gateway.encoder.tokenizer.decode_bytes
        answer = await self._gateway.encoder.in_thread(len(request.tokens), detokenize_answer, request.tokens, decode)
        return partial(_send_json, body=answer)

    async def _read(self, body: bytes, read: Callable[[bytes, Limits, Defaults], T]) -> T:
        """Parse a body; large ones in a thread: parsing JSON takes about a 64th of the time of encoding its text."""
        return await self._gateway.encoder.in_thread(len(body) // 64, read, body, self._limits, self._defaults)

    def _model(self, asked: str | None) -> str:
        """The model name for the response. Raises ModelNotFound for a name that is not served."""
        if asked is not None and asked not in self._names:
            raise ModelNotFound(f"the model {asked} does not exist; served: {', '.join(self._names)}", "model")
        return asked or self._names[0]


def json_response(value: Any, status: int = 200) -> Response:
    """A whole response in JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


ENTRY_CHARS = 8  # writing one logprob takes as long as encoding this number of characters


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


KEEPALIVE_S = 9.0  # seconds of silence before a stream sends a keepalive: two fit into the 20 s of an impatient client
REFUSAL_S = 0.25  # seconds in which an idle engine has rejected a request that it cannot take

STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # else nginx buffers tokens
    ],
}


async def _send_parts(send: Send, body: bytes) -> None:
    for start in range(0, len(body), SEND_BYTES):
        await send({"type": "http.response.body", "body": body[start : start + SEND_BYTES], "more_body": True})
