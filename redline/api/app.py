"""The HTTP face: one list of routes, one border around them, and two ways to answer (whole, or as a stream).

The border holds what is true of every request: keys, header size, request id, and that an exception ends the request
that met it and no other. The two generating routes are plain ASGI, since that is the cheapest way to send a token.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redline.api import metrics
from redline.api.access import OPEN_PATHS, check_key, check_page, header, read_keys
from redline.api.answers import (
    Opening,
    chat_answer,
    completion_answer,
    completion_choice,
    gather,
)
from redline.api.ask import Ask
from redline.api.config import ApiConfig, Defaults, Limits
from redline.api.errors import Answer, Refusal, answer_to
from redline.api.gateway import Gateway, Generation
from redline.api.openai import read_chat, read_completion, read_detokenize, read_tokenize
from redline.api.sse import ChatStream, CompletionStream, Stream, data
from redline.chat.conversation import Conversation
from redline.errors import ModelNotFound

QUIET_PATHS = {"/health", "/live", "/metrics"}  # asked every few seconds by machines: access lines at debug only
REQUEST_ID_CHARS = 128
SHOWN_PATH_CHARS = 200

access_log = logging.getLogger("redline.access")

T = TypeVar("T")
Serve = Callable[[bytes, Scope, Receive, Send], Awaitable[None]]


def create_app(gateway: Gateway, config: ApiConfig) -> ASGIApp:
    """The API over a gateway. Raises ConfigError where the keys' file cannot be read or is empty."""
    api = _Api(gateway, config)
    routes = [
        Route("/", api.root),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        Route("/version", api.version),
        Route("/v1/models", api.models),
        Route("/v1/chat/completions", _Post(api.chat, config), methods=["POST"]),
        Route("/v1/completions", _Post(api.completions, config), methods=["POST"]),
        Route("/tokenize", _Post(api.tokenize, config), methods=["POST"]),
        Route("/detokenize", _Post(api.detokenize, config), methods=["POST"]),
    ]
    api.routes = [f"{'POST' if isinstance(route.endpoint, _Post) else 'GET'} {route.path}" for route in routes]
    keys = read_keys(Path(config.keys_file)) if config.keys_file else None
    return _Border(Router(routes, redirect_slashes=False), keys, config.local, config.limits.header_bytes)


class _Border:
    """Around every request."""

    def __init__(self, app: ASGIApp, keys: frozenset[bytes] | None, local: bool, header_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._local = local
        self._header_bytes = header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self  # so that the router raises its 404 and 405
        began = time.perf_counter()
        status, complete = 0, False
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id = header(headers, b"x-request-id")
        if not 0 < len(request_id) <= REQUEST_ID_CHARS or not _is_plain(request_id):
            request_id = uuid.uuid4().hex.encode()

        async def send_on(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            if sum(len(name) + len(value) for name, value in headers) > self._header_bytes:
                raise Refusal(431, f"the headers are more than {self._header_bytes} bytes", "headers_too_large")
            if self._keys is None:
                check_page(scope["method"], headers, self._local)
            elif scope["path"] not in OPEN_PATHS:
                check_key(headers, self._keys)
            await self._app(scope, receive, send_on)
        except HTTPException as error:
            await _send(send_on, _no_route(scope, error))
        except Exception as error:  # the last place where an exception can end one request only
            answer = answer_to(error)
            if not status:
                await _send(send_on, answer)
        except asyncio.CancelledError:
            pass  # the server ends, and has closed the connection
        finally:
            _tell(scope, status, complete, time.perf_counter() - began, request_id)


def _tell(scope: Scope, status: int, complete: bool, seconds: float, request_id: bytes) -> None:
    """The access line. Nothing in it was chosen freely by the client but what stands percent-encoded or as the id."""
    level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
    if not access_log.isEnabledFor(level):
        return
    path = quote(scope["path"], safe="/:@!$&'()*+,;=")
    tokens = ""
    if (generation := scope.get("generation")) is not None:
        tokens = f", tokens {sum(map(len, generation.prompts))} + {sum(lane.read for lane in generation.lanes)}"
    access_log.log(
        level,
        "%s %s %s, %.0f ms%s, id %s%s",
        scope["method"],
        path if len(path) <= SHOWN_PATH_CHARS else path[:SHOWN_PATH_CHARS] + "...",
        status or "-",
        seconds * 1000,
        tokens,
        request_id.decode(),
        "" if complete else ", the client left",
    )


def _no_route(scope: Scope, error: HTTPException) -> Answer:
    """The router's own 404 and 405, in OpenAI's shape."""
    if error.status_code == 405:
        refusal = Refusal(405, f"{scope['method']} is not served at {scope['path']}", "method_not_allowed")
    else:
        refusal = Refusal(
            error.status_code, f"there is no route {scope['path'][:SHOWN_PATH_CHARS]}; GET / lists them", "not_found"
        )
    return answer_to(refusal)._replace(headers={key.lower(): value for key, value in (error.headers or {}).items()})


def _is_plain(value: bytes) -> bool:
    return all(33 <= byte < 127 for byte in value)


async def _send(send: Send, answer: Answer) -> None:
    headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer.body))]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


async def _send_json(send: Send, value: Any) -> None:
    await _send(send, Answer(200, msgspec.json.encode(value), {}))


class _Post:
    """A route that reads a whole body, within its bounds, and hands it to `serve`."""

    def __init__(self, serve: Serve, config: ApiConfig) -> None:
        self._serve = serve
        self._limits = config.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await _read_body(scope, receive, self._limits.body_bytes)
        except TimeoutError:
            raise Refusal(408, f"the body took more than {self._limits.body_seconds} s", "timeout") from None
        if body is not None:
            await self._serve(body, scope, receive, send)


async def _read_body(scope: Scope, receive: Receive, most: int) -> bytes | None:
    """None where the client left meanwhile. Raises Refusal (413) as soon as it is known to be too large."""
    too_large = Refusal(413, f"the body is more than {most} bytes", "body_too_large")
    declared = header(scope["headers"], b"content-length")
    if declared.isdigit() and int(declared[:20]) > most:
        raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part: bytes = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > most:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(parts)


class _Api:
    """The routes."""

    def __init__(self, gateway: Gateway, config: ApiConfig) -> None:
        self._gateway = gateway
        self._limits = config.limits
        self._defaults = config.defaults
        self._names = config.served_model_names
        self._created = int(time.time())
        self.routes: list[str] = []

    async def root(self, request: Request) -> Response:
        """What this is, and its routes."""
        return _json({"name": "redline", "version": version("redline"), "models": self._names, "routes": self.routes})

    async def health(self, request: Request) -> Response:
        """200 while the model answers; 503 while it loads and after the worker has ended."""
        if self._gateway.ready is not None:
            return _json({"status": "ready"})
        return _json({"status": "worker lost" if self._gateway.lost else "loading"}, 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._gateway.metrics.expose(), headers={"content-type": metrics.CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return _json({"version": version("redline")})

    async def models(self, request: Request) -> Response:
        ready = self._gateway.ready
        card = {
            "object": "model",
            "created": self._created,
            "owned_by": "redline",
            "max_model_len": ready.max_model_len if ready else None,
        }
        return _json({"object": "list", "data": [{"id": name, **card} for name in self._names]})

    async def chat(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        request = await self._read(body, read_chat)
        model = self._model(request.model)
        logprobs = request.ask.sampling.logprobs is not None
        token_bytes = self._gateway.tokenizer.token_bytes
        id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        with await self._gateway.begin(request.ask) as generation, _Departure(receive, generation):
            scope["generation"] = generation
            if request.stream is not None:
                prompts = [len(prompt) for prompt in generation.prompts]
                stream = ChatStream(id, created, model, prompts, request.ask.n, request.stream, logprobs, token_bytes)
                await _stream(send, generation, stream)
                return
            choices = await gather(generation, request.ask.choices)
            await _send_json(send, chat_answer(id, created, model, choices, logprobs, token_bytes))

    async def completions(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        request = await self._read(body, read_completion)
        model = self._model(request.model)
        ask: Ask = request.ask
        logprobs = ask.sampling.logprobs is not None
        token_bytes = self._gateway.tokenizer.token_bytes
        id, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        with await self._gateway.begin(ask) as generation, _Departure(receive, generation):
            scope["generation"] = generation
            prompts = generation.prompts
            if request.stream is not None:
                stream = CompletionStream(
                    id, created, model, prompts, ask.n, request.stream, logprobs, request.echo, token_bytes
                )
                await _stream(send, generation, stream)
                return
            choices = await gather(generation, ask.choices)
            written = [
                completion_choice(
                    index,
                    choice,
                    Opening(prompts[index // ask.n], choice.prompt_logprobs, request.echo, token_bytes),
                    logprobs,
                    token_bytes,
                )
                for index, choice in enumerate(choices)
            ]
            ends = [choice.ended() for choice in choices]
            await _send_json(send, completion_answer(id, created, model, written, ends, ask.n))

    async def tokenize(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        request = await self._read(body, read_tokenize)
        self._model(request.model)
        param = "messages" if isinstance(request.prompt, Conversation) else "prompt"
        tokens = await self._gateway.encode(request.prompt, param)
        token_bytes = self._gateway.tokenizer.token_bytes
        strings = [token_bytes(token).decode(errors="replace") for token in tokens] if request.token_strs else None
        await _send_json(
            send,
            {
                "count": len(tokens),
                "max_model_len": self._gateway.max_model_len,
                "tokens": tokens,
                "token_strs": strings,
            },
        )

    async def detokenize(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        request = read_detokenize(body)
        self._model(request.model)
        text = self._gateway.tokenizer.decode_bytes(request.tokens).decode(errors="replace")
        await _send_json(send, {"prompt": text})

    async def _read(self, body: bytes, read: Callable[[bytes, Limits, Defaults], T]) -> T:
        """Large bodies are read beside the event loop: JSON takes about a 64th of what encoding its text takes."""
        return await self._gateway.in_thread(len(body) // 64, read, body, self._limits, self._defaults)

    def _model(self, asked: str | None) -> str:
        """The name that the answer carries. Raises ModelNotFound for a name that is not served."""
        if asked is not None and asked not in self._names:
            raise ModelNotFound(f"the model {asked} does not exist; served: {', '.join(self._names)}", "model")
        return asked or self._names[0]


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class ClientLeft(Exception):
    """Nobody reads the answer any more."""


class _Departure:
    """While inside, a client that leaves ends the generation (and so its jobs), wherever it is."""

    def __init__(self, receive: Receive, generation: Generation) -> None:
        self._receive = receive
        self._generation = generation

    def __enter__(self) -> None:
        self._watch = asyncio.create_task(self._wait())

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        self._watch.cancel()
        return kind is ClientLeft

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._generation.close()  # at once: the answer may come faster than its failure is looked at
        self._generation.fail(ClientLeft())


STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # else nginx holds tokens back
    ],
}


async def _stream(send: Send, generation: Generation, stream: Stream) -> None:
    """The status waits for the first tokens, so that what fails before them fails with its own status. What fails
    later is an error event, and the end."""
    started = False
    try:
        async for batches in generation:
            if not started:
                started = True
                await send(dict(STREAM_START))
            if body := stream.write(batches):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": stream.close(), "more_body": False})
    except ClientLeft:
        raise
    except Exception as error:
        if not started:
            raise
        await send({"type": "http.response.body", "body": data(answer_to(error).body), "more_body": False})
