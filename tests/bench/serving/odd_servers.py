"""Loopback servers for the tests of the HTTP client, which write exactly the bytes that a test passes."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from redline.bench.serving.client import LoadClient
from redline.bench.serving.records import LoadRequest, TimedAnswer
from redline.bench.serving.target import Patience, ServerTarget
from tests.clocks import FakeClock
from tests.waiting import turns

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
IDLE_S = 0.02  # seconds without an event after which an event loop with sockets counts as idle
HI = LoadRequest(max_tokens=4, text="hi")

Reply = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def event(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> bytes:
    """One event of a chat's stream. fields: further fields of the event; `choices` replaces the default choice."""
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return b"data: " + msgspec.json.encode({"choices": [choice], **fields}) + b"\n\n"


def said(*texts: str) -> bytes:
    """A whole stream: a role, these texts, a finish_reason, usage and the end."""
    usage = {"prompt_tokens": 3, "completion_tokens": len(texts)}
    parts = [event({"role": "assistant", "content": ""}), *(event({"content": text}) for text in texts)]
    return b"".join((*parts, event(finish="stop"), event(choices=[], usage=usage), DONE))


def chunk(data: bytes) -> bytes:
    """The data as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    """A response with a Content-Length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def serving(reply: Reply, context: ssl.SSLContext | None = None) -> AsyncGenerator[tuple[int, list[bytes]]]:
    """A server that answers each request with `reply`, which may close the connection.

    Yields its port, and the list of requests received: head and body.
    """
    requests: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
                requests.append(head + body)
                await reply(requests[-1], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1], requests
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await turns(3)


def target(port: int, **fields: Any) -> ServerTarget:
    """A chat target."""
    usual = ServerTarget(
        base_url=f"http://127.0.0.1:{port}", model="m", patience=Patience(connect=60, first=60, silence=60, whole=120)
    )
    return msgspec.structs.replace(usual, **fields)


async def answer_to(*parts: bytes, close: bool = False, pause: float = 0.0, **fields: Any) -> TimedAnswer:
    """The client's answer to a response of these parts, each written separately, with a clock that jumps ahead
    whenever the event loop is idle. close: close the connection afterwards. pause: seconds after each part."""

    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
        if close:
            writer.close()

    clock = FakeClock()
    with clock.installed(), clock.jumps(asyncio.get_running_loop(), IDLE_S):
        async with serving(reply) as (port, _), LoadClient(target(port, **fields)) as client:
            return await client.ask(HI)
