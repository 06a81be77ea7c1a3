"""Streams are written in the loop iteration that delivers their tokens, with the same bytes as by the app's `send`."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from redline.api.ask import Ask
from redline.api.gateway.generation import ChoiceDelta, Generation
from redline.api.http.server import HttpConnection
from redline.errors import RequestError, WorkerLost
from redline.messages.delta import Delta
from redline.messages.job import Sampling
from tests.api.world import World, answer, asked, port_of
from tests.waiting import turns

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


class Client:
    """A connection that records the bytes written to it, and stops accepting on request."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.takes = True

    def write_part(self, body: bytes) -> bool:
        if self.takes:
            self.taken.append(body)
        return self.takes


def tokens_of(batches: list[ChoiceDelta]) -> bytes:
    return b"".join(b"%d:%d " % (batch.choice, batch.completion_tokens) for batch in batches)


class Pouring:
    """An answer that is written directly, past its first token."""

    def __init__(self, world: World, generation: Generation, client: Client) -> None:
        self.generation, self.client = generation, client
        self.world = world
        self.pour: Callable[[], Any] = lambda: asyncio.create_task(generation.pour(tokens_of))

    def come(self, *choices: int, **how: Any) -> Delta:
        """Deliver a token for each of these choices."""
        deltas = [Delta(job=self.generation.jobs[choice].id, tokens=(0x61,), **how) for choice in choices]
        self.world.gateway.monitor.receive(self.world.link, deltas)
        return deltas[-1]


@asynccontextmanager
async def pouring(n: int = 1) -> AsyncIterator[Pouring]:
    async with World(answer("a")) as world:
        world.engine.gate.clear()
        ask = Ask(prompts=("hello",), sampling=Sampling(max_tokens=100), n=n, param="prompt")
        with await world.gateway.begin(ask) as generation:
            client = generation.direct = Client()
            yield Pouring(world, generation, client)


async def test_what_comes_at_once_is_one_write_and_no_task_wakes() -> None:
    async with pouring(n=2) as one:
        task = one.pour()
        await turns()
        one.come(0, 1, 0)
        one.come(1)
        assert one.client.taken == [b"0:1 1:1 0:2 ", b"1:2 "]
        await turns()
        assert not task.done()
        task.cancel()


async def test_an_end_is_left_to_whoever_iterates_with_all_that_came_before() -> None:
    async with pouring() as one:
        task = one.pour()
        await turns()
        one.come(0)
        one.world.gateway.monitor.receive(
            one.world.link,
            [
                Delta(job=one.generation.jobs[0].id, tokens=(0x61,)),
                Delta(job=one.generation.jobs[0].id, tokens=(0x61,), finish="length"),
            ],
        )
        assert await task == b""
        assert one.client.taken == [b"0:1 "]
        assert tokens_of(await anext(one.generation)) == b"0:2 0:3 "
        with pytest.raises(StopAsyncIteration):
            await anext(one.generation)


async def test_what_a_client_does_not_take_is_handed_back() -> None:
    async with pouring() as one:
        task = one.pour()
        await turns()
        one.client.takes = False
        one.come(0)
        one.come(0)
        assert await task == b"0:1 "
        assert tokens_of(await anext(one.generation)) == b"0:2 "


async def test_a_lost_worker_ends_the_pouring() -> None:
    async with pouring() as one:
        task = one.pour()
        await turns()
        one.world.gateway.monitor.mark_down(one.world.link, "gone")
        assert await task == b""
        with pytest.raises(WorkerLost):
            await anext(one.generation)
        assert await one.generation.pour(tokens_of) == b""


async def test_an_error_while_it_pours_ends_this_answer_and_no_other() -> None:
    async with pouring() as one:
        task = one.pour()
        await turns()
        one.world.gateway.monitor.receive(one.world.link, [Delta(job=one.generation.jobs[0].id, tokens=(999_999,))])
        with pytest.raises(RequestError, match="999999"):
            await task


async def test_nothing_is_poured_without_a_connection_or_over_what_waits() -> None:
    async with pouring() as one:
        one.come(0)
        assert await one.generation.pour(tokens_of) == b""
        await anext(one.generation)
        one.generation.direct = None
        assert await one.generation.pour(tokens_of) == b""
        assert one.client.taken == []


async def raw_stream(address: str) -> bytes:
    """All bytes of a streamed answer, without the parts that differ between answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
    writer.write(asked(header=b"connection: close\r\n"))
    data = await reader.read()
    writer.close()
    return re.sub(rb"chatcmpl-[0-9a-f]{32}|created\":\d+|x-request-id: \w+|date: [^\r]+", b"", data)


async def test_the_bytes_are_those_of_the_apps_own_send(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "hello the <|tool_calls_section_begin|> and é🙂 functions"
    async with World(answer(text, thought="hello the")) as world, world.listening() as address:
        poured = await raw_stream(address)
        monkeypatch.setattr("redline.api.http.server.HttpConnection.write_part", lambda *_: False)
        assert await raw_stream(address) == poured
        assert poured.count(b"\r\ndata: ") > 5


async def test_a_stream_on_a_socket_is_poured(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[bytes] = []
    write = HttpConnection.write_part

    def written(self: HttpConnection, body: bytes) -> bool:
        parts.append(body)
        return write(self, body)

    monkeypatch.setattr(HttpConnection, "write_part", written)
    async with World(answer("hello the and functions")) as world, world.listening() as address:
        data = await raw_stream(address)
    assert len(parts) >= 3
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
