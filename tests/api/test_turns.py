"""Data from clients is read in shares, one share per iteration of the event loop."""

import asyncio
from collections import Counter

import pytest

from redline.api.http.turns import READS, REQUEST, ReadQueue
from tests import waiting

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Client:
    """Records what was read in which iteration, and whether reading is paused; each request is one piece."""

    def __init__(self, turns: ReadQueue, clock: list[int], requests: bool = False) -> None:
        self._turns, self._clock, self._requests = turns, clock, requests
        self.read: list[tuple[int, bytes]] = []
        self.waits = False

    def feed(self, data: bytes) -> None:
        self.read.append((self._clock[0], data))
        if self._requests:
            self._turns.whole()

    def wait(self) -> None:
        self.waits = True

    def go_on(self) -> None:
        self.waits = False


async def turn(clock: list[int]) -> None:
    clock[0] += 1
    await waiting.turns()


async def test_pieces_beyond_a_turns_share_wait_for_the_next_turns_in_order():
    clock = [0]
    turns = ReadQueue()
    clients = [Client(turns, clock) for _ in range(2 * READS + 10)]
    for client in clients:
        turns.read(client, b"a")
    assert [client.waits for client in clients] == [False] * READS + [True] * (READS + 10)
    while clients[-1].waits:
        await turn(clock)
        assert clock[0] < 10
    told = [client.read for client in clients]
    assert told == sorted(told)  # first come, first served
    assert max(Counter(when for read in told for when, _ in read).values()) <= READS


async def test_of_whole_requests_fewer_are_begun_in_a_turn():
    clock = [0]
    turns = ReadQueue()
    clients = [Client(turns, clock, requests=True) for _ in range(200)]
    for client in clients:
        turns.read(client, b"GET")
    while clients[-1].waits:
        await turn(clock)
    begun = Counter(client.read[0][0] for client in clients)
    assert sum(begun.values()) == 200
    assert max(begun.values()) <= READS // REQUEST + 1


async def test_who_comes_while_others_wait_is_not_read_before_them():
    clock = [0]
    turns = ReadQueue()
    early = [Client(turns, clock) for _ in range(READS + 1)]
    for client in early:
        turns.read(client, b"a")
    late = Client(turns, clock)
    turns.read(late, b"b")
    turns.read(early[-1], b"c")  # data that arrived before its socket was paused
    assert late.waits
    while late.waits or early[-1].waits:
        await turn(clock)
    assert [data for _, data in early[-1].read] == [b"a", b"c"]
    assert early[-1].read[0] <= late.read[0]


async def test_a_turn_without_anybody_is_not_asked_for():
    clock = [0]
    turns = ReadQueue()
    client = Client(turns, clock)
    turns.read(client, b"a")
    for _ in range(3):
        await turn(clock)
    called = 0

    def count(*_: object) -> None:
        nonlocal called
        called += 1

    loop = asyncio.get_running_loop()
    real, loop.call_soon = loop.call_soon, count  # type: ignore[method-assign]
    try:
        turns.read(client, b"b")
        turns.read(client, b"c")
    finally:
        loop.call_soon = real  # type: ignore[method-assign]
    assert called == 1  # one call_soon per share
