"""KV events over sockets: sequence numbers, missed events, restarts of the publisher."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from redline.errors import ConfigError
from redline.messages import kv_sockets
from redline.messages.kv_sockets import Numbered, Publisher, Subscriber
from tests.waiting import LIMIT_S, until


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(kv_sockets, "REPLAY_S", LIMIT_S)


def heard_until(subscriber: Subscriber, enough: Callable[[list[Numbered]], bool]) -> list[Numbered]:
    """The events received until `enough` returns true."""
    found: list[Numbered] = []
    until(lambda: found.extend(subscriber.receive(0.1)) or enough(found))
    return found


def all_kept(subscriber: Subscriber, count: int) -> list[Numbered]:
    """`count` events published earlier, once the publisher's thread has stored them."""
    found: list[Numbered] = []
    until(lambda: found.extend(subscriber.catch_up()) or len(found) >= count)
    return found


def joined(publisher: Publisher, subscriber: Subscriber) -> int:
    """Publishes until the subscriber has received something; -> the number of the last event published."""

    def hears() -> bool:
        publisher.send(b"hello")
        return bool(subscriber.receive(0.1))

    until(hears)
    return publisher._said - 1


def test_batches_come_in_order_with_their_numbers(tmp_path: Path) -> None:
    at = f"ipc://{tmp_path}/pub"
    publisher = Publisher(at, topic="kv@here")
    with Subscriber(at, topic="kv@") as listens, Subscriber(at, topic="other") as other:
        first = joined(publisher, listens)
        for part in (b"a", b"b", b"c"):
            publisher.send(part)
        found = heard_until(listens, lambda found: any(each.batch == b"c" for each in found))
        assert found[-3:] == [(first + 1, b"a"), (first + 2, b"b"), (first + 3, b"c")]
        assert not other.receive(0.0)
        publisher.close()


def test_who_comes_late_or_has_missed_some_asks_and_hears_each_once(tmp_path: Path) -> None:
    at, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    publisher = Publisher(at, replay, "kv")
    for part in (b"a", b"b", b"c"):
        publisher.send(part)
    with Subscriber(at, replay, "kv") as listens:
        caught = all_kept(listens, 3)
        assert caught == [(0, b"a"), (1, b"b"), (2, b"c")]
        publisher.send(b"d")
        heard: list[Numbered] = []

        def hears() -> bool:
            publisher.send(b"last")  # events before the connection are missed, and requested
            heard.extend(listens.receive(0.1))
            return any(each.batch == b"last" for each in heard)

        until(hears)
        for _ in range(50):
            publisher.send(b"more")
        publisher.send(b"end")
        heard += heard_until(listens, lambda found: any(each.batch == b"end" for each in found))
        numbers = [each.number for each in heard]
        assert heard[0] == (3, b"d")
        assert numbers == list(range(3, 3 + len(numbers)))
        publisher.close()


def lose(subscriber: Subscriber) -> Numbered:
    """One event that reaches the socket and is removed before the subscriber reads it."""
    assert subscriber._sub.poll(1e3 * LIMIT_S)
    _, number, batch = subscriber._sub.recv_multipart()
    return Numbered(int.from_bytes(number, "big"), batch)


def test_what_is_said_while_others_are_said_again_is_not_lost(tmp_path: Path) -> None:
    at, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    publisher = Publisher(at, replay)
    with Subscriber(at, replay) as listens:
        joined(publisher, listens)
        publisher.send(b"missed")
        missed = lose(listens)
        for _ in range(200):
            publisher.send(b"more")
        publisher.send(b"end")
        # all events can be replayed when the first one reveals the gap
        until(lambda: publisher._kept[-1].batch == b"end")
        heard = heard_until(listens, lambda found: any(each.batch == b"end" for each in found))
        assert heard[0] == missed
        assert [each.number for each in heard] == list(range(missed.number, missed.number + 202))
        publisher.close()


@pytest.mark.parametrize("before", [1, 30])
def test_of_another_start_all_is_heard_whether_it_has_come_as_far_or_not(tmp_path: Path, before: int) -> None:
    at, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    publisher = Publisher(at, replay)
    for number in range(before):
        publisher.send(b"old %d" % number)
    with Subscriber(at, replay) as listens:
        assert len(all_kept(listens, before)) == before
        publisher.close()
        again = Publisher(at, replay)
        for number in range(10):
            again.send(b"new %d" % number)
        heard: list[Numbered] = []

        def hears() -> bool:
            again.send(b"hello")  # events before the reconnection are missed
            heard.extend(listens.receive(0.1))
            return bool(heard)

        until(hears)
        assert heard[:10] == [(number, b"new %d" % number) for number in range(10)]
        assert [each.number for each in heard] == list(range(len(heard)))
        again.close()


def test_an_answer_that_is_none_is_left_out(tmp_path: Path) -> None:
    replay = zmq.Context.instance().socket(zmq.ROUTER)
    replay.bind(f"ipc://{tmp_path}/replay")

    def answer() -> None:
        who, *_ = replay.recv_multipart()
        for frames in ([b"x"], [b"short", b"a"], [b"", bytes(8), b"a"], [b"", b"\xff" * 8, b""]):
            replay.send_multipart([who, *frames])

    answers = threading.Thread(target=answer)
    answers.start()
    with Subscriber(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay") as listens:
        assert listens.catch_up() == [(0, b"a")]
    answers.join()
    replay.close(linger=0)


def test_an_address_of_ipv6_is_one() -> None:
    with socket.socket(socket.AF_INET6) as finds:
        try:
            finds.bind(("::1", 0))
        except OSError:
            with pytest.raises(ConfigError, match="cannot be used"):
                Publisher("tcp://[::1]:0")
            return
    publisher = Publisher("tcp://[::1]:0")
    with Subscriber(publisher._pub.last_endpoint.rstrip(b"\0").decode()) as listens:
        joined(publisher, listens)
    publisher.close()


def test_another_start_begins_at_zero_and_is_heard(tmp_path: Path) -> None:
    at = f"ipc://{tmp_path}/pub"
    publisher = Publisher(at)
    with Subscriber(at) as listens:
        joined(publisher, listens)
        publisher.send(b"old")
        heard_until(listens, lambda found: any(each.batch == b"old" for each in found))
        publisher.close()
        again = Publisher(at)
        number = joined(again, listens)
        again.send(b"new")
        assert heard_until(listens, lambda found: any(each.batch == b"new" for each in found))[-1].number == number + 1
        again.close()


def test_a_request_that_is_none_is_not_answered_and_harms_nobody(tmp_path: Path) -> None:
    at, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    publisher = Publisher(at, replay)
    publisher.send(b"a")
    asks = zmq.Context.instance().socket(zmq.DEALER)
    asks.connect(replay)
    for frames in ([b"x"], [b"", b"short"], [b"", b"", b"", b""]):
        asks.send_multipart(frames)
    with Subscriber(at, replay) as listens:
        assert all_kept(listens, 1) == [(0, b"a")]
    asks.close(linger=0)
    publisher.close()
    publisher.close()


def test_an_address_that_is_in_use_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^events\.endpoint: tcp://nowhere cannot be used: .*; choose another$"):
        Publisher("tcp://nowhere")
    with pytest.raises(ConfigError, match=r"^events\.replay: "):
        Publisher(f"ipc://{tmp_path}/pub", "tcp://nowhere")


def test_an_address_of_a_closed_pair_is_not_used_again() -> None:
    addresses = set[bytes]()
    for _ in range(20):
        writes, reads = kv_sockets._pair()
        addresses.add(reads.last_endpoint)
        writes.close(linger=0)
        reads.close(linger=0)
    assert len(addresses) == 20
