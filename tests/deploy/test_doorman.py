"""Connections are passed to replicas, and wait while the replicas have too many to accept."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from redline.deploy.connection_balancer import AGAIN_S, ConnectionBalancer, ReplicaSlot, take
from redline.messages.replicas import Use
from tests.api.sockets import ASYNCIO
from tests.clocks import FakeClock
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio
USE = Use(
    replica="one", roster=0, ready=True, draining=False, taken=0, connections=0, busy=0, waiting=0, waiting_tokens=0,
    running=0, load=0, workers=(), keys=(),
)  # fmt: skip


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ASYNCIO


@pytest.fixture
async def clock() -> AsyncIterator[FakeClock]:
    with FakeClock().drives(asyncio.get_running_loop()) as clock:
        yield clock


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        listener.setblocking(False)
        yield listener


async def test_more_connections_than_a_replica_takes_in_wait_and_none_is_lost(
    clock: FakeClock, listener: socket.socket
) -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    taker = ReplicaSlot("one", ours)
    taker.use, taker.heard_at = USE, clock()
    doorman = ConnectionBalancer(listener, lambda: [taker], clock)
    doorman.look()
    clients = [socket.create_connection(listener.getsockname()) for _ in range(600)]
    await eventually(lambda: doorman._held is not None)  # the replica's socket is full
    await turns(20)
    taken: list[socket.socket] = []
    while len(taken) < len(clients):
        taken += take(theirs)
        clock.advance(AGAIN_S)
        await turns(3)
    assert {each.getpeername() for each in taken} == {each.getsockname() for each in clients}
    doorman.close()
    for each in (*clients, *taken, ours, theirs):
        each.close()


async def test_a_connection_that_nobody_took_ends_with_the_doorman(clock: FakeClock, listener: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()  # the replica has just ended
    taker = ReplicaSlot("one", ours)
    taker.use, taker.heard_at = USE, clock()
    doorman = ConnectionBalancer(listener, lambda: [taker], clock)
    doorman.look()
    with socket.create_connection(listener.getsockname()) as client:
        await eventually(lambda: doorman._held is not None)
        doorman.close()
        assert client.recv(1) == b""
    clock.advance(AGAIN_S)
    await turns(20)
    ours.close()
