"""A server that starts a second worker while the load exceeds one, and then ends it, without losing an answer."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from redline.model.k2.write import random_checkpoint
from tests.deploy.test_pools import KEY, admin, workers
from tests.deploy.test_serve import Server, wait_for
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

SHORT, LONG = 150, 3000  # tokens of an answer
FILE = """
weights = "tiny"
port = 0
admin_port = 0
admin_keys_file = "keys.txt"
drain_s = 0.5
[sla.default]
ttft_ms = 60000
[steer]
every_s = 0.1
window_s = 1.0
rest_s = 1.0
spare_s = 1.0
[engine]
kv_memory = "20MB"
max_running = 2
[[workers]]
count = 2
least = 1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("spares")
    random_checkpoint(folder / "tiny", kernel_config(vocab_size=TINY_VOCAB))
    write_tiny_tokenizer(folder / "tiny")
    (folder / "keys.txt").write_text(f"{KEY}\n")
    (folder / "spares.toml").write_text(FILE)
    server = Server(folder / "spares.toml")
    try:
        yield server.until_ready()
        server.ends_cleanly()
    finally:
        server.close()


def answer(server: Server, tokens: int) -> int:
    """The tokens of a complete answer. Raises if the request fails."""
    body = {"model": "tiny", "prompt": "the functions of a page", "max_tokens": tokens, "ignore_eos": True}
    request = Request(f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=120) as told:
        return json.load(told)["usage"]["completion_tokens"]


def steer(server: Server) -> dict[str, Any]:
    return admin(server, "status")["steer"]


def changes(server: Server, does: str) -> list[dict[str, Any]]:
    return [change for change in steer(server)["changes"] if change["does"] == does]


def test_a_worker_is_started_and_ended_under_load_and_no_answer_is_lost(server: Server) -> None:
    assert set(workers(server)) == {"worker-0"}, "the other worker is not started yet"
    states = steer(server)["workers"]
    assert (states["least"], states["most"], states["states"]) == (1, 2, {"ready": 1, "idle": 1})
    assert [answer(server, SHORT) for _ in range(3)] == [SHORT] * 3  # the baseline for the later ones
    answers: list[Future[int]] = []
    with ThreadPoolExecutor(200) as clients:

        def one_more() -> list[dict[str, Any]]:
            """Send one more request of a burst that is too much for one worker, which runs two at once."""
            answers.append(clients.submit(answer, server, SHORT))
            return changes(server, "starts")

        until(one_more, lambda: str(steer(server)))
        (start,) = changes(server, "starts")
        assert (start["worker"], start["role"]) == ("worker-1", "both")
        assert " workers are needed to meet the SLO targets" in start["why"]
        wait_for(lambda: "worker-1 is started" in server.said, server)
        wait_for(lambda: workers(server).get("worker-1", {}).get("ready"), server)
        # Long answers begin when no request is waiting, and are usually requeued when that worker ends.
        answers += [clients.submit(answer, server, LONG) for _ in range(2)]
        wait_for(lambda: changes(server, "ends"), server)
        assert changes(server, "ends")[0]["worker"] == "worker-1"
        assert changes(server, "ends")[0]["why"].startswith(
            "2 workers are running, and at most 1 were needed in the last"
        )
        wait_for(lambda: steer(server)["workers"]["states"] == {"ready": 1, "idle": 1}, server)
        lengths = [each.result(LIMIT_S) for each in answers]
    assert sorted(set(lengths)) == [SHORT, LONG]
    told = workers(server)["worker-1"]
    assert (told["ready"], told["lost"]) == (False, "it is scaled down")
    for line in (
        "worker-1 takes requests",
        "worker-1 is scaled down",
        "worker-1 has ended, and is idle until it is",
    ):
        wait_for(lambda line=line: line in server.said, server)
    assert told["load"] is None, "it has no pages any more"
    assert steer(server)["workers"]["wanted"] == 1
    text = urlopen(f"{server.url}/metrics").read().decode()
    assert 'redline:workers_wanted{engine="0",model_name="tiny"} 1.0' in text
    assert 'redline:worker_role{engine="1",model_name="tiny",role="both"} 0.0' in text
    assert 'vllm:num_requests_running{engine="1",model_name="tiny"} 0.0' in text
    queries = re.search(r'vllm:prefix_cache_queries_total{engine="1",model_name="tiny"} (\S+)', text)
    assert queries is not None
    assert float(queries[1]) > 0, "it has prefilled some of the requests"
