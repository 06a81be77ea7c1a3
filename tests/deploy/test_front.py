"""The listeners of one process: the API, the admin routes and /metrics, and the connections that they share."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from redline.api.config import Limits
from redline.api.http.budget import Connections
from redline.deploy.config import ServeConfig
from redline.deploy.front import ADMIN_CONNECTIONS, Doors, end, serve_beside
from tests.api.sockets import ASYNCIO, GET, Client, Hello, error_of
from tests.clocks import FakeClock
from tests.waiting import eventually

pytestmark = pytest.mark.anyio
HELD = GET.replace(b"/", b"/held", 1)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ASYNCIO


@pytest.fixture
async def clock() -> AsyncIterator[FakeClock]:
    with FakeClock().drives(asyncio.get_running_loop()) as clock:
        yield clock


async def test_the_admin_routes_are_reached_while_all_other_connections_are_taken(clock: FakeClock) -> None:
    """Taken by clients with a request in progress, so their connections cannot be closed, and by silent clients."""
    connections = Connections(Limits(connections=30))
    app = Hello()
    with ExitStack() as stack:
        api, admin, metrics = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3))
        ports = {at: at.getsockname()[1] for at in (admin, metrics)}
        beside = serve_beside(
            ServeConfig(weights="none"), Doors(api, admin, metrics), lambda _: app, lambda _: app, connections
        )
        await eventually(lambda: all(server.started for server, _ in beside))
        held = [stack.enter_context(Client(ports[metrics])).say(HELD) for _ in range(30)]
        await eventually(lambda: app.begun == 30)
        with Client(ports[metrics]) as late:
            assert error_of(await late.rest()) == (503, "overloaded")
        silent = [stack.enter_context(Client(ports[admin])) for _ in range(2 * ADMIN_CONNECTIONS)]
        for _ in range(3):
            with Client(ports[admin]) as client:
                assert (await client.say(GET).until(b"hello")).startswith(b"HTTP/1.1 200")
        assert connections.count == 30
        app.gate.set()
        for client in held:
            await client.until(b"hello")
        for client in silent:
            client.socket.close()
        ends = asyncio.gather(*(end(*each) for each in beside))
        while not ends.done():
            clock.advance(0.1)
            await asyncio.sleep(0)
        await ends
