"""Three workers that switch roles while they serve: every answer is unchanged, and none is lost."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from openai import OpenAI

from tests.deploy.test_pools import KEY, address, all_ready, free, served, workers
from tests.deploy.test_serve import Server, wait_for
from tests.waiting import LIMIT_S

LONG = 30_000  # tokens, which take longer than an answer may stay on a worker that switches its role
PROMPT = "the functions of a page " * 25
THIRD = '[[workers]]\nrole = "decode"\nname = "other"\n'


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("three"), THIRD) as server:
        wait_for(lambda: all_ready(server), server)
        yield server
        server.ends_cleanly()


def turn(server: Server, name: str, body: object) -> tuple[int, dict[str, Any]]:
    """Request a role switch: the HTTP status and the body."""
    request = Request(
        f"{address(server)}/admin/workers/{name}/role",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {KEY}"},
        method="POST",
    )
    try:
        with urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def taken(server: Server, name: str, role: str) -> None:
    """Request a role switch until it is accepted: it is refused while the remaining decode workers miss heartbeats."""
    wait_for(lambda: turn(server, name, {"role": role}) == (200, {"worker": name, "role": role}), server)


def flipped(server: Server, name: str, role: str) -> None:
    """Switch the role of a worker, and wait until the switch is complete."""
    taken(server, name, role)
    wait_for(lambda: workers(server)[name]["turning_s"] is None, server)
    assert workers(server)[name]["role"] == role


def streamed(client: OpenAI, number: int, length: int) -> Any:
    """The stream of a greedy answer to a prompt of about 300 tokens; the caller closes it."""
    return client.completions.create(
        model="tiny", prompt=f"{number} {PROMPT}", max_tokens=length, stream=True, temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip


def first_tokens(stream: Any, number: int) -> list[int]:
    """The next `number` tokens, or a few more; fewer if the stream ends first."""
    tokens: list[int] = []
    for chunk in stream:
        tokens += chunk.choices[0].model_dump().get("token_ids") or ()
        if len(tokens) >= number:
            break
    return tokens


def tokens_of(server: Server, number: int, length: int = 300) -> list[int]:
    """The tokens of a streamed greedy answer to a prompt of about 300 tokens."""
    with server.client as client, streamed(client, number, length) as stream:
        return first_tokens(stream, length)


def writing(server: Server) -> list[str]:
    """The workers that decode at this moment: each has a job, and its last load report has a running request."""
    return [
        name for name, worker in workers(server).items()
        if name != "prefill" and worker["jobs"] and worker["load"]["running"]
    ]  # fmt: skip


class Load:
    """Clients that send one request after another, each with prompts of its own, until they are stopped."""

    def __init__(self, server: Server, first: int, clients: int = 3) -> None:
        self.answers: dict[int, list[int]] = {}
        self.failures: list[BaseException] = []
        self._server = server
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(count(first + client, clients),)) for client in range(clients)
        ]

    def _ask(self, numbers: "count[int]") -> None:
        for number in numbers:
            if self._stop.is_set():
                return
            try:
                self.answers[number] = tokens_of(self._server, number)
            except BaseException as error:
                self.failures.append(error)
                raise

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(LIMIT_S)


def check(server: Server, load: Load) -> None:
    """Every answer is complete, and equal to the undisturbed one."""
    assert not load.failures
    assert load.answers
    wait_for(lambda: free(server), server)
    assert load.answers == {number: tokens_of(server, number) for number in load.answers}
    wait_for(lambda: free(server), server)


def test_a_worker_that_answers_computes_prompts_and_back_and_no_answer_is_another(three: Server) -> None:
    before = {name: worker["epoch"] for name, worker in workers(three).items()}
    with Load(three, 100) as load:
        for name, role in (("decode", "prefill"), ("prefill", "decode"), ("decode", "decode"), ("prefill", "prefill")):
            wait_for(lambda: any(worker["jobs"] for worker in workers(three).values()), three)
            flipped(three, name, role)
    told = workers(three)
    assert {name: worker["role"] for name, worker in told.items()} == {
        "prefill": "prefill", "decode": "decode", "other": "decode"
    }  # fmt: skip
    assert {name: worker["epoch"] for name, worker in told.items()} == before, "each is the process that it was"
    check(three, load)


def test_a_long_answer_goes_on_with_another_worker(three: Server) -> None:
    """The worker that decodes the answer is switched to prefill. The answer outlasts the time that it may stay, so
    it is requeued to another worker. It is read until well past the token at which it moved.

    On a busy machine a missed heartbeat may move it first; then the next worker that decodes it is switched.
    """
    with three.client as client, streamed(client, 7, LONG) as stream:
        tokens, found = first_tokens(stream, 50), None

        def read_on() -> None:  # if the client read nothing, its job would be paused
            more = first_tokens(stream, 10)
            assert more, "the answer ended before its worker changed its role"
            tokens.extend(more)

        while found is None:
            while not (names := writing(three)):
                read_on()
            (name, *_), turning = names, True
            taken(three, name, "prefill")
            moves = re.compile(rf"job \S+ is requeued after (\d+) tokens: the role of {name} is now prefill")
            while (found := moves.search(three.said)) is None and turning:
                turning = workers(three)[name]["turning_s"] is not None
                read_on()
            if found is None:
                flipped(three, name, "decode")
        tokens += first_tokens(stream, int(found[1]) + 500 - len(tokens))
    wait_for(lambda: workers(three)[name]["turning_s"] is None, three)
    flipped(three, name, "decode")
    wait_for(lambda: free(three), three)
    with three.client as client, streamed(client, 7, LONG) as stream:
        undisturbed = first_tokens(stream, len(tokens))
    assert len(tokens) >= int(found[1]) + 500
    assert undisturbed[: len(tokens)] == tokens
    wait_for(lambda: free(three), three)


def test_a_prompt_that_is_computed_for_another_is_handed_over_by_a_worker_that_answers_by_then(three: Server) -> None:
    with Load(three, 200, clients=4) as load:
        wait_for(lambda: workers(three)["prefill"]["jobs"], three)
        flipped(three, "prefill", "decode")
        flipped(three, "prefill", "prefill")
    check(three, load)


def test_a_worker_that_is_killed_while_it_changes_its_role_is_started_again_in_the_new_one(three: Server) -> None:
    before = workers(three)["other"]
    with Load(three, 300) as load:
        wait_for(lambda: workers(three)["other"]["jobs"], three)
        taken(three, "other", "prefill")
        os.kill(before["pid"], signal.SIGKILL)
        wait_for(lambda: workers(three)["other"]["epoch"] == before["epoch"] + 1, three)
        assert workers(three)["other"]["role"] == "prefill"
        wait_for(lambda: all_ready(three), three)
        flipped(three, "other", "decode")
    check(three, load)


def test_what_cannot_be_is_refused_in_one_line(three: Server) -> None:
    status, said = turn(three, "cook", {"role": "decode"})
    assert (status, said["error"]["message"]) == (
        404,
        "there is no worker cook; the workers are prefill, decode, other",
    )
    status, said = turn(three, "decode", {"role": "cook"})
    assert status == 400
    assert "Invalid enum value 'cook' - at `$.role`" in said["error"]["message"]
    assert turn(three, "decode", {"role": "decode", "now": True})[0] == 400
    assert turn(three, "decode", {"role": "d" * 2000})[0] == 413
    flipped(three, "other", "prefill")
    status, said = turn(three, "decode", {"role": "prefill"})
    assert status == 409
    assert said["error"]["message"].startswith("decode is the last worker that answers")
    flipped(three, "other", "decode")


def test_roles_and_changes_of_roles_are_series(three: Server) -> None:
    flipped(three, "other", "prefill")
    flipped(three, "other", "decode")
    text = urlopen(f"{three.url}/metrics").read().decode()
    roles = {(engine, role): value for engine, role, value in _series(text, "redline:worker_role")}
    assert {pair for pair, value in roles.items() if value == 1.0} == {
        ("0", "prefill"), ("1", "decode"), ("2", "decode")
    }  # fmt: skip
    assert len(roles) == 9
    changes = {(engine, role): value for engine, role, value in _series(text, "redline:role_changes_total")}
    assert changes["2", "decode"] >= 1.0


def _series(text: str, name: str) -> Iterator[tuple[str, str, float]]:
    for line in text.splitlines():
        if line.startswith(f"{name}{{"):
            labels, value = line.removeprefix(f"{name}{{").split("} ")
            of = dict(pair.split("=") for pair in labels.split(","))
            yield of["engine"].strip('"'), of["role"].strip('"'), float(value)
