"""A stream that was silent for a while sends keepalives, which the clients of its dialect ignore."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from starlette.types import Message

from redline.api.config import Limits
from redline.api.handlers import KEEPALIVE_S, REFUSAL_S
from redline.messages.delta import Delta
from tests.api.sockets import ASYNCIO, Client, serving
from tests.api.test_anthropic import client_of
from tests.api.world import HOST, World, answer, ids, named_events
from tests.clocks import FakeClock
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio
HI: Any = [{"role": "user", "content": "hi"}]
COMMENT = b": keepalive\n\n"
DIALECTS: dict[str, tuple[dict[str, Any], bytes]] = {
    "/v1/chat/completions": ({"messages": HI}, COMMENT),
    "/v1/completions": ({"prompt": "hi"}, COMMENT),
    "/v1/messages": ({"messages": HI, "max_tokens": 90}, b'event: ping\ndata: {"type":"ping"}\n\n'),
    "/v1/responses": ({"input": "hi"}, b'event: keepalive\ndata: {"type":"keepalive","sequence_number":'),
}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ASYNCIO


@pytest.fixture
async def clock() -> AsyncIterator[FakeClock]:
    with FakeClock().drives(asyncio.get_running_loop()) as clock:
        yield clock


@pytest.fixture(params=[True, False], ids=["poured", "by the task"])
def poured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are written in both ways: directly, and by the request's task."""
    if not request.param:
        monkeypatch.setattr("redline.api.http.server.HttpConnection.write_part", lambda *_: False)


class Stream:
    """A streamed answer of a `World`; its engine sends nothing by itself."""

    def __init__(self, world: World, port: int, clock: FakeClock, path: str, **fields: Any) -> None:
        self._world, self._clock = world, clock
        body, self.keepalive = DIALECTS[path]
        data = json.dumps(body | {"stream": True} | fields).encode()
        world.engine.gate.clear()
        self.client = Client(port)
        head = b"POST %b HTTP/1.1\r\nconnection: close\r\ncontent-type: application/json\r\n" % path.encode()
        self.client.say(head + HOST + b"content-length: %d\r\n\r\n" % len(data) + data)

    async def begun(self) -> None:
        """Wait until the head has arrived."""
        await eventually(lambda: self._world.engine.jobs)
        await turns(20)
        self._clock.advance(REFUSAL_S)
        await self.client.until(b"\r\n\r\n")
        await turns(20)
        self.count = self.kept

    async def passes(self, seconds: float) -> None:
        """Let `seconds` pass, and run what is due."""
        self._clock.advance(seconds)
        await turns(20)

    async def come(self, text: str) -> None:
        """Deliver the tokens of `text`, and wait until their output is written."""
        job = self._world.engine.jobs[0].id
        self._world.gateway.monitor.receive(self._world.link, [Delta(job=job, tokens=(token,)) for token in ids(text)])
        await turns(20)

    @property
    def kept(self) -> int:
        """The number of keepalives received."""
        return self.client.look().count(self.keepalive)

    @property
    def came(self) -> int:
        """The number of keepalives received since the head."""
        return self.kept - self.count


def streamed(got: bytes) -> str:
    """The body of a whole chunked answer."""
    body, whole = got.partition(b"\r\n\r\n")[2], b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        whole, body = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return whole.decode()


class Served(NamedTuple):
    world: World
    port: int
    clock: FakeClock
    streams: list[Stream]  # those that have begun

    async def begin(self, path: str, **fields: Any) -> Stream:
        stream = Stream(self.world, self.port, self.clock, path, **fields)
        self.streams.append(stream)
        await stream.begun()
        return stream


@pytest.fixture
async def served(clock: FakeClock) -> AsyncIterator[Served]:
    async with World(answer("hello")) as world, serving(world.app, Limits(), clock) as (port, _):
        yield (served := Served(world, port, clock, []))
        for stream in served.streams:
            stream.client.socket.close()


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.usefixtures("poured")
async def test_a_request_that_waits_has_a_keepalive_again_and_again(served: Served, path: str) -> None:
    stream = await served.begin(path)
    for count in range(3):
        await stream.passes(KEEPALIVE_S - 1)
        assert stream.came == count
        await stream.passes(1)
        await eventually(lambda count=count: stream.came == count + 1)
    served.world.engine.gate.set()
    whole = streamed(await stream.client.rest())
    if stream.keepalive == COMMENT:
        assert [line for line in whole.split("\n") if line and not line.startswith("data: ")] == [": keepalive"] * 3
        assert whole.endswith("data: [DONE]\n\n")
        return
    events = named_events(whole)
    assert all(name == data["type"] for name, data in events)
    assert events[-1][0] in ("message_stop", "response.completed")
    if path == "/v1/responses":
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))


CALL = "<|tool_calls_section_begin|><|tool_call_begin|>"
HIDDEN = [
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}, "th"),
    ("/v1/messages", {"stop_sequences": ["a" * 99]}, "</think>"),
    ("/v1/chat/completions", {"include_reasoning": False}, "th"),
    ("/v1/chat/completions", {"stop": ["a" * 99]}, "</think>"),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "a"}}]}, f"</think>{CALL}"),
    ("/v1/responses", {"tools": [{"type": "function", "name": "a"}]}, f"</think>{CALL}"),
    ("/v1/completions", {"stop": ["a" * 99]}, "th"),
]


@pytest.mark.parametrize(("path", "fields", "opening"), HIDDEN)
@pytest.mark.usefixtures("poured")
async def test_tokens_that_are_not_shown_do_not_break_the_silence(
    served: Served, path: str, fields: dict[str, Any], opening: str
) -> None:
    stream = await served.begin(path, **fields)
    await stream.come(opening)
    await stream.come("a")
    for count in range(2):
        for _ in range(int(KEEPALIVE_S) - 1):
            await stream.come("a")
            await stream.passes(1)
        assert stream.came == count
        await stream.come("a")
        await stream.passes(1)
        await eventually(lambda count=count: stream.came == count + 1)


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.usefixtures("poured")
async def test_a_stream_that_shows_tokens_has_no_keepalive(served: Served, path: str) -> None:
    stream = await served.begin(path)
    for _ in range(12):
        await stream.passes(KEEPALIVE_S / 2)
        await stream.come("a")
    await stream.passes(KEEPALIVE_S / 2)
    assert stream.came == 0
    await stream.passes(KEEPALIVE_S / 2)
    await eventually(lambda: stream.came == 1)


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_silent_answer_that_fails_still_has_its_error(served: Served, path: str) -> None:
    stream = await served.begin(path)
    await stream.passes(KEEPALIVE_S)
    served.world.gateway.monitor.mark_down(served.world.link, "gone")
    whole = streamed(await stream.client.rest())
    assert stream.came == 1
    assert "the worker that ran this request went down" in whole.rstrip().rpartition("\n\n")[2]


async def test_a_client_that_takes_nothing_is_sent_one_keepalive(clock: FakeClock) -> None:
    taken: list[Message] = []
    takes = asyncio.Event()

    async def send(message: Message) -> None:
        taken.append(message)
        if len(taken) > 1:
            await takes.wait()

    body = json.dumps({"messages": HI, "stream": True}).encode()
    asked: list[Message] = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        return asked.pop() if asked else await asyncio.get_running_loop().create_future()

    async with World(answer("hello")) as world:
        world.engine.gate.clear()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        task = asyncio.create_task(world.app(scope, receive, send))
        await eventually(lambda: world.engine.jobs)
        for _ in range(20):
            clock.advance(KEEPALIVE_S)
            await turns(20)
        assert [message.get("body") for message in taken] == [None, COMMENT]
        world.engine.gate.set()
        takes.set()
        await task
        assert sum(message.get("body") == COMMENT for message in taken) == 1


async def test_clients_pass_over_keepalives(clock: FakeClock) -> None:
    seen: list[str] = []
    async with World(answer("hello")) as world, client_of(world) as anthropic:
        world.engine.gate.clear()

        async def chat() -> str:
            stream = await world.client.chat.completions.create(model="alias", messages=HI, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def respond() -> str:
            async with world.client.responses.stream(model="alias", input="hi") as stream:
                seen.extend([event.type async for event in stream])
                return (await stream.get_final_response()).output_text

        async def message() -> str:
            async with anthropic.messages.stream(model="alias", max_tokens=99, messages=HI) as stream:
                return await stream.get_final_text()

        tasks = [asyncio.create_task(each()) for each in (chat, respond, message)]
        await eventually(lambda: len(world.engine.jobs) == len(tasks))
        await turns(20)
        for _ in range(3):
            clock.advance(KEEPALIVE_S)
            await turns(20)
        world.engine.gate.set()
        assert await asyncio.gather(*tasks) == ["hello"] * len(tasks)
    assert "keepalive" in seen
