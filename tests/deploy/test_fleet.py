"""Which workers and replicas are announced to whom with several API processes, and which gets the next connection."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redline.api.telemetry.metrics import Metrics
from redline.deploy import replicas, supervised_process
from redline.deploy.config import ServeConfig
from redline.deploy.connection_balancer import AT_ONCE, ConnectionBalancer, ReplicaSlot, take
from redline.deploy.fleet import AGAIN_S, Fleet, ReplicaStart
from redline.deploy.replica import ReplicaConfig
from redline.deploy.replicas import SupervisedReplica
from redline.messages.channel import MemoryChannel
from redline.messages.news import Heartbeat, Ready
from redline.messages.replicas import Drain, Replicas, Roster, Use
from tests.waiting import LIMIT_S, eventually, turns

pytestmark = pytest.mark.anyio

READY = Ready(max_model_len=1, pages=1, fingerprint="", summary="")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class World:
    """A fleet with a clock that the test sets."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.fleet = Fleet(Metrics("m"), folder, clock=lambda: self.now)

    def replica(self, of: str, epoch: int = 1) -> ReplicaStart:
        door = SimpleNamespace(setblocking=lambda _: None)
        start = ReplicaStart(of, epoch, MemoryChannel(), f"{of}{epoch}".encode(), cast("Any", door), 1)
        self.fleet.enter(start)
        return start

    def says(self, start: ReplicaStart, roster: int, **use: Any) -> None:
        self.fleet.hear(start, [Use(replica=start.name, roster=roster, **use)])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "s")


def told(outbox: Any, kind: type[Any]) -> list[Any]:
    return [message for message in outbox.drain(wait=False) if isinstance(message, kind)]


def test_workers_are_told_of_replicas_and_replicas_of_workers_whoever_comes_first(world: World) -> None:
    early = world.replica("a")
    outbox = MemoryChannel()
    world.fleet.join("w", outbox, "decode", 3, "ipc://w")
    late = world.replica("b")
    assert [[each.name for each in message.replicas] for message in told(outbox, Replicas)] == [["a.1"], ["a.1", "b.1"]]
    for start in (early, late):
        (*_, roster) = told(start.outbox, Roster)
        assert roster.replicas == ("a.1", "b.1")
        (one,) = roster.starts
        assert (one.worker, one.epoch, one.role, one.inbox) == ("w", 3, "decode", "ipc://w")
        assert one.outbox.endswith(f"{start.name}.w.3"), "each replica has its own address for the worker's messages"
    world.fleet.leave(early, "killed")
    world.fleet.leave(early, "killed")
    (message,) = told(outbox, Replicas)
    assert [each.name for each in message.replicas] == ["b.1"]
    assert world.fleet.ended == {"a": "killed"}


def test_what_becomes_of_a_worker_is_told_every_replica(world: World) -> None:
    start = world.replica("a")
    link = world.fleet.join("w", MemoryChannel())
    world.fleet.receive(link, [READY, Heartbeat()])
    assert world.fleet.ready is not None
    world.fleet.drain(link)
    world.fleet.mark_down(link, "it is replaced", asked=True)
    world.fleet.mark_down(link, "again")
    draining, lost = (roster.starts[0] for roster in told(start.outbox, Roster)[-2:])
    assert (draining.draining, draining.lost) == (True, None)
    assert (lost.lost, lost.asked) == ("it is replaced", True)


def test_who_has_missed_a_roster_is_told_it_again(world: World) -> None:
    start = world.replica("a")
    world.fleet.join("w", MemoryChannel())
    (*_, roster) = told(start.outbox, Roster)
    world.says(start, roster.number - 1)
    assert told(start.outbox, Roster) == [roster]
    world.says(start, roster.number)
    assert told(start.outbox, Roster) == []


def test_a_worker_that_a_replica_does_not_hear_of_is_told_of_it_again(world: World) -> None:
    start, outbox = world.replica("a"), MemoryChannel()
    link = world.fleet.join("w", outbox)
    world.fleet.receive(link, [READY])
    (first,) = told(outbox, Replicas)
    (*_, roster) = told(start.outbox, Roster)
    world.says(start, roster.number)
    assert told(outbox, Replicas) == [], "the message may still be on its way"
    world.now += AGAIN_S + 0.1
    world.says(start, roster.number)
    assert told(outbox, Replicas) == [first]


def test_what_a_replica_has_under_way_is_handed_on_to_the_others(world: World) -> None:
    a, b = world.replica("a"), world.replica("b")
    world.says(a, 0, waiting_tokens=7)
    assert [use.waiting_tokens for use in told(b.outbox, Use)] == [7]
    assert told(a.outbox, Use) == []


def test_it_has_drained_once_every_replica_says_that_nothing_runs_and_nothing_comes(world: World) -> None:
    a, b = world.replica("a"), world.replica("b")
    for start in (a, b):
        world.says(start, 0, busy=1)
    world.fleet.begin_drain("the end")
    assert told(a.outbox, Drain) == [Drain(reason="the end")]
    world.says(a, 0, busy=0)
    world.says(b, 0, busy=0, draining=True)
    assert not world.fleet.drained, "the first one's report may be older than the drain message"
    world.says(a, 0, busy=0, draining=True)
    assert world.fleet.drained
    late = world.replica("c")
    assert told(late.outbox, Drain) == [Drain(reason="the end")]


async def test_a_replica_that_cannot_be_started_is_tried_again_and_given_up_in_the_end(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    epochs: list[str] = []

    def start(config: ReplicaConfig) -> Any:
        epochs.append(config.name)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(replicas, "_start_process", start)
    monkeypatch.setattr(supervised_process, "AGAIN_S", 0.001)
    one = SupervisedReplica("a", ServeConfig(weights=""), world.fleet, tmp_path, lambda _: None)
    await asyncio.wait_for(one.live(), LIMIT_S)
    assert epochs == [f"a.{epoch}" for epoch in range(1, supervised_process.MOST_ENDS + 1)], (
        "retried although it was never ready"
    )
    assert "could not be started: [Errno 11]" in str(one.given_up)
    assert "it is given up" in caplog.text
    assert not world.fleet.replicas


# ---------------------------------------------------------------------------------------- connection balancer


class Ends:
    """The socket pairs of two replicas, both ends."""

    def __init__(self) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)]
        self.takers = [ReplicaSlot(name, ours) for name, (ours, _) in zip("ab", pairs, strict=True)]
        self.theirs = [theirs for _, theirs in pairs]
        self._all = [end for pair in pairs for end in pair]
        for theirs in self.theirs:
            theirs.setblocking(False)

    def serve(self, now: float = 0.0, **use: Any) -> None:
        for taker in self.takers:
            taker.use, taker.heard_at = Use(replica=taker.name, roster=0, **use), now

    def close(self) -> None:
        for end in self._all:
            end.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with closing(Ends()) as made:
        yield made


async def test_connections_are_shared_out_evenly_and_wait_until_somebody_serves(ends: Ends) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.setblocking(False)
        doorman = ConnectionBalancer(listener, lambda: ends.takers, lambda: 0.0)
        doorman.look()
        clients = [socket.create_connection(listener.getsockname()) for _ in range(10)]
        await turns(20)
        assert [take(theirs) for theirs in ends.theirs] == [[], []]
        ends.serve()
        doorman.look()
        await eventually(lambda: sum(taker.open for taker in ends.takers) == 10)
        taken = [take(theirs) for theirs in ends.theirs]
        assert [len(connections) for connections in taken] == [5, 5]
        taken[0][0].sendall(b"x")
        assert b"x" in [client.recv(1, socket.MSG_DONTWAIT) for client in clients if readable(client)]
        ends.takers[0].use = Use(replica="a", roster=0, taken=5, connections=1)  # four of its clients have left
        assert [taker.open for taker in ends.takers] == [1, 5]
        assert [taker.name for taker in doorman.order()] == ["a", "b"]
        doorman.close()
        for each in (*clients, *taken[0], *taken[1]):
            each.close()


def readable(client: socket.socket) -> bool:
    try:
        return bool(client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return False


async def test_who_is_not_heard_of_is_handed_nothing_while_another_is(ends: Ends) -> None:
    now = 0.0
    with socket.socket() as listener:
        doorman = ConnectionBalancer(listener, lambda: ends.takers, lambda: now)
        ends.serve()
        now = 0.9
        assert len(doorman.order()) == 2
        ends.takers[1].heard_at = now
        now = 1.5
        assert [taker.name for taker in doorman.order()] == ["b"]
        now = 9.0
        assert len(doorman.order()) == 2, "all are overdue: this process itself was stopped"


async def test_who_has_heard_of_no_worker_yet_is_handed_nothing_while_another_has(ends: Ends) -> None:
    with socket.socket() as listener:
        doorman = ConnectionBalancer(listener, lambda: ends.takers, lambda: 0.0)
        ends.serve()
        assert len(doorman.order()) == 2, "no replica has a worker while the model loads"
        ends.takers[0].use = Use(replica="a", roster=0, ready=True, taken=5, connections=5)
        assert [taker.name for taker in doorman.order()] == ["a"]


async def test_a_connection_that_a_replica_cannot_take_goes_to_the_next(ends: Ends) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        doorman = ConnectionBalancer(listener, lambda: ends.takers, lambda: 0.0)
        ends.serve()
        ends.theirs[0].close()
        doorman.look()
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        found: list[socket.socket] = []

        def all_taken() -> bool:
            found.extend(take(ends.theirs[1]))
            return len(found) == 3

        await eventually(all_taken)
        doorman.close()
        for each in (*clients, *found):
            each.close()


def test_a_door_whose_other_end_has_gone_says_so(ends: Ends) -> None:
    ends.takers[0]._door.close()
    with pytest.raises(EOFError):
        take(ends.theirs[0])
    assert AT_ONCE > 1
