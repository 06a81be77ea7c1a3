"""A server over the tiny tokenizer and a fake engine, and the official client on it: in process, or over a socket."""

import asyncio
import functools
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import httpx2
from openai import AsyncOpenAI
from starlette.types import ASGIApp

from redline import clock
from redline.api import app as app_module
from redline.api.config import ApiConfig, Limits, Sla
from redline.api.gateway.gateway import NO_TARGETS, Gateway
from redline.api.grammars.grammar_child import _INWARD, GrammarTrial, GrammarVerdict, verdict_of
from redline.api.http.server import Server, uvicorn_config
from redline.api.telemetry.metrics import Metrics
from redline.chat.template import K2_6
from redline.chat.tokenizer import Tokenizer
from redline.chat.vocabulary import grammar_tokens
from redline.media.rules import ImageRules
from tests.api.fake_engine import FakeEngine, Script, say
from tests.clocks import Timers
from tests.tiny_tokenizer import write_tiny_tokenizer
from tests.waiting import eventually

MODEL = "kimi-nano"
HOST = b"host: localhost\r\n"
SOON_S = 120.0  # timeout for operations that take milliseconds, on a busy machine
CALLS = (  # two calls, as the model writes them
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
    '{"city": "Rome"}<|tool_call_end|><|tool_call_begin|>functions.get:1<|tool_call_argument_begin|>'
    '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
)
PATIENT = Limits(grammar_seconds=600.0, body_seconds=600.0)  # long enough for a busy machine
UNREAD: list[socket.socket] = []  # sockets of clients that read nothing


def _tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.open(write_tiny_tokenizer(Path(folder)))


TOKENIZER = _tokenizer()
END = TOKENIZER.special("<|im_end|>")


def ids(text: str) -> list[int]:
    """The token IDs of a model's output: `<think>` and the like are control tokens."""
    return TOKENIZER.encode_with_specials(text)


def answer(text: str, thought: str = "", **how: Any) -> Script:
    return say(ids(f"{thought}</think>{text}<|im_end|>"), **how)


def named_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a whole stream, with their names."""
    found: list[tuple[str, dict[str, Any]]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@functools.cache
def _vocabulary(tokenizer: Tokenizer) -> tuple[Any, list[int]]:
    return grammar_tokens(tokenizer), [tokenizer.encode(chr(byte))[0] for byte in _INWARD]


class Here:
    """Tries grammars in this process, without limits: a process (`trials.Child`) takes 0.1 s of CPU to start."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def ask(self, trial: GrammarTrial) -> GrammarVerdict:
        await asyncio.sleep(0)
        return verdict_of(trial, *_vocabulary(self._tokenizer))

    def kill(self) -> None:
        pass

    async def ended(self) -> None:
        pass


_made: dict[tuple[str, Any], Any] = {}


def create_app(gateway: Gateway, config: ApiConfig) -> ASGIApp:
    """`api.app.create_app`, called once per configuration: building the OpenAPI document and its page takes 0.1 s."""

    def once(name: str) -> Callable[..., Any]:
        make, key = getattr(app_module, name), (repr(config), name)

        def kept(*given: Any, **named: Any) -> Any:
            if key not in _made:
                _made[key] = make(*given, **named)
            return _made[key]

        return kept

    with mock.patch.multiple(app_module, openapi=once("openapi"), page=once("page")):
        return app_module.create_app(gateway, config)


class World:
    """Everything between the client and the engine. `http` and `client` talk to it in process."""

    def __init__(
        self,
        script: Script,
        limits: Limits = PATIENT,
        max_model_len: int = 4096,
        *,
        resume_s: float = 0.0,
        clock: Callable[[], float] = clock.monotonic,
        targets: Mapping[str, Sla] = NO_TARGETS,
        replica: str = "",
        rules: ImageRules | None = None,
        **config: Any,
    ) -> None:
        """rules: None: the model reads no images."""
        self.engine = FakeEngine(script)
        self.metrics = Metrics(MODEL, itertools.count().__next__)  # each scrape is a new one
        self.gateway = Gateway(TOKENIZER, K2_6, self.metrics, limits, clock, resume_s, targets, replica, rules)
        self.link = self.engine.serve(self.gateway, max_model_len, image_tokens=0 if rules is None else max_model_len)
        self.config = ApiConfig(served_model_names=(MODEL, "alias"), limits=limits, **config)
        self.gateway.builder.grammars.trials._children = [Here(TOKENIZER), Here(TOKENIZER)]
        self.app: ASGIApp = create_app(self.gateway, self.config)
        kind = {"content-type": "application/json"}  # also for bodies that are given as bytes
        transport = httpx2.ASGITransport(self.app)
        self.http = httpx2.AsyncClient(transport=transport, base_url="http://redline", headers=kind)
        self.client = openai_client("http://redline", self.http)

    async def __aenter__(self) -> "World":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gateway.requests.check()
        self.gateway.close()
        await self.gateway.ended()
        await self.client.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The address of a real server on a loopback port; `timers` are those of the connections of `server`."""
        self.server, self.timers = timed_server(self.app, self.config.limits)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            task = asyncio.create_task(self.server.serve(sockets=[listener]))
            await eventually(lambda: self.server.started)
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                self.server.should_exit = True
                await task


def timed_server(app: ASGIApp, limits: Limits) -> tuple[Server, Timers]:
    """A server, and the timers of its connections, which run when a test advances them."""
    timers = Timers(asyncio.get_running_loop())
    config = uvicorn_config(app, limits, "127.0.0.1", 0)
    connection: Any = config.http
    config.http = lambda **given: connection(**given | {"_loop": timers})  # type: ignore[assignment]
    return Server(config), timers


def openai_client(base_url: str, http: httpx2.AsyncClient | None = None) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", http_client=http, max_retries=0)


def unread(port: int, data: bytes = b"") -> socket.socket:
    """The socket of a client that sends `data` and reads nothing; the caller closes it."""
    client = socket.socket()
    UNREAD.append(client)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(SOON_S)
    client.connect(("127.0.0.1", port))
    client.sendall(data)
    client.setblocking(False)
    return client


def asked(max_tokens: int | None = None, stream: bool = True, header: bytes = b"") -> bytes:
    """A chat request."""
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": stream, "max_tokens": max_tokens}
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\n" + HOST + header
    return head + b"content-length: %d\r\n\r\n" % len(data) + data


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
