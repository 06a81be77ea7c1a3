"""Limits of connections: sizes of headers and trailers, timeouts, their number, and clients that do not read."""

import asyncio
import fcntl
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from starlette.types import Receive, Scope, Send

from redline.api.config import Limits
from redline.api.http.budget import Connections
from redline.api.http.server import LINGER_S, HttpConnection, Server
from redline.api.http.turns import READS, REQUEST
from redline.limits import open_files
from redline.messages.delta import Delta
from redline.messages.job import Job
from tests.api.world import HOST, SOON_S, UNREAD, World, answer, asked, port_of, timed_server, unread
from tests.clocks import Timers
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio
SIOCOUTQ = 0x5411  # linux/sockios.h: unsent and unacknowledged bytes in a socket's send queue


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}  # the event loop that `redline serve` uses


class App:
    """Answers `pieces` pieces of `size` bytes (one piece at /short), and counts requests and disconnects."""

    def __init__(self, size: int = 2, pieces: int = 1) -> None:
        self._size, self._pieces = size, pieces
        self.requests = 0
        self.left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests += 1
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            self.left += 1
            return
        pieces = 1 if scope["path"] == "/short" else self._pieces
        headers = [(b"content-length", b"%d" % (self._size * pieces))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for place in range(pieces):
            more = place + 1 < pieces
            await send({"type": "http.response.body", "body": b"x" * self._size, "more_body": more})
        self.left += (await receive())["type"] == "http.disconnect"


@asynccontextmanager
async def serving(app: Any, limits: Limits) -> AsyncIterator[tuple[int, "Serving"]]:
    """A port, and the server that listens on it."""
    server, timers = timed_server(app, limits)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        try:
            yield listener.getsockname()[1], Serving(server, timers)
        finally:
            server.should_exit = True
            server.abort()
            await task


def connections_of(server: Server) -> set[HttpConnection]:
    return server.server_state.connections  # type: ignore[return-value]


class Serving(NamedTuple):
    """A server, and the timers of its connections."""

    server: Server
    timers: Timers

    @property
    def connections(self) -> set[HttpConnection]:
        return connections_of(self.server)

    async def only(self) -> HttpConnection:
        """The only connection, once it is open."""
        await eventually(lambda: self.connections)
        (connection,) = self.connections
        return connection


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    while UNREAD:
        UNREAD.pop().close()


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(sock=unread(port), limit=4096)
    try:
        async with asyncio.timeout(SOON_S):
            yield reader, writer
    finally:
        writer.transport.abort()


async def say(port: int, data: bytes) -> bytes:
    """All bytes received until the server closes."""
    async with connect(port) as (reader, writer):
        writer.write(data)
        return await reader.read()


def error_of(answered: bytes) -> tuple[int, str]:
    head, _, body = answered.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nconnection: close\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"


# --------------------------------------------------------------------------------------------------- heads, trailers


@pytest.mark.parametrize(
    "trailer", [b"x: " + b"y" * 1000, b"y" * 1000, b"x: y\r\n" * 100], ids=["value", "name", "many"]
)
async def test_trailers_are_bounded_as_headers_are(trailer: bytes) -> None:
    async with serving(App(), Limits(header_bytes=8192)) as (port, _), connect(port) as (reader, writer):
        writer.write(CHUNKED + b"2\r\n{}\r\n0\r\n")
        answered = asyncio.create_task(reader.read())
        for _ in range((1 << 16) // len(trailer)):  # bytes: eight times the limit
            if answered.done():
                break
            writer.write(trailer)
            await turns(3)
        assert error_of(await answered) == (431, "headers_too_large")


async def test_a_body_in_many_small_chunks_is_no_trailer() -> None:
    async with serving(App(), Limits(header_bytes=8192)) as (port, _):
        answered = await say(port, CHUNKED + b"1\r\nx\r\n" * 20_000 + b"0\r\nchecksum: 1\r\n\r\n")
    assert answered.startswith(b"HTTP/1.1 200")


async def test_a_chunk_whose_extension_never_ends_is_refused() -> None:
    async with serving(App(), Limits(header_bytes=8192)) as (port, _):
        assert error_of(await say(port, CHUNKED + b"5;x=" + b"y" * 300_000))[0] == 431


async def test_more_header_lines_than_may_be_are_refused() -> None:
    async with serving(App(), Limits()) as (port, _):
        head = b"GET / HTTP/1.1\r\nconnection: close\r\n" + HOST
        assert (await say(port, head + b"a:\r\n" * 126 + b"\r\n")).startswith(b"HTTP/1.1 200")
        assert error_of(await say(port, head + b"a:\r\n" * 127 + b"\r\n")) == (431, "headers_too_large")


async def test_a_head_has_its_time_however_it_drips() -> None:
    head = b"GET / HTTP/1.1\r\nx: yyyyyyyyyyyyy"
    async with serving(App(), Limits(header_seconds=8)) as (port, serves), connect(port) as (reader, writer):
        connection = await serves.only()
        for count in range(len(head)):
            assert connection in serves.connections
            serves.timers.advance(8 / len(head))  # the last byte arrives after the timeout
            writer.write(head[count : count + 1])
            await eventually(lambda: connection._refused or connection._untold_bytes > count)  # noqa: B023
            assert connection._refused == (count == len(head) - 1)
        assert error_of(await reader.read()) == (408, "timeout")
        serves.timers.advance(LINGER_S)
        await eventually(lambda: not serves.connections)


async def test_a_pools_idle_connection_is_kept_until_it_is_used_again() -> None:
    """A timeout of five seconds, as in uvicorn and httpx, is a race that clients lose."""
    async with serving(App(), Limits(header_seconds=1)) as (port, serves), connect(port) as (reader, writer):
        connection = await serves.only()
        for _ in range(2):
            writer.write(GET)
            await reader.readuntil(b"xx")
            serves.timers.advance(90)  # Go's timeout; nginx keeps 60 s, Node and httpx 5 s
        writer.write(GET[:9])  # a request that has begun gets the header timeout
        await eventually(lambda: connection._untold_bytes)
        serves.timers.advance(1)
        assert error_of(await reader.read()) == (408, "timeout")


async def test_a_silent_connection_is_closed_before_and_after_a_request() -> None:
    async with serving(App(), Limits(header_seconds=4, idle_seconds=5)) as (port, serves):
        async with connect(port) as (reader, _):
            connection = await serves.only()
            serves.timers.advance(3.9)
            assert connection in serves.connections
            serves.timers.advance(0.1)
            assert await reader.read() == b""
            await eventually(lambda: not serves.connections)
        async with connect(port) as (reader, writer):
            writer.write(GET)
            await reader.readuntil(b"xx")
            serves.timers.advance(5)
            assert await reader.read() == b""
            await eventually(lambda: not serves.connections)
        async with connect(port) as (reader, writer):
            writer.write(GET)
            await reader.readuntil(b"xx")
            connection = await serves.only()
            serves.timers.advance(4)
            writer.write(b"G")  # does not extend the timeout, but gets an error answer
            await eventually(lambda: connection._untold_bytes)
            serves.timers.advance(4)
            assert (await reader.read()).startswith(b"HTTP/1.1 408")


# ------------------------------------------------------------------------------------------------- request parsing


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"POST / HTTP/1.1\r\ncontent-length: +2\r\n\r\n{}",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked, identity\r\n\r\n{}",
        b"POST / HTTP/1.1\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 18\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_two_readers_might_read_differently_is_refused(request_bytes: bytes) -> None:
    app = App()
    async with serving(app, Limits()) as (port, _):
        answered = await say(port, request_bytes)
    assert error_of(answered)[0] == 400
    assert app.requests == app.left, "a request was served"


async def test_an_upgrade_without_a_body_is_a_request_as_any_other() -> None:
    async with serving(App(), Limits()) as (port, _), connect(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n" + HOST + b"\r\n")
        assert (await reader.readuntil(b"xx")).startswith(b"HTTP/1.1 200")


async def test_http_1_0_is_answered_and_closed() -> None:
    async with serving(App(), Limits()) as (port, _):
        answered = await say(port, b"GET / HTTP/1.0\r\n\r\n")
    assert answered.startswith(b"HTTP/1.1 200")
    assert answered.endswith(b"\r\n\r\nxx")


async def test_requests_that_do_not_wait_for_answers_get_one_and_the_end() -> None:
    app = App()
    async with serving(app, Limits()) as (port, _):
        answered = await say(port, GET * 1000)
    assert answered.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answered
    assert app.requests == 1


async def test_a_client_that_sends_a_second_request_and_leaves_ends_the_first() -> None:
    async with World(answer("a" * 4000)) as world, world.listening() as address:
        world.engine.gate.clear()
        client = unread(port_of(address), asked())
        await eventually(lambda: world.engine.jobs)
        client.sendall(GET)
        await eventually(lambda: all(each._last for each in connections_of(world.server)))
        client.close()
        await eventually(lambda: world.engine.aborted)


# -------------------------------------------------------------------------------------------- clients that do not read


def long(job: Job) -> Iterator[Delta]:
    for _ in range(100_000):
        yield Delta(job=job.id, tokens=(ord("a"),) * 20)


async def test_a_stream_that_nobody_reads_is_ended_and_its_jobs_aborted() -> None:
    async with World(long, Limits(write_seconds=3)) as world, world.listening() as address:
        unread(port_of(address), asked())
        await eventually(lambda: world.engine.jobs)
        await eventually(later(world.timers, 3, lambda: bool(world.engine.aborted)))


def later(timers: Timers, seconds: float, condition: Callable[[], bool]) -> Callable[[], bool]:
    """A condition that first advances the timers by `seconds` each time it is checked."""

    def asked_later() -> bool:
        timers.advance(seconds)
        return condition()

    return asked_later


@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
async def test_an_answer_that_nobody_takes_does_not_hold_its_connection(close: bytes) -> None:
    """In one write of megabytes; in pieces that wait; and with so few bytes that all are in the kernel's buffer."""
    for app in (App(size=8 << 20), App(size=60_000, pieces=200), App(size=60_000, pieces=5)):
        async with serving(app, Limits(header_seconds=3, idle_seconds=3, write_seconds=3)) as (port, serves):
            unread(port, b"GET / HTTP/1.1\r\n" + HOST + close + b"\r\n")
            await eventually(lambda app=app: app.requests)
            await eventually(later(serves.timers, 3, lambda serves=serves: not serves.connections))


async def test_a_client_that_reads_slowly_gets_all_of_it() -> None:
    size = 3 << 20
    for app in (App(size=size), App(size=size // 48, pieces=48)):
        limits = Limits(header_seconds=3, idle_seconds=3, write_seconds=3)
        async with serving(app, limits) as (port, serves), connect(port) as (reader, writer):
            connection = await serves.only()
            writer.write(GET)
            got, times = 0, 0
            while data := await reader.read(64 << 10):
                got += len(data)
                if connection.transport.get_write_buffer_size() < connection._unsent_bytes:
                    times += 1
                    serves.timers.advance(3)  # the client has read some bytes, and progress is checked
                if connection._idle and not connection.transport.get_write_buffer_size():
                    serves.timers.advance(3)  # the answer has been sent, and no other request arrives
        assert got > size
        assert times > 4


async def test_what_waits_for_a_client_in_the_kernel_is_bounded() -> None:
    app = App(size=16 << 10, pieces=10_000)
    async with serving(app, Limits()) as (port, serves):
        unread(port, GET)
        connection = await serves.only()
        await eventually(lambda: connection.flow.write_paused)
        number = connection.transport.get_extra_info("socket").fileno()
        unsent = int.from_bytes(fcntl.ioctl(number, SIOCOUTQ, bytes(4)), "little")
        assert unsent + connection.transport.get_write_buffer_size() < 1 << 19


# ---------------------------------------------------------------------------------------------- connection limit


async def test_at_the_most_connections_the_longest_silent_one_makes_room() -> None:
    async with serving(App(), Limits(connections=20)) as (port, _):
        silent = [unread(port) for _ in range(60)]
        # accepted after all the silent ones
        assert (await say(port, b"GET / HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(SOON_S):
            for client in silent[:41]:
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
        for client in silent[41:]:
            with pytest.raises(BlockingIOError):
                client.recv(1)


async def test_where_all_connections_are_answered_a_new_one_is_told_to_come_back() -> None:
    async with serving(App(size=1 << 20, pieces=100), Limits(connections=3)) as (port, serves):
        busy = [unread(port, GET) for _ in range(3)]
        connections = serves.connections
        await eventually(lambda: len(connections) == 3 and all(each.cycle for each in connections))
        answered = await say(port, GET)
        assert error_of(answered) == (503, "overloaded")
        assert b"retry-after: 1\r\n" in answered
        busy[0].close()
        await eventually(lambda: len(connections) == 2)
        async with connect(port) as (reader, writer):
            writer.write(GET)
            assert await reader.read(12) == b"HTTP/1.1 200"


def test_there_are_fewer_connections_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 1024)]
    monkeypatch.setattr("resource.getrlimit", lambda _: limits[-1])
    monkeypatch.setattr("resource.setrlimit", lambda _, pair: limits.append(pair))
    assert open_files(512) == 512
    assert limits[-1] == (512, 1024)
    assert Connections(Limits(connections=4096)).most == 1024 - 128
    assert limits[-1] == (1024, 1024)
    assert open_files(100) == 1024, "a limit is never lowered"


async def test_silent_and_unread_connections_hold_up_nobody() -> None:
    """1,100 clients that send nothing and 200 that read nothing; other clients are answered at once."""
    open_files(8192)  # for clients and server, both in this process
    app = App(size=60_000, pieces=50)
    async with serving(app, Limits()) as (port, serves):
        connections = serves.connections
        for count in range(1, 1301):
            unread(port, GET if count > 1100 else b"")
            if count % 50 == 0:
                await eventually(lambda count=count: len(connections) == count)
        await eventually(lambda: sum(bool(each.cycle and each.flow.write_paused) for each in connections) == 200)
        for _ in range(20):
            answered = await say(port, b"GET /short HTTP/1.0\r\n\r\n")
            assert answered.startswith(b"HTTP/1.1 200")
        assert len(connections) >= 1300


async def test_a_server_that_ends_waits_for_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither for a client that does not read, nor for a handler that does not check for disconnects."""

    async def encode_for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    async with World(long) as world:
        for _ in range(2):
            async with serving(world.app, Limits()) as (port, serves):
                unread(port, asked())
                connection = await serves.only()
                await eventually(lambda at=connection: at.cycle)
                assert connection.cycle.keep_alive
                serves.server.should_exit = True
                # the server waits for the answer to end
                await eventually(lambda at=connection: not at.cycle.keep_alive)
                serves.server.abort()
                await eventually(lambda state=serves.server.server_state: not state.tasks)
            monkeypatch.setattr(world.gateway, "begin", encode_for_ever)
    assert not [record for record in caplog.records if record.exc_info or record.name.startswith("uvicorn")]


async def test_of_a_crowd_a_few_requests_are_begun_at_a_turn_of_the_loop():
    begun: list[int] = []
    turn = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(turn)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await turns()

    async with serving(app, Limits()) as (port, serves):
        links = [socket.create_connection(("127.0.0.1", port)) for _ in range(120)]
        await eventually(lambda: len(serves.connections) == 120)
        for link in links:
            link.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        counting = asyncio.create_task(count())
        await eventually(lambda: len(begun) == 120)
        counting.cancel()
        for link in links:
            link.close()
    # two shares may fall into one iteration
    assert max(begun.count(at) for at in set(begun)) <= 2 * (READS // REQUEST + 1)


async def test_the_app_is_told_of_a_body_when_it_is_whole_or_has_grown_by_much():
    told: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            told.append(len(message["body"]))
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    size = 150_000
    async with serving(app, Limits()) as (port, _), connect(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(100):
            writer.write(b"x" * (size // 100))
            await writer.drain()
            await turns(3)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert sum(told) == size
    assert len(told) <= 4


async def test_a_connection_is_refused_once():
    """Too many headers in a piece that is itself too long: there are two reasons for a refusal, and one answer."""
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    lines = b"".join(b"X-%d: y\r\n" % k for k in range(20_000))
    async with serving(App(), Limits()) as (port, _), connect(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n" + lines + b"\r\n")
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 431") == 1
    assert not wrong
