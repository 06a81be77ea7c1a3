"""Workers on other machines, as an operator sees them: a server and `redline agent`s as processes over loopback."""

import contextlib
import json
import os
import re
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import zmq

from redline import __version__
from redline.messages.channel import _secure
from redline.messages.codec import Wire, encode
from redline.messages.handoff import WorkerDown
from redline.messages.machines import Machine, Order, Orders
from redline.messages.news import Failed, Stop
from redline.model.k2.write import random_checkpoint
from tests.deploy.test_serve import REDLINE, Server, group, listening, wait_for
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

ADMIN_KEY = "sk-admin-0123456789abcdef"
CLUSTER_KEY = "a shared key of forty characters, no less"
HOWS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 5}]
ANSWER = 1500  # tokens: some tenths of a second, even on a fast machine


def agent_of(server: Server, key_file: Path, name: str) -> Server:
    """A machine's agent that joins a server."""
    wait_for(lambda: "machines join at" in server.said or server.process.poll() is not None, server)
    found = re.search(r"machines join at (tcp://127\.0\.0\.1:\d+)", server.said)
    assert found is not None, server.said
    return Server("--join", found[1], "--key-file", key_file, "--name", name, command=(REDLINE, "agent"))


class Machines:
    """A server with two workers, at gpu-1 and gpu-2, and the agents of these machines."""

    def __init__(self, folder: Path, weights: str = "tiny") -> None:
        """weights: weights of the second worker, on its machine."""
        random_checkpoint(folder / "tiny", kernel_config(vocab_size=TINY_VOCAB))
        write_tiny_tokenizer(folder / "tiny")
        (folder / "admin.txt").write_text(f"{ADMIN_KEY}\n")
        self.key_file = folder / "cluster.key"
        self.key_file.write_text(f"{CLUSTER_KEY}\n")
        self.key_file.chmod(0o600)
        (folder / "machines.toml").write_text(
            'weights = "tiny"\nport = 0\nadmin_port = 0\nadmin_keys_file = "admin.txt"\n'
            '[cluster]\nlisten = "127.0.0.1:0"\nkey_file = "cluster.key"\n[engine]\nkv_memory = "20MB"\n'
            '[engine.speculation]\ntype = "suffix"\n[[workers]]\nat = "gpu-1"\nname = "one"\n'
            f'[[workers]]\nat = "gpu-2"\nname = "two"\nweights = "{folder / weights}"\n'
        )
        self.server = Server(folder / "machines.toml")
        self.agents: dict[str, Server] = {}

    @property
    def said(self) -> str:
        return self.server.said + "".join(agent.said for agent in self.agents.values())

    def join(self, name: str) -> None:
        self.agents[name] = agent_of(self.server, self.key_file, name)

    @property
    def admin_port(self) -> int:
        found = re.search(r"admin routes are at http://127\.0\.0\.1:(\d+)/", self.server.said)
        assert found is not None, self.said
        return int(found[1])

    def workers(self) -> dict[str, Any]:
        """Name -> the worker's entry in /admin/status."""
        url = f"http://127.0.0.1:{self.admin_port}/admin/status"
        request = Request(url, headers={"authorization": f"Bearer {ADMIN_KEY}"})
        return json.load(urlopen(request, timeout=LIMIT_S))["workers"]

    def all_ready(self) -> bool:
        return all(worker["ready"] for worker in self.workers().values())

    def processes(self, name: str) -> set[int]:
        """The processes of the workers that an agent has started."""
        return self.agents[name].workers

    def close(self) -> None:
        for each in (self.server, *self.agents.values()):
            each.close()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    two = Machines(tmp_path_factory.mktemp("machines"))
    try:
        for name in ("gpu-1", "gpu-2"):
            two.join(name)
        two.server.until_ready()
        wait_for(two.all_ready, two)
        yield two
        two.server.ends_cleanly(everyone=False)
        wait_for(lambda: not any(agent.workers for agent in two.agents.values()), two)
        for agent in two.agents.values():
            agent.ends_cleanly(everyone=False)
    finally:
        two.close()


def tokens_of(machines: Machines, number: int) -> list[int]:
    """The tokens of a streamed answer of length ANSWER."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    stream = machines.server.client.completions.create(
        model="tiny", prompt=f"{number} " + "the functions of a page " * 9, max_tokens=ANSWER, stream=True,
        **HOWS[number % 2], extra_body=extra,
    )  # fmt: skip
    return [token for chunk in stream for token in chunk.choices[0].model_dump().get("token_ids") or ()]


def tokens_while(machines: Machines, numbers: range, act: Any) -> dict[int, list[int]]:
    """The answers to `numbers`, while `act` does something to a machine."""
    answers: dict[int, list[int]] = {}
    began = threading.Semaphore(0)

    def ask(number: int) -> None:
        began.release()
        answers[number] = tokens_of(machines, number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for _ in threads:
        began.acquire()

    def in_the_middle() -> bool:
        several = sum(worker["jobs"] for worker in machines.workers().values()) > 1
        return several or not any(thread.is_alive() for thread in threads)  # they were faster than this test

    wait_for(in_the_middle, machines)
    act()
    for thread in threads:
        thread.join(LIMIT_S)
    return answers


def test_answers_come_from_workers_of_both_machines(machines: Machines) -> None:
    told = machines.workers()
    assert {name: (worker["at"], worker["pid"]) for name, worker in told.items()} == {
        "one": ("gpu-1", None), "two": ("gpu-2", None),
    }  # fmt: skip
    first = tokens_of(machines, 0)
    answers = tokens_while(machines, range(4), lambda: None)
    assert answers[0] == first
    assert all(len(answer) == ANSWER for answer in answers.values())


def again(machines: Machines, name: str, epoch: int) -> bool:
    worker = machines.workers()[name]
    return bool(worker["epoch"] > epoch and worker["ready"])


def the_same(machines: Machines, answers: dict[int, list[int]]) -> bool:
    """Whether the answers equal those of undisturbed requests, token for token."""
    assert {number: len(answer) for number, answer in answers.items()} == dict.fromkeys(answers, ANSWER)
    return answers == {number: tokens_of(machines, number) for number in answers}


def test_streams_go_on_when_a_worker_of_another_machine_is_killed_and_it_is_started_again(machines: Machines) -> None:
    wait_for(machines.all_ready, machines)
    before = machines.workers()["one"]["epoch"]
    (pid,) = machines.processes("gpu-1")
    answers = tokens_while(machines, range(10, 14), lambda: os.kill(pid, signal.SIGKILL))
    wait_for(lambda: again(machines, "one", before), machines)
    assert machines.workers()["one"]["lost_before"] == "the worker has ended with code -9"
    assert the_same(machines, answers)


def test_an_agent_that_dies_takes_its_workers_with_it_and_its_streams_go_on(machines: Machines) -> None:
    wait_for(machines.all_ready, machines)
    before = machines.workers()["two"]["epoch"]
    lost = machines.agents["gpu-2"]
    answers = tokens_while(machines, range(20, 24), lambda: os.kill(lost.process.pid, signal.SIGKILL))
    wait_for(lambda: not lost.workers, machines)
    lost.close()
    assert the_same(machines, answers), "answered by the other worker"
    machines.join("gpu-2")
    wait_for(lambda: again(machines, "two", before), machines)
    why = machines.workers()["two"]["lost_before"]
    assert re.search(r"the agent of gpu-2 was restarted|no report from the agent of gpu-2 for", why), why


def test_a_machine_that_leaves_loses_no_request_and_its_agent_ends(machines: Machines) -> None:
    wait_for(machines.all_ready, machines)
    before = machines.workers()["one"]["epoch"]
    leaving = machines.agents["gpu-1"]
    answers = tokens_while(machines, range(30, 34), lambda: os.kill(leaving.process.pid, signal.SIGTERM))
    assert leaving.ends() == 0
    assert "Traceback" not in leaving.said
    assert the_same(machines, answers)
    leaving.close()
    machines.join("gpu-1")
    wait_for(lambda: again(machines, "one", before), machines)
    assert machines.workers()["one"]["lost_before"] == "it is replaced"


def test_a_second_agent_of_the_same_name_is_not_taken_in(machines: Machines) -> None:
    wait_for(machines.all_ready, machines)
    epochs = {name: worker["epoch"] for name, worker in machines.workers().items()}
    second = agent_of(machines.server, machines.key_file, "gpu-1")
    try:
        wait_for(lambda: "the server refused this agent" in second.said, second)
        assert "another agent has joined as gpu-1" in second.said
        os.kill(second.process.pid, signal.SIGINT)
        assert second.ends() == 0
    finally:
        second.close()
    assert {name: worker["epoch"] for name, worker in machines.workers().items()} == epochs


def test_nothing_listens_beyond_the_named_address_and_no_process_shows_the_key(machines: Machines) -> None:
    pids = all_processes(machines)
    assert len(pids) == 5, "a server, two agents, two workers"
    assert {address for pid in pids for address, _ in listening(pid)} == {"127.0.0.1"}
    for pid in pids:
        for fact in ("cmdline", "environ"):
            assert CLUSTER_KEY.encode() not in Path(f"/proc/{pid}/{fact}").read_bytes()
    assert CLUSTER_KEY not in machines.said


def all_processes(machines: Machines) -> set[int]:
    leaders = [each.process.pid for each in (machines.server, *machines.agents.values())]
    return {pid for leader in leaders for pid in group(leader)}


def none(stranger: "zmq.Socket[bytes]") -> None:
    """Connect without a key."""


def a_password(stranger: "zmq.Socket[bytes]") -> None:
    stranger.plain_username, stranger.plain_password = b"redline", b"redline"


def another_key(stranger: "zmq.Socket[bytes]") -> None:
    _secure(stranger, "tcp://", b"another key of more than forty characters")


def the_key(friend: "zmq.Socket[bytes]") -> None:
    _secure(friend, "tcp://", CLUSTER_KEY.encode())


class Peer:
    """A client that connects to a port and, on a PUSH socket, sends messages at once."""

    def __init__(self, port: int, kind: int, secure: Callable[["zmq.Socket[bytes]"], None], words: Sequence[bytes]):
        self.what = f"{secure.__name__}, kind {kind}, port {port}"
        self._socket = zmq.Context.instance().socket(kind)
        self._socket.linger = 0
        secure(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        with contextlib.suppress(zmq.Again):  # refused already: the socket has no connection
            for word in words if kind == zmq.PUSH else ():
                self._socket.send(word, zmq.NOBLOCK)

    def is_let_in(self, seconds: float) -> bool:
        """Whether its handshake has succeeded, or succeeds within `seconds`."""
        return bool(self._monitor.poll(int(seconds * 1000)))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


WORDS: list[Wire] = [
    Orders(server="evil"),
    Orders(server="evil", workers=(Order(name="evil", epoch=1, config=b"{}"),)),
    Machine(name="gpu-1", life="evil", inbox="tcp://127.0.0.1:9", version=__version__, leaving=True),
    Machine(name="gpu-9", life="evil", inbox="tcp://127.0.0.1:9", version=__version__),
    Failed(reason="evil"),
    WorkerDown(worker="one", epoch=1),
    Stop(),
]


def test_who_has_not_the_key_can_start_stop_feed_and_read_nothing(machines: Machines) -> None:
    """Every port between the machines, found in /proc, is sent messages that would do harm."""
    wait_for(machines.all_ready, machines)
    http = {machines.server.address[1], machines.admin_port}
    ports = {port for pid in all_processes(machines) for _, port in listening(pid)} - http
    assert len(ports) == 1 + 2 + 2 + 2, "the server's port, two agents, two workers' jobs, two workers' messages"
    before, pids, expected = machines.workers(), all_processes(machines), tokens_of(machines, 40)
    words = [struct.pack("<8sQ", b"stranger", number) + encode([word]) for number, word in enumerate(WORDS)]
    with contextlib.ExitStack() as peers:

        def peer(*how: Any) -> Peer:
            return peers.enter_context(contextlib.closing(Peer(*how)))

        friends = [peer(port, zmq.PUSH, the_key, []) for port in ports]
        assert all(friend.is_let_in(LIMIT_S) for friend in friends), "an accepted handshake is detected"
        hows = product(ports, (zmq.PUSH, zmq.PULL), (none, a_password, another_key))
        strangers = [peer(*how, words) for how in hows]
        for port, bytes_ in product(ports, (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), bytes(64))):
            raw = peers.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", port))))
            with contextlib.suppress(OSError):  # the server closed the connection while sending
                raw.sendall(bytes_)
        assert tokens_of(machines, 40) == expected, "the same answer while strangers are connected"
        assert [stranger.what for stranger in strangers if stranger.is_let_in(0)] == []
    after = machines.workers()
    assert {name: (each["epoch"], each["ready"]) for name, each in after.items()} == {
        name: (each["epoch"], each["ready"]) for name, each in before.items()
    }
    assert all_processes(machines) == pids
    assert "evil" not in machines.said
    assert "gpu-9" not in machines.said


def test_a_folder_that_is_not_on_a_machine_is_logged_and_the_other_machine_serves(tmp_path: Path) -> None:
    lost = Machines(tmp_path, weights="/nowhere/tiny")
    try:
        for name in ("gpu-1", "gpu-2"):
            lost.join(name)
        lost.server.until_ready()
        wait_for(
            lambda: "ERROR two: gpu-2: /nowhere/tiny/config.json: missing; it is given up" in lost.server.said, lost
        )
        assert urlopen(f"{lost.server.url}/health").status == 200
    finally:
        lost.close()
