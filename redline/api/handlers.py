"""The handlers of the routes with the bodies of those that serve no API format, and whole and streamed responses."""

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from redline import __version__, clock
from redline.api.anthropic.events import count_answer
from redline.api.anthropic.requests import read_count
from redline.api.ask import Prompt
from redline.api.auth.auth_state import AuthState
from redline.api.body import Count, ResponseBody, encode
from redline.api.config import ApiConfig, Defaults, Limits
from redline.api.dialect import A, Dialect, EventStream, Reply
from redline.api.errors import WholeResponse
from redline.api.gateway.gateway import Gateway
from redline.api.gateway.generation import Generation
from redline.api.openai.answers import (
    detokenize_answer,
    gather,
    tokenize_answer,
    tokenizer_info,
)
from redline.api.openai.requests import read_detokenize, read_tokenize
from redline.api.openapi.page import PAGE_HEADERS
from redline.api.paging import page_limit
from redline.api.responses.events import count_input
from redline.api.responses.requests import ResponsesRequest, read_input_tokens
from redline.api.telemetry import metrics
from redline.api.telemetry.request_span import RequestSpan
from redline.chat.conversation import Conversation
from redline.errors import ModelNotFound, RequestError

SHOWN_TYPES = 16  # dropped tool types named in the warning header
WARNING = "x-redline-warning"
NO_HEADERS: Mapping[str, str] = MappingProxyType({})

log = logging.getLogger("redline.api")

T = TypeVar("T")
Respond = Callable[[Send], Awaitable[None]]

MOST_MODELS = 1000  # page size of the list of models


class ServerVersion(ResponseBody, kw_only=True):
    """The body of /version."""

    name: Literal["redline"] = "redline"
    version: str = __version__
    models: tuple[str, ...]
    routes: list[str]


class ServerLive(ResponseBody):
    """The body of /live."""

    status: Literal["live"] = "live"


class ServerReady(ResponseBody):
    """The body of /health if the server is ready."""

    status: Literal["ready"] = "ready"


class ServerUnready(ResponseBody):
    """The body of /health if it is not."""

    status: Literal["loading", "worker lost", "draining", "stalled"]
    reason: str | UnsetType = UNSET


class ServerLoad(ResponseBody):
    """The body of vLLM's /load."""

    server_load: Count


class ModelCard(ResponseBody, kw_only=True):
    """A model in OpenAI's format and in Anthropic's, with vLLM's `max_model_len` and Moonshot's `supports_image_in`."""

    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "redline"
    max_model_len: Count | None
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: Count | None
    max_tokens: Count | None
    supports_image_in: bool


class ModelPage(ResponseBody, kw_only=True):
    """A list of models in both formats."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Handlers:
    """The handlers of the routes."""

    def __init__(
        self,
        gateway: Gateway,
        config: ApiConfig,
        edge: AuthState,
        scrape: Callable[[], Awaitable[bytes]] | None,
        of_responses: Dialect[ResponsesRequest],
        routes: list[str],
        document: Mapping[str, Any],
        page: str,
    ) -> None:
        """routes: as /version lists them. document, page: of /openapi.json and /docs."""
        self._gateway = gateway
        self._edge = edge
        self._scrape = scrape
        self._limits = config.limits
        self._defaults = config.defaults
        self._names = config.served_model_names
        self._created = int(clock.now())
        self._responses = of_responses
        self._routes = routes
        self._document, self._page = encode(document), page

    async def version(self, request: Request) -> ServerVersion:
        """Name, version and routes of this server."""
        return ServerVersion(models=self._names, routes=self._routes)

    async def live(self, request: Request) -> ServerLive:
        """Always 200: this process is alive. `health` reports on the model."""
        return ServerLive()

    @property
    def unready(self) -> ServerUnready | None:
        """Why the server is not ready, for `health`: the model is loading or stalled, the server drains, or its
        worker is down. None: it is ready."""
        if self._gateway.ready is None:
            return ServerUnready("worker lost" if self._gateway.workers.lost else "loading")
        if self._edge.draining is not None:
            return ServerUnready("draining", self._edge.draining)
        if (trouble := self._gateway.workers.trouble) is not None:
            return ServerUnready("stalled", trouble)
        return None

    async def health(self, request: Request) -> Response:
        """200 while the model is ready, else 503 with the reason."""
        why_not = self.unready
        return json_response(ServerReady()) if why_not is None else json_response(why_not, 503)

    async def metrics(self, request: Request) -> Response:
        text = self._gateway.metrics.expose() if self._scrape is None else await self._scrape()
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def load(self, request: Request) -> ServerLoad:
        """vLLM's /load: the number of running and waiting requests."""
        return ServerLoad(self._gateway.requests.requests + self._gateway.peers.load)

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html", headers=PAGE_HEADERS)

    async def models(self, request: Request) -> ModelPage:
        """The list of models in OpenAI's and Anthropic's format combined. ?limit, ?after_id, ?before_id: paging, as
        Anthropic's clients use it."""
        query = request.query_params
        begin = 1 + self._place(after, "after_id") if (after := query.get("after_id")) else 0
        end = self._place(before, "before_id") if (before := query.get("before_id")) else len(self._names)
        names, limit = self._names[begin:end], page_limit(query.get("limit"), MOST_MODELS, MOST_MODELS)
        some = names[-limit:] if before else names[:limit]
        return ModelPage(
            data=[self._card(name) for name in some],
            has_more=len(some) < len(names),
            first_id=some[0] if some else None,
            last_id=some[-1] if some else None,
        )

    async def one_model(self, request: Request) -> ModelCard:
        return self._card(self._model(request.path_params["id"]))

    def _place(self, name: str, param: str) -> int:
        if name not in self._names:
            raise RequestError(f"{param} is {name[:100]!a}, which is not a served model", param)
        return self._names.index(name)

    def _card(self, name: str) -> ModelCard:
        ready = self._gateway.ready
        length = ready.max_model_len if ready else None
        allowed = [tokens for tokens in (length, self._limits.most_max_tokens) if tokens is not None]
        return ModelCard(
            id=name,
            created=self._created,
            max_model_len=length,
            display_name=name,
            created_at=clock.strftime("%Y-%m-%dT%H:%M:%SZ", clock.gmtime(self._created)),
            max_input_tokens=length,
            max_tokens=min(allowed, default=None),
            supports_image_in=self._limits.images > 0,
        )

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
            await send_json(send, body, headers)

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
        return partial(send_json, body=answer)

    async def count_tokens(self, body: bytes, scope: Scope) -> Respond:
        """Anthropic's count_tokens: the number of tokens of a message's prompt."""
        request = await self._read(body, read_count)
        self._model(request.model)
        return partial(send_json, body=count_answer(len(await self._encoded(request.conversation, "messages"))))

    async def count_input_tokens(self, body: bytes, scope: Scope) -> Respond:
        """OpenAI's input_tokens: the number of tokens of a response's input."""
        asked = await self._read(body, read_input_tokens)
        self._model(asked.model)
        if self._responses.recall is not None:
            asked = await self._responses.recall(asked)
        [prompt] = asked.ask.prompts
        tokens = await self._encoded(prompt, "input")
        return partial(send_json, body=count_input(len(tokens)), headers=_warning(asked.left_out))

    async def _encoded(self, prompt: Prompt, param: str) -> Sequence[int]:
        """Token ids of a prompt. Raises RequestError for more tokens than a request may have."""
        most = self._limits.tokens
        prompt = await self._gateway.pictures.decoded(prompt, hold=False)
        tokens = (await self._gateway.encoder.encode(prompt, param, most)).tokens
        if len(tokens) > most:
            raise RequestError(f"{param} is {len(tokens)} tokens; at most {most} in one request", param)
        return tokens

    async def detokenize(self, body: bytes, scope: Scope) -> Respond:
        most = self._gateway.max_model_len
        request = await self._gateway.encoder.in_thread(len(body) // 64, read_detokenize, body, most)
        self._model(request.model)
        decode = self._gateway.encoder.tokenizer.decode_bytes
        answer = await self._gateway.encoder.in_thread(len(request.tokens), detokenize_answer, request.tokens, decode)
        return partial(send_json, body=answer)

    async def _read(self, body: bytes, read: Callable[[bytes, Limits, Defaults], T]) -> T:
        """Parse a body; large ones in a thread: parsing JSON takes about a 64th of the time of encoding its text."""
        return await self._gateway.encoder.in_thread(len(body) // 64, read, body, self._limits, self._defaults)

    def _model(self, asked: str | None) -> str:
        """The model name for the response. Raises ModelNotFound for a name that is not served."""
        if asked is not None and asked not in self._names:
            raise ModelNotFound(f"the model {asked} does not exist; served: {', '.join(self._names)}", "model")
        return asked or self._names[0]


def json_response(body: Any, status: int = 200) -> Response:
    """A whole response in JSON."""
    return Response(encode(body), status, media_type="application/json")


ENTRY_CHARS = 8  # writing one logprob takes as long as encoding this number of characters


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


SEND_BYTES = 1 << 20  # larger bodies are sent in parts, so that the event loop serves others in between


async def send_whole(send: Send, answer: WholeResponse) -> None:
    headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer.body))]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    for start in range(0, len(answer.body), SEND_BYTES):
        part = answer.body[start : start + SEND_BYTES]
        more = start + SEND_BYTES < len(answer.body)
        await send({"type": "http.response.body", "body": part, "more_body": more})


async def send_json(send: Send, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> None:
    await send_whole(send, WholeResponse(200, body, dict(headers)))


def _warning(left_out: Sequence[str]) -> dict[str, str]:
    """The header that names the dropped tool and item types, restricted to plain characters."""
    types = [re.sub("[^A-Za-z0-9_.-]", "?", one[:64]) for one in left_out[:SHOWN_TYPES]]
    more = ["..."] if len(left_out) > SHOWN_TYPES else []
    return {WARNING: f"ignored, since only function tools are supported: {', '.join(types + more)}"} if types else {}
