"""A prefill worker and a decode worker as processes of one server: what clients see of them."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from redline.model.k2.write import random_checkpoint
from tests.deploy.test_serve import Server, wait_for
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

KEY = "sk-admin-0123456789abcdef"
HOWS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 5}]


@contextmanager
def served(folder: Path, more: str = "", meanwhile: Callable[[Server], object] = lambda _: None) -> Iterator[Server]:
    """The server with the two workers. more: text for its file. meanwhile: called before the workers can be ready."""
    random_checkpoint(folder / "tiny", kernel_config(vocab_size=TINY_VOCAB))
    write_tiny_tokenizer(folder / "tiny")
    (folder / "keys.txt").write_text(f"{KEY}\n")
    (folder / "pools.toml").write_text(
        'weights = "tiny"\nport = 0\nadmin_port = 0\nadmin_keys_file = "keys.txt"\n[engine]\nkv_memory = "20MB"\n'
        '[engine.speculation]\ntype = "suffix"\n[[workers]]\nrole = "prefill"\n'
        f'cores = [{max(os.sched_getaffinity(0))}]\n[[workers]]\nrole = "decode"\n{more}'
    )
    server = Server(folder / "pools.toml")
    try:
        meanwhile(server)
        yield server.until_ready()
    finally:
        server.close()


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("pools")) as server:
        yield server
        server.ends_cleanly()


def address(server: Server) -> str:
    """The address of the admin routes."""
    found = re.search(r"admin routes are at (http://\S+)/admin/status", server.said)
    assert found is not None, server.said
    return found[1]


def admin(server: Server, path: str, method: str = "GET") -> dict[str, Any]:
    request = Request(f"{address(server)}/admin/{path}", headers={"authorization": f"Bearer {KEY}"}, method=method)
    return json.load(urlopen(request, timeout=LIMIT_S))


def workers(server: Server) -> dict[str, Any]:
    """Name -> the worker's entry in /admin/status."""
    return admin(server, "status")["workers"]


def all_ready(server: Server) -> bool:
    return all(worker["ready"] for worker in workers(server).values())


def job_of(server: Server, id: str) -> dict[str, Any]:
    """The admin route's record of a request with one choice."""
    (job,) = admin(server, f"requests/{id}")["jobs"]
    return job


def computed_by(server: Server, id: str) -> tuple[str, str]:
    """The prefill worker and the decode worker of a request, at its last placement."""
    sent = job_of(server, id)["sent"][-1]
    return sent["prompt_computed_by"], sent["worker"]


def tokens_of(server: Server, number: int, id: str = "") -> list[int]:
    """The 300 tokens of a streamed answer to a prompt of about 300. id: request ID; empty: the server assigns one."""
    prompt = f"{number} " + "the functions of a page " * 25
    extra = {"ignore_eos": True, "return_token_ids": True}
    stream = server.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=300, stream=True, **HOWS[number % 2], extra_body=extra,
        extra_headers={"X-Request-Id": id} if id else {},
    )  # fmt: skip
    return [token for chunk in stream for token in chunk.choices[0].model_dump().get("token_ids") or ()]


def free(server: Server) -> bool:
    return all(
        worker["jobs"] == 0 and worker["load"]["pages_used"] == 0 and not worker["load"]["waiting"]
        for worker in workers(server).values()
        if worker["load"] is not None
    )


def test_a_worker_for_prompts_with_cores_of_its_own_lets_the_servers_short_turns_by(pools: Server) -> None:
    prefill, decode = (workers(pools)[name]["pid"] for name in ("prefill", "decode"))
    assert os.sched_getaffinity(prefill) == {max(os.sched_getaffinity(0))}
    nice = os.getpriority(os.PRIO_PROCESS, decode)
    assert os.getpriority(os.PRIO_PROCESS, prefill) == min(19, nice + 10)


def test_prompts_are_computed_by_the_one_and_answers_given_by_the_other(pools: Server) -> None:
    """Placement depends on measured step times, so requests are sent until one had its KV transferred."""
    for number in range(1000, 1040):
        expected = tokens_of(pools, number, id := f"handed-over-{number}")
        assert len(expected) == 300
        if computed_by(pools, id) == ("prefill", "decode"):
            break
    else:
        raise AssertionError(pools.said)
    wait_for(lambda: workers(pools)["decode"]["load"]["generation_tokens"] >= 299 and free(pools), pools)
    assert workers(pools)["prefill"]["load"]["prompt_tokens"] > 200
    for engine, result in (("0", "handed_over"), ("1", "taken_over")):
        series = re.compile(rf'^redline:handoffs_total\{{engine="{engine}",.*result="{result}"\}} [1-9]', re.MULTILINE)
        wait_for(lambda series=series: series.search(urlopen(f"{pools.url}/metrics").read().decode()), pools)
    assert tokens_of(pools, number) == expected, "the same answer from the prefix cache"


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_streams_go_on_when_a_worker_is_killed(pools: Server, name: str) -> None:
    """During prefill and decode; then the same requests again, undisturbed."""
    wait_for(lambda: all_ready(pools), pools)
    numbers = range(10, 14) if name == "prefill" else range(20, 24)
    killed = workers(pools)[name]
    answers: dict[int, list[int]] = {}

    def ask(each: int) -> None:
        answers[each] = tokens_of(pools, each)

    threads = [threading.Thread(target=ask, args=(each,)) for each in numbers]
    for thread in threads:
        thread.start()
    # The worker has some of the requests, unless they all ended before this check.
    wait_for(lambda: workers(pools)[name]["jobs"] or not all(thread.is_alive() for thread in threads), pools)
    os.kill(killed["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(LIMIT_S)
    assert {number: len(answer) for number, answer in answers.items()} == dict.fromkeys(numbers, 300)
    wait_for(lambda: workers(pools)[name]["epoch"] == killed["epoch"] + 1 and all_ready(pools), pools)
    assert "code -9" in workers(pools)[name]["lost_before"]
    assert answers == {each: tokens_of(pools, each) for each in numbers}
    wait_for(lambda: free(pools), pools)


def test_a_worker_that_computes_prompts_and_is_stopped_keeps_nobody_waiting(pools: Server) -> None:
    wait_for(lambda: all_ready(pools), pools)
    expected = tokens_of(pools, 31)
    stopped = workers(pools)["prefill"]
    pid = stopped["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = tokens_of(pools, 33)
        assert tokens_of(pools, 31) == expected
        assert workers(pools)["prefill"]["epoch"] == stopped["epoch"], (
            "no request waited for a restart of the stopped worker"
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: workers(pools)["prefill"]["silent_s"] < 1, pools)
    assert tokens_of(pools, 33) == answer
    wait_for(lambda: free(pools), pools)


def test_workers_are_replaced_under_load_and_no_request_fails(pools: Server) -> None:
    wait_for(lambda: all_ready(pools), pools)
    before = workers(pools)
    answers: list[int] = []
    stop = threading.Event()

    def ask(number: int) -> None:
        while not stop.is_set():
            answers.append(len(tokens_of(pools, number)))
            number += 10

    threads = [threading.Thread(target=ask, args=(number,)) for number in (41, 42)]
    for thread in threads:
        thread.start()
    try:
        for name in before:
            assert admin(pools, f"workers/{name}/replace", "POST")["status"] == "draining"
            wait_for(lambda name=name: workers(pools)[name]["epoch"] > before[name]["epoch"], pools)
            wait_for(lambda: all_ready(pools), pools)
    finally:
        stop.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert answers
    assert set(answers) == {300}
    assert all(worker["epoch"] == before[name]["epoch"] + 1 for name, worker in workers(pools).items())
    with pytest.raises(HTTPError, match="404"):
        admin(pools, "workers/cook/replace", "POST")
