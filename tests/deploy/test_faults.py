"""Links between a server's processes that stall and drop, and a server that is stopped or killed: what clients see."""

import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lab.fault_links import Detours, LinkName
from redline.model.k2.write import random_checkpoint
from tests.deploy.test_pools import KEY, all_ready, free, tokens_of, workers
from tests.deploy.test_serve import Server, wait_for
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


STALL_S = 3600.0  # seconds for which a link holds its messages: longer than any test


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder for sockets with a short path."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def links(place: Path) -> Iterator[Detours]:
    with Detours(place) as detours:
        yield detours


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory, place: Path, links: Detours) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faults")
    random_checkpoint(folder / "tiny", kernel_config(vocab_size=TINY_VOCAB))
    write_tiny_tokenizer(folder / "tiny")
    (folder / "keys.txt").write_text(f"{KEY}\n")
    (folder / "pools.toml").write_text(
        'weights = "tiny"\nport = 0\nadmin_port = 0\nadmin_keys_file = "keys.txt"\n[engine]\nkv_memory = "20MB"\n'
        '[engine.speculation]\ntype = "suffix"\n[[workers]]\nrole = "prefill"\n'
        '[[workers]]\nrole = "decode"\ncount = 2\n'
    )
    server = Server(folder / "pools.toml", environment={"TMPDIR": str(place)}, really=True)
    try:
        yield server.until_ready()
        killed_it_leaves_nothing_behind(server, place)
    finally:
        server.close()


def killed_it_leaves_nothing_behind(pools: Server, place: Path) -> None:
    """Not even a stopped worker. Called as the fixture ends, since no test can come after it."""
    wait_for(lambda: all_ready(pools), pools)
    pids = {name: worker["pid"] for name, worker in workers(pools).items()}
    maps = Path(f"/proc/{pids['prefill']}/maps").read_text()
    parcels = re.search(r"(/\S*/redline-[^/\s]+)/parcels-", maps)
    assert parcels is not None
    os.kill(pids["decode-1"], signal.SIGSTOP)
    os.kill(pids["decode-0"], signal.SIGKILL)  # SIGKILL leaves it no chance to clean up
    pools.process.kill()
    assert pools.ends() == -signal.SIGKILL
    assert not Path(parcels[1]).exists()
    assert not [*place.glob("redline-*")]
    assert "Traceback" not in pools.said


def link(pools: Server, links: Detours, writer: str, socket: str) -> LinkName:
    """The link from a worker, or from the API, to a socket. It connects when the first request uses it."""
    pid = pools.process.pid if writer == "api" else workers(pools)[writer]["pid"]
    for together in range(4, 44, 4):
        found = [name for name in links.links() if name.writer == pid and name.socket.startswith(socket)]
        if found:
            assert len(found) == 1, (links.links(), writer, socket)
            return found[0]
        answers_beside(pools, range(200, 200 + together))
    raise AssertionError((links.links(), writer, socket))


def answers_beside(
    pools: Server,
    numbers: Sequence[int],
    fault: Callable[[], object] = lambda: None,
    when: Callable[[], object] = lambda: True,
) -> dict[int, list[int]]:
    """The answers to concurrent requests; `fault` is called once `when` is true. If all have ended before that,
    more requests are sent, since none of the first may have used the link under test."""
    answers: dict[int, list[int]] = {}
    threads: list[threading.Thread] = []

    def ask(number: int) -> None:
        answers[number] = tokens_of(pools, number)

    def begin(number: int) -> None:
        threads.append(threading.Thread(target=ask, args=(number,)))
        threads[-1].start()

    def due() -> object:
        if not any(thread.is_alive() for thread in threads):
            for number in numbers:
                begin(1000 + 10 * len(threads) + number)
        return when()

    for number in numbers:
        begin(number)
    wait_for(due, pools)
    fault()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [len(answer) for answer in answers.values()] == [300] * len(threads)
    return {number: answers[number] for number in numbers}


def undisturbed(pools: Server, numbers: Sequence[int]) -> dict[int, list[int]]:
    wait_for(lambda: all(each["silent_s"] < 1 for each in workers(pools).values()) and free(pools), pools)
    return {number: tokens_of(pools, number) for number in numbers}


@pytest.mark.parametrize(
    ("writer", "socket", "numbers"),
    [
        ("api", "decode-0.1.jobs", range(50, 54)),
        ("decode-1", "decode-1.1.deltas", range(60, 64)),
        ("prefill", "decode-0.1.jobs", range(70, 74)),
    ],
)
def test_where_a_link_is_cut_what_was_on_it_is_lost_and_no_token_is(
    pools: Server, links: Detours, writer: str, socket: str, numbers: range
) -> None:
    name, lost = link(pools, links, writer, socket), links.lost
    links.stall(name, STALL_S)
    answers = answers_beside(pools, numbers, fault=lambda: links.cut(name), when=lambda: links.holding(name))
    until(lambda: links.lost > lost)
    assert answers == undisturbed(pools, numbers)


@pytest.mark.parametrize(
    ("writer", "socket", "numbers"),
    [("api", "decode-0.1.jobs", range(80, 84)), ("decode-1", "decode-1.1.deltas", range(90, 94))],
)
def test_where_a_link_stalls_streams_go_on_elsewhere(
    pools: Server, links: Detours, writer: str, socket: str, numbers: range
) -> None:
    name = link(pools, links, writer, socket)
    links.stall(name, STALL_S)
    answers = answers_beside(pools, numbers)  # none of them waited for the stalled link
    links.stall(name, 0.0)
    assert answers == undisturbed(pools, numbers)


def test_where_a_server_is_stopped_and_goes_on_no_token_is_lost(pools: Server) -> None:
    """That the server does not take a worker for silent after its own stop: tests/api/test_gateway.py."""

    def stop() -> None:
        os.kill(pools.process.pid, signal.SIGSTOP)
        until(lambda: ") T " in Path(f"/proc/{pools.process.pid}/stat").read_text())
        os.kill(pools.process.pid, signal.SIGCONT)

    numbers = range(100, 104)
    answers = answers_beside(pools, numbers, stop, when=lambda: any(each["jobs"] for each in workers(pools).values()))
    assert answers == undisturbed(pools, numbers)
