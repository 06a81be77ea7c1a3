"""The HTTP face: one list of routes, one border around them, and two ways to answer (whole, or as a stream).

The border holds what is true of every request: keys, header size, request id, and that an exception ends the request
that met it and no other. The two generating routes are plain ASGI, since that is the cheapest way to send a token.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
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
    chat_answer,
    completion_answer,
    detokenize_answer,
    gather,
    tokenize_answer,
)
from redline.api.config import ApiConfig, Defaults, Limits
from redline.api.errors import Answer, Refusal, answer_to
from redline.api.gateway import Gateway, Generation
from redline.api.openai import Streaming, read_chat, read_completion, read_detokenize, read_tokenize
from redline.api.openai_operations import operations
from redline.api.openapi import PAGE_HEADERS, openapi, page
from redline.api.sse import ChatStream, CompletionStream, EventStream, data
from redline.chat.conversation import Conversation
from redline.errors import ModelNotFound, Overloaded, RequestError
from redline.wire.job import Sampling

QUIET_PATHS = {"/health", "/live", "/metrics"}  # asked every few seconds by machines: access lines at debug only
REQUEST_ID_CHARS = 128
SHOWN_PATH_CHARS = 200

access_log = logging.getLogger("redline.access")

T = TypeVar("T")
Respond = Callable[[Send], Awaitable[None]]
Begin = Callable[[bytes, Scope], Awaitable[Respond]]  # what a body asks for, begun


def create_app(gateway: Gateway, config: ApiConfig) -> ASGIApp:
    """The API over a gateway. Raises ConfigError where the keys' file cannot be read or is empty."""
    api = _Api(gateway, config)
    bodies = _Bodies(config.limits.bodies_bytes)
    routes = [
        Route("/", api.root),
        Route("/live", api.live),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        Route("/version", api.version),
        Route("/v1/models", api.models),
        Route("/openapi.json", api.openapi),
        Route("/docs", api.docs),
        Route("/v1/chat/completions", _Post(api.chat, config, bodies), methods=["POST"]),
        Route("/v1/completions", _Post(api.completions, config, bodies), methods=["POST"]),
        Route("/tokenize", _Post(api.tokenize, config, bodies), methods=["POST"]),
        Route("/detokenize", _Post(api.detokenize, config, bodies), methods=["POST"]),
    ]
    api.routes = [f"{'POST' if isinstance(route.endpoint, _Post) else 'GET'} {route.path}" for route in routes]
    keys = read_keys(Path(config.keys_file)) if config.keys_file else None
    return _Border(Router(routes, redirect_slashes=False), keys, config.local, config.limits.header_bytes)


class _Border:
    """What surrounds every request: keys, header size, request id, errors, and the access line."""

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
    """Write the access line. Of what a client chose it holds only the path, percent-encoded, and a plain id."""
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


SEND_BYTES = 1 << 20  # a larger body leaves in parts, so that the loop turns between them


async def _send(send: Send, answer: Answer) -> None:
    headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer.body))]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    for start in range(0, len(answer.body), SEND_BYTES):
        part = answer.body[start : start + SEND_BYTES]
        more = start + SEND_BYTES < len(answer.body)
        await send({"type": "http.response.body", "body": part, "more_body": more})


async def _send_json(send: Send, body: bytes) -> None:
    await _send(send, Answer(200, body, {}))


class _Bodies:
    """Counts the bodies that are being read or encoded, all together, and refuses what is beyond the bound.

    The first FREE_BYTES of each do not count, so that whoever sends large ones keeps no small one out.
    """

    FREE_BYTES = 64 << 10

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0

    def grow(self, size: int, part: int) -> int:
        """A body of `size` bytes grows by `part`: -> its new size. Raises Overloaded."""
        grown = size + part
        counted = max(grown - self.FREE_BYTES, 0) - max(size - self.FREE_BYTES, 0)
        if self._bytes + counted > self._most:
            raise Overloaded(f"bodies of {self._bytes} bytes are being read already; try again later")
        self._bytes += counted
        return grown


class _Body:
    """A body while it is read and what it asks for is begun; leave the `with` block, and it counts no more."""

    def __init__(self, bodies: _Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    def __enter__(self) -> "_Body":
        return self

    def __exit__(self, *_: object) -> None:
        self._size = self._bodies.grow(self._size, -self._size)

    async def read(self, scope: Scope, receive: Receive, most: int) -> bytes | None:
        """The whole body; None where the client left meanwhile.

        Raises Refusal (413) as soon as it is known to have more than `most` bytes, and Overloaded.
        """
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
                return bytes(body)


class _Post:
    """A route that reads a whole body, within its bounds, begins what it asks for, and answers.

    Once that is begun the body is let go: an answer may take an hour.
    """

    def __init__(self, begin: Begin, config: ApiConfig, bodies: _Bodies) -> None:
        self._begin = begin
        self._limits = config.limits
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as until_begun, _Departure(receive) as departure:
            body = await self._read(until_begun.enter_context(_Body(self._bodies)), scope, receive)
            if body is None:
                return
            departure.watch()
            respond = await self._begin(body, scope)
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
    """The routes."""

    def __init__(self, gateway: Gateway, config: ApiConfig) -> None:
        self._gateway = gateway
        self._limits = config.limits
        self._defaults = config.defaults
        self._names = config.served_model_names
        self._created = int(time.time())
        self.routes: list[str] = []
        document = openapi(operations(config.limits, config.defaults), OPEN_PATHS, keys=config.keys_file is not None)
        self._document, self._page = msgspec.json.encode(document), page(document)

    async def root(self, request: Request) -> Response:
        """What this is, and its routes."""
        return _json({"name": "redline", "version": version("redline"), "models": self._names, "routes": self.routes})

    async def live(self, request: Request) -> Response:
        """200: this process answers. That says nothing of the model; `health` does."""
        return _json({"status": "live"})

    async def health(self, request: Request) -> Response:
        """200 while the model answers; 503 while it loads, while it seems stuck, and after the worker has ended."""
        if self._gateway.ready is None:
            return _json({"status": "worker lost" if self._gateway.lost else "loading"}, 503)
        if (trouble := self._gateway.trouble) is not None:
            return _json({"status": "stalled", "reason": trouble}, 503)
        return _json({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._gateway.metrics.expose(), headers={"content-type": metrics.CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return _json({"version": version("redline")})

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html", headers=PAGE_HEADERS)

    async def models(self, request: Request) -> Response:
        ready = self._gateway.ready
        card = {
            "object": "model",
            "created": self._created,
            "owned_by": "redline",
            "max_model_len": ready.max_model_len if ready else None,
        }
        return _json({"object": "list", "data": [{"id": name, **card} for name in self._names]})

    async def chat(self, body: bytes, scope: Scope) -> Respond:
        request = await self._read(body, read_chat)
        model = self._model(request.model)
        scope["generation"] = generation = await self._gateway.begin(request.ask)  # for the access line
        return partial(self._chat, generation, model, request.stream, request.ask.sampling)

    async def _chat(
        self, generation: Generation, model: str, how: Streaming | None, sampling: Sampling, send: Send
    ) -> None:
        logprobs = sampling.logprobs is not None
        token_bytes = self._gateway.tokenizer.token_bytes
        id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        with generation:
            opening = max(_scored_entries(prompt, sampling) for prompt in generation.prompts)
            if how is not None:
                prompts = [len(prompt) for prompt in generation.prompts]
                stream = ChatStream(id, created, model, prompts, generation.n, how, logprobs, token_bytes)
                await self._stream(send, generation, stream, opening)
                return
            choices = await gather(generation)
            cost = opening + sum(choice.entries for choice in choices)
            body = await self._gateway.in_thread(
                ENTRY_CHARS * cost, chat_answer, id, created, model, choices, logprobs, token_bytes
            )
            await _send_json(send, body)

    async def completions(self, body: bytes, scope: Scope) -> Respond:
        request = await self._read(body, read_completion)
        model = self._model(request.model)
        scope["generation"] = generation = await self._gateway.begin(request.ask)  # for the access line
        return partial(self._completions, generation, model, request.stream, request.ask.sampling, request.echo)

    async def _completions(
        self,
        generation: Generation,
        model: str,
        how: Streaming | None,
        sampling: Sampling,
        echo: bool,
        send: Send,
    ) -> None:
        logprobs = sampling.logprobs is not None
        token_bytes = self._gateway.tokenizer.token_bytes
        id, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        with generation:
            prompts, n = generation.prompts, generation.n
            openings = [_scored_entries(prompt, sampling) + (len(prompt) if echo else 0) for prompt in prompts]
            if how is not None:
                stream = CompletionStream(id, created, model, prompts, n, how, logprobs, echo, token_bytes)
                await self._stream(send, generation, stream, max(openings))
                return
            choices = await gather(generation)
            cost = n * sum(openings) + sum(choice.entries for choice in choices)
            body = await self._gateway.in_thread(
                ENTRY_CHARS * cost, completion_answer, id, created, model, prompts, choices, logprobs, echo, token_bytes
            )
            await _send_json(send, body)

    async def _stream(self, send: Send, generation: Generation, stream: EventStream, opening: int) -> None:
        """The status waits for the first tokens, so that what fails before them fails with its own status. What fails
        later is an error event, and the end. `opening`: the entries that open a choice."""
        started = False
        try:
            async for batches in generation:
                if not started:
                    started = True
                    await send(dict(STREAM_START))
                cost = ENTRY_CHARS * opening * sum(batch.first for batch in batches)
                if body := await self._gateway.in_thread(cost, stream.write, batches):
                    await _send_parts(send, body)
            await send({"type": "http.response.body", "body": stream.close(), "more_body": False})
        except Exception as error:
            if not started:
                raise
            await send({"type": "http.response.body", "body": data(answer_to(error).body), "more_body": False})

    async def tokenize(self, body: bytes, scope: Scope) -> Respond:
        request = await self._read(body, read_tokenize)
        self._model(request.model)
        param = "messages" if isinstance(request.prompt, Conversation) else "prompt"
        most = self._limits.tokens
        tokens = await self._gateway.encode(request.prompt, param, most)
        if len(tokens) > most:
            raise RequestError(f"{param} is {len(tokens)} tokens; at most {most} in one request", param)
        token_bytes = self._gateway.tokenizer.token_bytes if request.token_strs else None
        answer = await self._gateway.in_thread(
            len(tokens), tokenize_answer, tokens, self._gateway.max_model_len, token_bytes
        )
        return partial(_send_json, body=answer)

    async def detokenize(self, body: bytes, scope: Scope) -> Respond:
        most = self._gateway.max_model_len
        request = await self._gateway.in_thread(len(body) // 64, read_detokenize, body, most)
        self._model(request.model)
        decode = self._gateway.tokenizer.decode_bytes
        answer = await self._gateway.in_thread(len(request.tokens), detokenize_answer, request.tokens, decode)
        return partial(_send_json, body=answer)

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


ENTRY_CHARS = 8  # writing one log probability costs what encoding so many characters does


def _scored_entries(prompt: Sequence[int], sampling: Sampling) -> int:
    """Log probabilities that are told of a prompt."""
    return 0 if sampling.prompt_logprobs is None else len(prompt) * (sampling.prompt_logprobs + 1)


class _Departure:
    """While it watches, the task that serves a client is cancelled when that client leaves, whatever it is at: no more
    text is encoded, and jobs are aborted. The cancellation goes no further than the block."""

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
        """From now on: the body has been read, and the connection has only its end to tell."""
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


STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # else nginx holds tokens back
    ],
}


async def _send_parts(send: Send, body: bytes) -> None:
    for start in range(0, len(body), SEND_BYTES):
        await send({"type": "http.response.body", "body": body[start : start + SEND_BYTES], "more_body": True})
