"""Two mixed workers (prefill and decode) of one server: placement of conversations, and the operator's view."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from redline.chat.page_hashes import page_hash
from redline.messages.job import PageHash
from redline.messages.kv_events import BlockStored, decode_batch
from redline.messages.kv_sockets import Subscriber
from redline.model.k2.write import random_checkpoint
from redline.router.blocks import Blocks
from redline.router.index import PageIndex
from tests import forked
from tests.deploy.test_serve import Server, wait_for
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

KEY = "sk-admin-0123456789abcdef"
KNOWN_TIMES = """
import sys
from redline.__main__ import main
from redline.router import latency_model, worker_registry
from redline.policy.steps import StepModel
worker_registry.MOVE_S = 60.0
latency_model.LatencyModel.model = StepModel(base=1.0, row=0.1, prompt=0.1)
sys.argv[0] = "redline"
main()
"""  # a server with a router that assumes these step times in ms, and does not take a briefly stopped worker for silent
FIRST = "the functions of a page " * 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Server]:
    random_checkpoint(folder / "tiny", kernel_config(vocab_size=TINY_VOCAB))
    write_tiny_tokenizer(folder / "tiny")
    (folder / "keys.txt").write_text(f"{KEY}\n")
    (folder / "two.toml").write_text(
        'weights = "tiny"\nport = 0\nadmin_port = 0\nadmin_keys_file = "keys.txt"\n[engine]\nkv_memory = "1MB"\n'
        f'host_memory = "20MB"\n[engine.speculation]\ntype = "suffix"\n[events]\nendpoint = "ipc://{folder}/kv"\n'
        f'replay = "ipc://{folder}/again"\ntopic = "kv@tiny"\n[[workers]]\ncount = 2\n'
    )
    server = Server(folder / "two.toml", command=(sys.executable, "-c", KNOWN_TIMES, "serve"))
    try:
        server.until_ready()
        wait_for(lambda: all(each["ready"] for each in admin(server, "status")["workers"].values()), server)
        yield server
        server.ends_cleanly(everyone=False)
    finally:
        server.close()


def address(server: Server) -> str:
    found = re.search(r"admin routes are at (http://\S+)/admin/status", server.said)
    assert found is not None, server.said
    return found[1]


def admin(server: Server, path: str) -> dict[str, Any]:
    request = Request(f"{address(server)}/admin/{path}", headers={"authorization": f"Bearer {KEY}"})
    with urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


def said(server: Server, prompt: str, id: str) -> Any:
    """A complete answer of 40 tokens."""
    return server.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=40, temperature=0, extra_headers={"X-Request-Id": id},
        extra_body={"ignore_eos": True},
    )  # fmt: skip


def test_a_conversation_returns_to_the_worker_that_has_its_pages_and_the_operator_can_ask_why(two: Server) -> None:
    """The step times are set by the test, so the worker that has its pages cached costs least."""
    said(two, FIRST, "first")
    said(two, "another " * 120, "other")
    wait_for(lambda: sum(w["load"]["pages_cached"] > 0 for w in admin(two, "status")["workers"].values()) == 2, two)
    again = said(two, FIRST + "and one thing more", "again")
    assert again.usage.prompt_tokens_details.cached_tokens >= 128
    first, other, last = (admin(two, f"requests/{id}")["jobs"][0] for id in ("first", "other", "again"))
    (sent,) = last["sent"]
    assert sent["worker"] == first["sent"][0]["worker"] != other["sent"][0]["worker"]
    assert sent["expected"]["cached_tokens"] == last["cached_tokens"] == again.usage.prompt_tokens_details.cached_tokens
    assert sent["instead"][0]["cached_tokens"] == 0
    assert sent["why"].endswith("tokens are cached there, 0 elsewhere")
    assert last["finish"] == "length"
    assert last["tokens"] == 40
    assert 0 < last["first_token_since_sent_s"] <= last["first_token_s"] <= last["ended_s"]
    wait_for(lambda: f", on {sent['worker']}, id again" in two.said, two)


def explained(server: Server, id: str) -> "subprocess.CompletedProcess[str]":
    return forked.run(
        [sys.executable, "-m", "redline", "explain", id, "--url", address(server)],
        capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "REDLINE_ADMIN_KEY": KEY, "COLUMNS": "400"},
    )  # fmt: skip


def test_redline_explain_prints_it(two: Server) -> None:
    said(two, FIRST, "shown")
    done = explained(two, "shown")
    assert done.returncode == 0, done.stderr
    assert re.search(r"> worker-[01] ", done.stdout)
    assert "first token, " in done.stdout
    assert "length, after 40 tokens" in done.stdout
    unknown = explained(two, "nobody/s")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert unknown.stderr.startswith("error: no trace of request nobody")


def test_where_pages_are_short_the_operator_is_told_who_waited_for_whom_and_how_long(two: Server) -> None:
    two.client.completions.create(
        model="tiny", prompt=FIRST, n=6, max_tokens=700, temperature=0, extra_headers={"X-Request-Id": "many"},
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    jobs = admin(two, "requests/many")["jobs"]
    pauses = [pause for job in jobs for pause in job["paused"]]
    assert pauses, "a worker has 27 pages, and three of these answers need more"
    for pause in pauses:
        assert pause["pages"] == 27
        assert pause["by"] is None or pause["by"].startswith("many.")
        assert 0 < pause["again_tokens"] <= pause["lost_tokens"] < 1061
        assert 0 <= pause["waited_s"] < pause["paused_s"]
        assert pause["again_expected_s"] > 0
    assert all(job["tokens"] == 700 for job in jobs)
    job = next(job for job in jobs if job["paused"])
    wait_for(lambda: f"was preempted on {job['paused'][0]['worker']} after " in two.said, two)
    assert "pre-empted on worker-" in explained(two, "many").stdout


def test_who_listens_to_events_in_vllms_format_knows_what_is_cached_where(two: Server, folder: Path) -> None:
    def cached() -> dict[str, int]:
        return {name: each["load"]["pages_cached"] for name, each in admin(two, "status")["workers"].items()}

    def name(previous: PageHash | None, tokens: tuple[int, ...], _salt: str) -> PageHash:
        return page_hash(previous, tokens, "model")

    answer = two.client.completions.create(
        model="tiny", prompt=FIRST, max_tokens=2, extra_body={"return_token_ids": True}
    )
    known, tokens = dict[str, int](), set[tuple[int, ...]]()
    for suffix, worker in (("", "worker-0"), (".1", "worker-1")):
        index, blocks = PageIndex(), Blocks(worker, name)
        index.begin(worker)
        with Subscriber(f"ipc://{folder}/kv{suffix}", f"ipc://{folder}/again{suffix}", "kv@tiny") as listens:
            heard = 0

            def knows_all(
                listens: Subscriber = listens, index: PageIndex = index, blocks: Blocks = blocks, worker: str = worker
            ) -> bool:
                nonlocal heard
                for number, batch in listens.catch_up() + listens.receive(0.1):
                    heard += 1
                    events = decode_batch(batch)
                    assert events.worker == int(worker[-1])
                    tokens.update(tuple(each.token_ids[:64]) for each in events.events if isinstance(each, BlockStored))
                    if (news := blocks.take(number, batch)) is not None:
                        assert index.take(worker, news)
                return heard > 0 and index.pages_of(worker) == cached()[worker]

            wait_for(knows_all, two)
        index.check()
        known[worker] = index.pages_of(worker)
        assert not blocks.left_out
    assert known == cached()
    ids = answer.choices[0].model_dump()["prompt_token_ids"]
    assert sum(known.values()) >= len(ids) // 64 > 0
    assert tuple(ids[:64]) in tokens
