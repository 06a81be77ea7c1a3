"""One limit on connections for all listeners of a process, and which connections are closed for a new one."""

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from redline.api.config import Limits
from redline.api.http.budget import ClosableConnection, Connections
from redline.api.http.listen import PAUSE_S, SocketListener
from tests.api.sockets import ASYNCIO, GET, Client, Hello, error_of, serving
from tests.clocks import FakeClock
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\n"
HELD = GET.replace(b"/", b"/held", 1)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ASYNCIO


@pytest.fixture
async def clock() -> AsyncIterator[FakeClock]:
    with FakeClock().drives(asyncio.get_running_loop()) as clock, clock.installed():
        yield clock


class Watched(Connections):
    """Connections that count how many were opened."""

    come = 0

    def enter(self, connection: ClosableConnection) -> bool:
        self.come += 1
        return super().enter(connection)


class Crowd:
    """Clients whose connections a test holds open."""

    def __init__(self, connections: Watched) -> None:
        self._connections = connections
        self.clients: list[Client] = []

    async def grow(self, count: int, port: int) -> list[Client]:
        """Open `count` more, one after the other."""
        for _ in range(count):
            come = self._connections.come
            self.clients.append(Client(port))
            await eventually(lambda come=come: self._connections.come > come)
        return self.clients[-count:]

    def open(self) -> list[Client]:
        """Those that the server has not closed."""
        for client in self.clients:
            client.look()
        return [client for client in self.clients if not client.ended]


@pytest.fixture
def connections() -> Watched:
    return Watched(Limits(connections=20))


@pytest.fixture
def crowd(connections: Watched) -> Iterator[Crowd]:
    crowd = Crowd(connections)
    yield crowd
    for client in crowd.clients:
        client.socket.close()


async def test_silent_connections_to_one_listener_make_room_for_those_to_another(
    clock: FakeClock, connections: Watched, crowd: Crowd
) -> None:
    async with (
        serving(Hello(), Limits(), clock, connections=connections) as (metrics, _),
        serving(Hello(), Limits(), clock, connections=connections) as (api, _),
    ):
        await crowd.grow(40, metrics)
        await crowd.grow(3, api)
        assert connections.count == 20
        await eventually(lambda: crowd.open() == crowd.clients[-20:])
        for port in (api, metrics):
            with Client(port) as client:
                assert (await client.say(GET).until(b"hello")).startswith(b"HTTP/1.1 200")


async def test_connections_that_owe_a_body_make_room(clock: FakeClock, connections: Watched, crowd: Crowd) -> None:
    app = Hello()
    async with serving(app, Limits(), clock, connections=connections) as (port, _):
        for client in await crowd.grow(20, port):
            client.say(POST)
        await eventually(lambda: app.begun == 20)
        with Client(port) as client:
            assert (await client.say(GET).until(b"hello")).startswith(b"HTTP/1.1 200")
        await eventually(lambda: app.left == 1)  # the app of the closed connection receives http.disconnect
        assert crowd.open() == crowd.clients[1:]


async def test_a_body_that_makes_progress_outlives_one_that_does_not(
    clock: FakeClock, connections: Watched, crowd: Crowd
) -> None:
    app = Hello()
    async with serving(app, Limits(), clock, connections=connections) as (port, server):
        for count, client in enumerate(await crowd.grow(20, port), 1):
            client.say(POST)
            await eventually(lambda count=count: app.begun == count)
        slow, silent = crowd.clients[:2]
        oldest = next(iter(connections.owing))
        slow.say(b"a")
        await eventually(lambda: next(iter(connections.owing)) is not oldest)
        await crowd.grow(1, port)
        await eventually(lambda: silent not in crowd.open())
        assert len(crowd.open()) == 20
        await slow.say(b"bc").until(b"hello")
    assert len(server.server_state.connections) == 0


async def test_a_request_that_is_whole_makes_no_room(clock: FakeClock, connections: Watched, crowd: Crowd) -> None:
    app = Hello()
    async with serving(app, Limits(), clock, connections=connections) as (port, _):
        for client in await crowd.grow(20, port):
            client.say(HELD)
        await eventually(lambda: app.begun == 20)
        with Client(port) as late:
            assert error_of(await late.rest()) == (503, "overloaded")
        app.gate.set()
        for client in crowd.clients:
            assert (await client.until(b"hello")).startswith(b"HTTP/1.1 200")


async def test_who_has_given_way_is_not_counted_again(connections: Watched) -> None:
    class One:
        def give_way(self) -> None:
            connections.owes(self)  # it reads data that had arrived before

    for _ in range(30):
        one = One()
        assert connections.enter(one)
        connections.owes(one)
    assert connections.count == len(connections.owing) == 20


class Full(socket.socket):
    """A listener without a file descriptor for a connection."""

    tried = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tried += 1
        raise OSError(errno.EMFILE, "Too many open files")


async def test_a_listener_without_descriptors_pauses_and_goes_on(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[socket.socket] = []
    with Full() as at:
        at.bind(("127.0.0.1", 0))
        at.listen()
        listener = SocketListener(at, taken.append)
        with Client(at.getsockname()[1]):
            with caplog.at_level(logging.ERROR):
                listener.open()
                await eventually(lambda: at.tried == 1)
            await turns(20)
            assert at.tried == 1, "it retries without a pause"
            assert "Too many open files" in caplog.text
            clock.advance(PAUSE_S)
            await eventually(lambda: at.tried == 2)
            listener.close()
            clock.advance(PAUSE_S)
            await turns(20)
            assert at.tried == 2, "it accepts after its end"
    assert not taken
