"""TLS: connections are counted and limited from the first byte, and carry the same HTTP."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from redline.api.config import Limits
from tests.api.sockets import ASYNCIO, GET, UVLOOP, Client, Hello, certificate, error_of, serving
from tests.api.test_budget import HELD, Crowd, Watched
from tests.clocks import FakeClock
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio


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


async def test_silent_connections_make_room_before_their_handshake(clock: FakeClock, tls: Given) -> None:
    files, context = tls
    connections = Watched(Limits(connections=20))
    crowd = Crowd(connections)
    async with serving(Hello(), Limits(), clock, files, connections) as (port, server):
        await crowd.grow(60, port)
        assert connections.count == 20
        await eventually(lambda: crowd.open() == crowd.clients[-20:])
        assert len(server.server_state.connections) == 20
        with Client(port, context) as client:
            await client.shake()
            assert (await client.say(GET).until(b"hello")).startswith(b"HTTP/1.1 200")
        for silent in crowd.clients:
            silent.socket.close()
        await eventually(lambda: connections.count == 0)


@pytest.mark.parametrize("anyio_backend", [ASYNCIO], ids=["asyncio"])
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], ids=["nothing", "a part"])
async def test_a_handshake_has_the_time_of_a_head(clock: FakeClock, tls: Given, said: bytes) -> None:
    async with serving(Hello(), Limits(header_seconds=10), clock, tls[0]) as (port, server):
        with Client(port) as silent:
            silent.say(said)
            await eventually(lambda: server.server_state.connections)
            clock.advance(9)
            await turns(20)
            assert not silent.look()
            assert not silent.ended
            clock.advance(1)
            assert await silent.rest() == b""
        await eventually(lambda: not server.server_state.connections)


@pytest.mark.parametrize("anyio_backend", [ASYNCIO], ids=["asyncio"])
async def test_after_the_handshake_a_head_is_owed_anew(clock: FakeClock, tls: Given) -> None:
    files, context = tls
    async with serving(Hello(), Limits(header_seconds=10), clock, files) as (port, server):
        with Client(port, context) as client:
            (connection,) = await eventually(lambda: list(server.server_state.connections))
            clock.advance(9)
            await client.shake()
            await eventually(lambda: connection.flow)  # the handshake is done
            client.say(GET[:9])
            clock.advance(9)
            await turns(20)
            client.look()
            assert not client.ended
            clock.advance(1)
            assert error_of(await client.rest()) == (408, "timeout")


async def test_what_does_not_speak_tls_is_closed(clock: FakeClock, tls: Given) -> None:
    async with serving(Hello(), Limits(), clock, tls[0]) as (port, server):
        with Client(port) as client:
            await client.say(GET).rest()
        with Client(port) as client:
            await client.say(b"\x16\x03\x01\x02\x00\x01").end().rest()
        await eventually(lambda: not server.server_state.connections)


async def test_at_the_most_connections_a_tls_client_is_told(clock: FakeClock, tls: Given) -> None:
    files, context = tls
    app = Hello()
    async with serving(app, Limits(connections=1), clock, files) as (port, _):
        with Client(port, context) as held:
            await held.shake()
            held.say(HELD)
            await eventually(lambda: app.begun)
            with Client(port, context) as late:
                await late.shake()
                assert error_of(await late.rest()) == (503, "overloaded")
            app.gate.set()
            await held.until(b"hello")


SIZE = 3 << 20


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = b""
    while True:
        message: Any = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    for at in range(0, SIZE, SIZE // 10):
        part = body[at : at + SIZE // 10]
        await send({"type": "http.response.body", "body": part, "more_body": at + SIZE // 10 < SIZE})


async def test_megabytes_travel_both_ways(clock: FakeClock, tls: Given) -> None:
    """More than one iteration reads, and more than the kernel buffers."""
    files, context = tls
    body = bytes(range(256)) * (SIZE // 256)
    async with serving(echo, Limits(), clock, files) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
        writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % SIZE + body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(SIZE) == body
        writer.transport.abort()


async def test_a_pooled_connection_is_used_again_and_closed_with_a_word(clock: FakeClock, tls: Given) -> None:
    files, context = tls
    async with serving(Hello(), Limits(), clock, files) as (port, _):
        with Client(port, context) as client:
            await client.shake()
            for count in range(3):
                client.say(GET)
                await eventually(lambda count=count: client.look().count(b"hello") == count + 1)
            client.say(GET.replace(b"HTTP/1.1", b"HTTP/1.0"))
            assert (await client.rest()).count(b"hello") == 4
            assert client.was_told


def test_a_key_of_another_certificate_is_refused(tls: Given, tmp_path: Path) -> None:
    from redline.api.http.tls import server_context

    other, _ = certificate(tmp_path)
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        server_context(tls[0][0], other[1])
    with pytest.raises(OSError, match="No such file"):
        server_context(str(tmp_path / "none.pem"), other[1])
