"""A client that half-closes after a whole request gets its answer; one that has disconnected is still noticed."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator

import pytest

from redline.api.config import Limits
from redline.api.http.server import PROBE_S
from tests.api.sockets import ASYNCIO, UVLOOP, Client, Hello, certificate, serving
from tests.api.test_budget import HELD
from tests.api.world import World, answer, asked
from tests.clocks import FakeClock
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PLAIN, FIN, NOTIFY = "plain", "TLS, no close_notify", "TLS, close_notify"


@pytest.fixture(params=[ASYNCIO, UVLOOP], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return request.param


@pytest.fixture
async def clock(anyio_backend: tuple[str, dict[str, bool]]) -> AsyncIterator[FakeClock]:
    clock = FakeClock()
    if anyio_backend == UVLOOP:
        yield clock
    else:
        with clock.drives(asyncio.get_running_loop()):
            yield clock


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, str], ssl.SSLContext]:
    return certificate(tmp_path_factory.mktemp("tls"))


Given = tuple[tuple[str, str], ssl.SSLContext]


async def connect(port: int, how: str, tls: Given) -> Client:
    if how == PLAIN:
        return Client(port)
    client = Client(port, tls[1])
    await client.shake()
    return client


def end(client: Client, how: str) -> None:
    if how == NOTIFY:
        client.notify()
    client.end()


@pytest.mark.parametrize("how", [PLAIN, FIN, NOTIFY])
async def test_a_half_closed_client_gets_its_whole_answer(how: str, clock: FakeClock, tls: Given) -> None:
    app = Hello()
    async with serving(app, Limits(), clock, None if how == PLAIN else tls[0]) as (port, _):
        with await connect(port, how, tls) as client:
            client.say(HELD)
            end(client, how)
            assert await client.until(CONTINUE) == CONTINUE  # the half-close was noticed, and is not a disconnect
            app.gate.set()
            got = await client.rest()
    head, body = got.removeprefix(CONTINUE).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in head
    assert body == b"hello"


@pytest.mark.parametrize("how", [PLAIN, FIN, NOTIFY])
@pytest.mark.parametrize("begun", [False, True], ids=["before it begins", "while it runs"])
async def test_a_half_closed_client_gets_its_whole_stream(how: str, begun: bool, clock: FakeClock, tls: Given) -> None:
    async with World(answer("a" * 40)) as world:
        world.engine.gate.clear()
        async with serving(world.app, Limits(), clock, None if how == PLAIN else tls[0]) as (port, _):
            with await connect(port, how, tls) as client:
                client.say(asked())
                await eventually(lambda: world.engine.jobs)
                if begun:
                    world.engine.gate.set()
                    await client.until(b'"content":"a')
                    world.engine.gate.clear()
                end(client, how)
                if not begun:
                    await client.until(CONTINUE)
                world.engine.gate.set()
                got = await client.rest()
        assert not world.engine.aborted
    assert got.count(b'"content":"a') == 40
    assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_half_closed_client_of_http_1_0_gets_its_whole_stream_unframed(clock: FakeClock) -> None:
    async with World(answer("a" * 40)) as world, serving(world.app, Limits(), clock) as (port, _):
        world.engine.gate.clear()
        with Client(port) as client:
            client.say(asked().replace(b"HTTP/1.1", b"HTTP/1.0"))
            await eventually(lambda: world.engine.jobs)
            world.engine.gate.set()
            await client.until(b'"content":"a')
            world.engine.gate.clear()
            client.end()
            await client.until(b"\n\n:\n\n")  # a comment, unframed
            world.engine.gate.set()
            got = await client.rest()
    assert b"transfer-encoding" not in got
    assert got.count(b'"content":"a') == 40
    assert got.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("how", [PLAIN, FIN, NOTIFY])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_has_closed_is_noticed_at_once(
    how: str, stream: bool, clock: FakeClock, tls: Given
) -> None:
    async with World(answer("a" * 4000)) as world:
        world.engine.gate.clear()
        async with serving(world.app, Limits(), clock, None if how == PLAIN else tls[0]) as (port, server):
            with await connect(port, how, tls) as client:
                client.say(asked(stream=stream))
                await eventually(lambda: world.engine.jobs)
                if how == NOTIFY:
                    client.notify()
            await eventually(lambda: world.engine.aborted)
            await eventually(lambda: not server.server_state.connections)


async def test_a_reset_is_noticed_at_once(clock: FakeClock) -> None:
    app = Hello()
    async with serving(app, Limits(), clock) as (port, _):
        for half in (False, True):
            with Client(port) as client:
                client.say(HELD)
                if half:
                    await client.end().until(CONTINUE)
                await eventually(lambda half=half: app.begun == 1 + half)
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await eventually(lambda half=half: app.left == 1 + half)


@pytest.mark.parametrize("anyio_backend", [ASYNCIO], ids=["asyncio"])
async def test_who_closes_after_half_closing_is_noticed_by_the_next_probe(clock: FakeClock) -> None:
    """Its system sends nothing on close: FIN has been sent already."""
    app = Hello()
    async with serving(app, Limits(), clock) as (port, server):
        with Client(port) as client:
            client.say(HELD).end()
            await client.until(CONTINUE)
            clock.advance(PROBE_S)
            await client.until(CONTINUE * 2)
        await turns(20)
        assert not app.left
        clock.advance(PROBE_S)
        await eventually(lambda: app.left)
        await eventually(lambda: not server.server_state.connections)


@pytest.mark.parametrize("anyio_backend", [ASYNCIO], ids=["asyncio"])
async def test_a_stream_that_says_nothing_is_probed_by_a_comment(clock: FakeClock) -> None:
    async with World(answer("a" * 40)) as world, serving(world.app, Limits(), clock) as (port, _):
        with Client(port) as client:
            client.say(asked(max_tokens=30))
            await client.until(b'"content":"a')
            world.engine.gate.clear()
            client.end()
            await client.until(b"3\r\n:\n\n\r\n")
        clock.advance(PROBE_S)
        await eventually(lambda: world.engine.aborted)


async def test_http_1_0_is_sent_no_interim_answer(clock: FakeClock) -> None:
    app = Hello()
    async with serving(app, Limits(), clock) as (port, server):
        with Client(port) as client:
            client.say(HELD.replace(b"HTTP/1.1", b"HTTP/1.0")).end()
            await eventually(lambda: app.begun)
            (connection,) = server.server_state.connections
            await eventually(lambda: not connection.cycle.keep_alive)
            await turns(20)
            app.gate.set()
            assert (await client.rest()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("said", [b"", HELD[:20], b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{"])
async def test_a_request_that_can_never_be_whole_is_closed(said: bytes, clock: FakeClock) -> None:
    async with serving(Hello(), Limits(), clock) as (port, server):
        with Client(port) as client:
            assert await client.say(said).end().rest() == b""
        await eventually(lambda: not server.server_state.connections)
