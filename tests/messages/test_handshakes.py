"""Connections that do not finish their handshake are limited in number and time, and do not disturb clients that have
the key.
"""

import socket
from collections.abc import Callable

import pytest

from redline.messages import handshakes
from redline.messages.channel import SocketInbox, SocketOutbox
from redline.messages.news import Stop
from tests.waiting import LIMIT_S, until

KEY = b"k" * 40
MOST = 8


class Silent:
    """A TCP connection that sends nothing."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self._ended = False

    def ended(self) -> bool:
        """Whether the other side has closed it."""
        while not self._ended:
            try:
                self._ended = not self.socket.recv(1000)  # the server's greeting comes first
            except BlockingIOError:
                break
            except ConnectionResetError:
                self._ended = True
        return self._ended


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "_UNFINISHED", handshakes.Unfinished(MOST))
    monkeypatch.setattr(handshakes, "HANDSHAKE_MS", 600_000)


def port_of(inbox: SocketInbox) -> int:
    return int(inbox.address.rpartition(":")[2])


def delivered(outbox: SocketOutbox, inbox: SocketInbox) -> bool:
    outbox.put(Stop())
    return inbox.drain(wait=True, timeout=LIMIT_S) == [Stop()]


@pytest.mark.usefixtures("few")
def test_of_silent_connections_the_oldest_are_ended() -> None:
    with SocketInbox("tcp://127.0.0.1:*", KEY) as inbox, SocketOutbox(inbox.address, KEY) as writer:
        assert delivered(writer, inbox)
        silent = [Silent(port_of(inbox)) for _ in range(5 * MOST)]
        until(lambda: sum(each.ended() for each in silent) >= 4 * MOST)
        assert [each.ended() for each in silent] == [True] * 4 * MOST + [False] * MOST
        assert delivered(writer, inbox), "a completed connection must stay open"
        with SocketOutbox(inbox.address, KEY) as another:
            assert delivered(another, inbox)
        for each in silent:
            each.socket.close()


@pytest.mark.usefixtures("few")
def test_who_has_the_key_counts_only_until_its_handshake_is_done() -> None:
    with SocketInbox("tcp://127.0.0.1:*", KEY) as inbox:
        writers = [SocketOutbox(inbox.address, KEY) for _ in range(3 * MOST)]
        for writer in writers:
            assert delivered(writer, inbox)
        for writer in writers:
            assert delivered(writer, inbox)
            writer.close()


@pytest.mark.usefixtures("few")
def test_all_sockets_of_a_process_share_the_number() -> None:
    with SocketInbox("tcp://127.0.0.1:*", KEY) as one, SocketInbox("tcp://127.0.0.1:*", KEY) as other:
        first = [Silent(port_of(one)) for _ in range(MOST)]
        until(lambda: len(handshakes._UNFINISHED._ports) == MOST)
        second = [Silent(port_of(other)) for _ in range(MOST)]
        until(lambda: all(each.ended() for each in first))
        assert not any(each.ended() for each in second)
        for each in first + second:
            each.socket.close()


def test_a_handshake_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert handshakes.HANDSHAKE_MS <= 10_000
    monkeypatch.setattr(handshakes, "HANDSHAKE_MS", 50)
    with SocketInbox("tcp://127.0.0.1:*", KEY) as inbox:
        silent = Silent(port_of(inbox))
        until(silent.ended)
        silent.socket.close()


def test_a_descriptor_that_is_something_else_by_now_is_left_alone() -> None:
    unfinished = handshakes.Unfinished(1)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server, open(__file__) as file:
            unfinished.accepted(server.fileno(), 1)  # accepted at another port before
            unfinished.accepted(file.fileno(), 1)
            unfinished.accepted(1_000_000, 1)
            client.sendall(b"a")
            assert server.recv(1) == b"a"
            assert file.readline()


def test_its_thread_ends_with_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[Callable[[], bool]] = []

    class Thread(handshakes.threading.Thread):
        def start(self) -> None:
            threads.append(self.is_alive)
            super().start()

    monkeypatch.setattr(handshakes.threading, "Thread", Thread)
    with SocketInbox("tcp://127.0.0.1:*", KEY):
        (alive,) = threads
        assert alive()
    until(lambda: not alive())
