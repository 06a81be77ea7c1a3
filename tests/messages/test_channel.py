"""Channels deliver every message once, in order, to threads and to asyncio; without the key nothing is delivered."""

import asyncio
import contextlib
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from redline.errors import ConfigError, MessageTooLarge
from redline.messages.channel import (
    _HEAD,
    MAX_MESSAGE_BYTES,
    MOST_AT_ONCE,
    AsyncSocketInbox,
    MemoryChannel,
    SocketInbox,
    SocketOutbox,
    ipc_address,
)
from redline.messages.codec import Wire, encode
from redline.messages.delta import Delta
from redline.messages.job import Abort, JobId
from redline.messages.news import Missed, Stop
from tests.waiting import LIMIT_S, eventually, turns, until

KEY = b"a shared key"


def delta(number: int) -> Delta:
    return Delta(job=JobId("a"), tokens=(number,))


def drain(inbox: SocketInbox | MemoryChannel, count: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < count:
        messages = inbox.drain(wait=True, timeout=LIMIT_S)
        assert messages, f"{numbers} came, and no more"
        numbers += [message.tokens[0] for message in messages]
    return numbers


# Links that are cut


def test_what_is_lost_when_a_connection_is_cut_is_told_in_its_place(tmp_path: Path) -> None:
    address = ipc_address(tmp_path / "run", "in")
    with SocketInbox(address) as inbox, SocketOutbox(address) as first, SocketOutbox(address) as other:
        first.put(delta(0))
        assert inbox.drain(wait=True, timeout=LIMIT_S) == [delta(0)]
        first._sent += 2  # messages lost in flight
        first.put(delta(3))
        assert inbox.drain(wait=True, timeout=LIMIT_S) == [Missed(messages=2, writer=first._writer), delta(3)]
        first.put(delta(4))
        assert inbox.drain(wait=True, timeout=LIMIT_S) == [delta(4)]
        other._sent += 1  # its first message is lost
        other.put(delta(6))
        assert inbox.drain(wait=True, timeout=LIMIT_S) == [Missed(messages=1, writer=other._writer), delta(6)]


# Memory


def test_memory_gives_what_is_there_in_order_and_only_once():
    channel = MemoryChannel()
    assert channel.drain(wait=False) == []
    for number in range(3):
        channel.put(delta(number))
    assert channel.drain(wait=True) == [delta(0), delta(1), delta(2)]
    assert channel.drain(wait=True, timeout=0.01) == []


def test_a_thread_that_waits_is_woken():
    channel = MemoryChannel()
    with ThreadPoolExecutor() as threads:
        drained = threads.submit(channel.drain, wait=True, timeout=LIMIT_S)
        until(lambda: channel._changed._waiters)  # type: ignore[attr-defined]
        channel.put(delta(1))
        assert drained.result() == [delta(1)]


def test_many_threads_lose_nothing():
    channel = MemoryChannel()
    writers = [
        threading.Thread(target=lambda base: [channel.put(delta(base + n)) for n in range(500)], args=[base])
        for base in (0, 500, 1000)
    ]
    for writer in writers:
        writer.start()
    numbers = drain(channel, 1500)
    assert sorted(numbers) == list(range(1500))
    assert [number for number in numbers if number < 500] == list(range(500))


def test_a_task_that_waits_is_woken_by_a_thread():
    async def main() -> list[int]:
        channel = MemoryChannel()
        writer = threading.Thread(target=lambda: [channel.put(delta(number)) for number in range(1000)])
        first = asyncio.create_task(channel.get())
        await eventually(lambda: channel._waiter)
        writer.start()
        numbers: list[int] = [message.tokens[0] for message in await asyncio.wait_for(first, LIMIT_S)]
        while len(numbers) < 1000:
            numbers += [message.tokens[0] for message in await asyncio.wait_for(channel.get(), LIMIT_S)]
        return numbers

    assert asyncio.run(main()) == list(range(1000))


def test_a_reader_that_gave_up_does_not_hinder_the_writer():
    channel = MemoryChannel()

    async def main() -> None:
        reading = asyncio.create_task(channel.get())
        await eventually(lambda: channel._waiter)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(main())
    channel.put(delta(1))
    assert channel.drain(wait=False) == [delta(1)]


# Sockets


def test_a_local_socket_delivers_in_order_even_what_was_sent_before_it_was_bound(tmp_path: Path):
    address = ipc_address(tmp_path / "run", "worker")
    with SocketOutbox(address) as outbox:
        for number in range(10):
            outbox.put(delta(number))
        with SocketInbox(address) as inbox:
            for number in range(10, 100):
                outbox.put(delta(number))
            assert drain(inbox, 100) == list(range(100))


def test_tcp_with_the_shared_key_delivers():
    with SocketInbox("tcp://127.0.0.1:*", KEY) as inbox, SocketOutbox(inbox.address, KEY) as outbox:
        outbox.put(delta(1))
        assert drain(inbox, 1) == [1]


def test_asyncio_reads_a_socket():
    async def main() -> list[int]:
        with AsyncSocketInbox("tcp://127.0.0.1:*", KEY) as inbox, SocketOutbox(inbox.address, KEY) as outbox:
            for number in range(50):
                outbox.put(delta(number))
            numbers: list[int] = []
            while len(numbers) < 50:
                numbers += [message.tokens[0] for message in await asyncio.wait_for(inbox.get(), LIMIT_S)]
            outbox.put(delta(50))
            numbers += [message.tokens[0] for message in await asyncio.wait_for(inbox.get(), LIMIT_S)]
            return numbers

    assert asyncio.run(main()) == list(range(51))


class Arrived:
    """Replaces an inbox's socket: all messages have already arrived; records the timeouts of polls."""

    def __init__(self, *messages: Wire) -> None:
        self._data = deque(_HEAD.pack(bytes(8), number) + encode([message]) for number, message in enumerate(messages))
        self.waits_ms: list[int | None] = []

    def recv(self, _: int) -> bytes:
        if not self._data:
            raise zmq.Again
        return self._data.popleft()

    def poll(self, timeout_ms: int | None) -> None:
        self.waits_ms.append(timeout_ms)


def test_a_late_reader_lets_the_event_loop_go_on(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the work of an iteration grows with its delay, and the delay with the work."""
    sent = 5 * MOST_AT_ONCE

    async def main() -> list[list[int]]:
        with AsyncSocketInbox("tcp://127.0.0.1:*", KEY) as inbox, SocketOutbox(inbox.address, KEY) as outbox:
            outbox.put(delta(0))  # stays in the socket, so that it is readable
            with monkeypatch.context() as patch:
                patch.setattr(inbox, "_socket", Arrived(*map(delta, range(sent))))
                turns: list[list[int]] = []
                while sum(map(len, turns)) < sent:
                    turns.append([message.tokens[0] for message in await asyncio.wait_for(inbox.get(), LIMIT_S)])
            return turns

    turns = asyncio.run(main())
    assert [number for turn in turns for number in turn] == list(range(sent))
    assert max(map(len, turns)) <= MOST_AT_ONCE


def test_a_wait_of_less_than_a_millisecond_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise a loop that polls again soon uses a whole core."""
    socket = Arrived()
    with SocketInbox(ipc_address(tmp_path / "run", "worker")) as inbox, monkeypatch.context() as patch:
        patch.setattr(inbox, "_socket", socket)
        for timeout in (0.0005, 0.0015, 0.0, -1.0, None):
            assert inbox.drain(wait=True, timeout=timeout) == []
    assert socket.waits_ms == [1, 2, 0, 0, None]


def refusals_of(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that reports refused handshakes and disconnects."""
    failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    return socket.get_monitor_socket(failed | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED)


def test_a_stranger_with_another_key_or_none_delivers_nothing():
    with SocketInbox("tcp://127.0.0.1:*", KEY) as inbox:
        stranger = zmq.Context.instance().socket(zmq.PUSH)
        stranger.linger = 0
        refusals = [refusals_of(stranger)]
        stranger.connect(inbox.address)
        with contextlib.suppress(zmq.Again):  # refused already: the socket has no connection
            stranger.send(encode([delta(1)]), zmq.NOBLOCK)
        other = SocketOutbox(inbox.address, b"another key")
        refusals.append(refusals_of(other._socket))
        other.put(delta(2))
        for refused in refusals:
            assert refused.poll(1e3 * LIMIT_S), "the connection was accepted"
        with SocketOutbox(inbox.address, KEY) as friend:
            friend.put(delta(3))
            assert drain(inbox, 1) == [3]
            assert inbox.drain(wait=False) == []
        # Both still reconnect, and an event that no one can read would block ZeroMQ's thread for ever.
        for writer, refused in zip((stranger, other._socket), refusals, strict=True):
            writer.disable_monitor()
            refused.close()
            writer.close(linger=0)


def test_what_is_sent_over_tcp_cannot_be_read_on_the_way():
    """A relay between the two ends sees neither the message nor the key that would open a connection."""
    import socket

    seen = bytearray()
    with SocketInbox("tcp://127.0.0.1:*", KEY) as inbox, socket.create_server(("127.0.0.1", 0)) as server:

        def relay() -> None:
            client, _ = server.accept()
            upstream = socket.create_connection(("127.0.0.1", int(inbox.address.rsplit(":", 1)[1])))

            def copy(source: socket.socket, target: socket.socket) -> None:
                while data := source.recv(4096):
                    seen.extend(data)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

            back = threading.Thread(target=copy, args=[upstream, client])
            back.start()
            copy(client, upstream)
            back.join()
            client.close()
            upstream.close()

        thread = threading.Thread(target=relay)
        thread.start()
        with SocketOutbox(f"tcp://127.0.0.1:{server.getsockname()[1]}", KEY) as outbox:
            outbox.put(Abort(job=JobId("a-very-recognisable-name")))
            assert inbox.drain(wait=True, timeout=LIMIT_S) == [Abort(job=JobId("a-very-recognisable-name"))]
        thread.join()
    assert len(seen) > 100
    assert b"recognisable" not in seen


def test_tcp_without_a_key_is_refused():
    with pytest.raises(ConfigError, match="needs a shared key"):
        SocketInbox("tcp://127.0.0.1:*")


def test_an_address_in_use_is_said_so():
    with (
        SocketInbox("tcp://127.0.0.1:*", KEY) as inbox,
        pytest.raises(ConfigError, match=r"(?i)address already in use"),
    ):
        SocketInbox(inbox.address, KEY)


def test_an_address_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match="ipc:// or tcp://"):
        SocketOutbox("inproc://here")


@pytest.mark.parametrize("bit", [0o040, 0o020, 0o010, 0o004, 0o002, 0o001])
def test_a_folder_that_others_can_enter_read_or_write_is_refused(tmp_path: Path, bit: int):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o700 | bit)
    with pytest.raises(ConfigError, match="other users can enter"):
        ipc_address(folder, "worker")
    folder.chmod(0o700)
    assert ipc_address(folder, "worker") == f"ipc://{folder}/worker"


def test_a_folder_of_another_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ipc_address(tmp_path / "mine", "worker")
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "mine").stat().st_uid + 1)
    with pytest.raises(ConfigError, match="other users can enter"):
        ipc_address(tmp_path / "mine", "worker")


def test_a_folder_is_made_for_its_owner_alone_whatever_the_umask_is(tmp_path: Path):
    before = os.umask(0)
    try:
        ipc_address(tmp_path / "mine", "worker")
    finally:
        os.umask(before)
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"{folder}: cannot create sockets in this folder: "):
            ipc_address(folder, "worker")


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path):
    room = 107 - len(os.fsencode(tmp_path / "mine")) - 1
    with SocketInbox(ipc_address(tmp_path / "mine", "x" * room)) as inbox, SocketOutbox(inbox.address) as outbox:
        outbox.put(delta(1))
        assert drain(inbox, 1) == [1]
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        ipc_address(tmp_path / "mine", "x" * (room + 1))


def test_an_address_is_free_once_its_reader_has_closed_and_closing_again_leaves_the_next_one_alone():
    first = SocketInbox("tcp://127.0.0.1:*", KEY)
    first.close()
    with bound(first.address) as second, SocketOutbox(first.address, KEY) as outbox:
        first.close()
        outbox.put(delta(1))
        assert drain(second, 1) == [1]


def bound(address: str) -> SocketInbox:
    """An inbox bound to this address. ZeroMQ releases a port in a thread of its own, shortly after the
    close, so retry.
    """

    def try_it() -> SocketInbox | None:
        with contextlib.suppress(ConfigError):
            return SocketInbox(address, KEY)
        return None

    return until(try_it)


# Messages over the size limit


def test_a_message_that_is_too_large_is_refused_where_it_is_put_and_the_next_one_arrives(tmp_path: Path):
    address = ipc_address(tmp_path / "run", "worker")
    with SocketInbox(address) as inbox, SocketOutbox(address) as outbox:
        outbox.put(delta(1))
        with pytest.raises(
            MessageTooLarge, match=r"the delta message of this request has 67,\d{3},\d{3} bytes.* 67,108,864: request"
        ):
            outbox.put(Delta(job=JobId("a"), tokens=(2,), error="x" * MAX_MESSAGE_BYTES))
        outbox.put(delta(3))
        with pytest.raises(MessageTooLarge):
            outbox.put_all([delta(4), Delta(job=JobId("a"), tokens=(5,), error="x" * MAX_MESSAGE_BYTES)])
        outbox.put(delta(6))
        assert drain(inbox, 3) == [1, 3, 6], "nothing of the refused ones"


def test_messages_of_one_frame_arrive_in_order_and_each_counts(tmp_path: Path) -> None:
    address = ipc_address(tmp_path / "run", "in")
    with SocketInbox(address) as inbox, SocketOutbox(address) as outbox:
        outbox.put_all([delta(0), delta(1)])
        outbox.put(delta(2))
        assert drain(inbox, 3) == [0, 1, 2]
        outbox._sent += 3  # a frame of three messages is lost
        outbox.put_all([delta(6), delta(7)])
        assert inbox.drain(wait=True, timeout=LIMIT_S) == [
            Missed(messages=3, writer=outbox._writer),
            delta(6),
            delta(7),
        ]


def test_what_waits_for_a_silent_reader_is_bounded_and_what_was_lost_is_told(tmp_path: Path) -> None:
    address = ipc_address(tmp_path, "silent")
    with SocketOutbox(address, most=10) as outbox:
        for number in range(50):
            outbox.put(Abort(job=JobId(f"{number}")))
        with SocketInbox(address) as inbox:
            heard = list[Wire]()
            while len(heard) < 10:
                heard += inbox.drain(wait=True)
            number = 50
            # the sender gets room some time after a read
            while not any(isinstance(message, Missed) for message in heard):
                outbox.put(Abort(job=JobId(f"{number}")))
                number += 1
                heard += inbox.drain(wait=True, timeout=0.01)
    at = next(place for place, message in enumerate(heard) if isinstance(message, Missed))
    missed, *after = heard[at:]
    assert isinstance(missed, Missed)
    assert heard[:at] == [Abort(job=JobId(f"{number}")) for number in range(at)]
    assert after[0] == Abort(job=JobId(f"{at + missed.messages}")), "the next message after the lost ones"
    assert at < 50


def test_the_largest_message_arrives(tmp_path: Path):
    address = ipc_address(tmp_path / "run", "worker")
    frame = len(encode([Delta(job=JobId("a"), error="x" * (1 << 17))])) - (1 << 17)
    largest = Delta(job=JobId("a"), error="x" * (MAX_MESSAGE_BYTES - frame))
    assert len(encode([largest])) == MAX_MESSAGE_BYTES
    with SocketInbox(address) as inbox, SocketOutbox(address) as outbox:
        outbox.put(largest)
        assert inbox.drain(wait=True, timeout=LIMIT_S) == [largest]


async def _received_after_another_reader(tmp_path: Path) -> list[Wire]:
    for number in range(2):
        address = ipc_address(tmp_path / "sockets", f"{number}")
        with AsyncSocketInbox(address) as inbox, SocketOutbox(address) as outbox:
            reading = asyncio.create_task(inbox.get())
            await turns(5)  # the reader is waiting now
            if number:
                outbox.put(Stop())
                return await asyncio.wait_for(reading, LIMIT_S)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
    return []


def test_a_reader_in_the_place_of_another_that_was_closed_is_read(tmp_path: Path) -> None:
    """The second inbox gets the file descriptor of the first, which the event loop must no longer watch."""
    assert asyncio.run(_received_after_another_reader(tmp_path)) == [Stop()]
