"""The figures computed from the bystander's notes; and a small run of the program against a real server."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Coroutine
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest

from lab import bystander
from lab.attack.attacks import ATTACKS, World
from lab.attack.random_requests import draw, requests
from lab.attack.raw_http import Reply
from lab.attack.watch import Chunk, Knock, Notes, joined, read
from lab.bystander import Sample, fresh_prompts, memory_slopes, slope, too_long
from redline.api.config import Limits
from redline.messages.job import PAGE_TOKENS
from tests import forked
from tests.api import world
from tests.api.fake_engine import say

ROOT = Path(__file__).parents[2]


def told(*times: float, waited: float = 0.0) -> list[list[Chunk]]:
    """One answer; its reader waited for a CPU core before the last chunk."""
    return [[Chunk(at, waited if at == times[-1] else 0.0) for at in times]]


def knocks(*took: float, excused: float = 0.0) -> list[Knock]:
    return [Knock(0.1 * place, seconds, excused) for place, seconds in enumerate(took)]


def test_a_step_of_the_engine_is_no_pause():
    """Both streams are silent, and the event loop answers."""
    pauses = read(Notes(knocks(0.001, 0.001), [told(0.0, 0.01, 0.41, 0.42), told(0.001, 0.011, 0.411, 0.421)]))
    assert pauses.gap.most == pytest.approx(400, abs=1)
    assert pauses.engine == pytest.approx(399, abs=2)
    assert pauses.beyond == 1.0


def test_an_event_loop_that_does_not_answer_is_a_pause():
    pauses = read(Notes([Knock(0.02, 0.37, 0.0)], [told(0.0, 0.01, 0.41), told(0.0, 0.01, 0.41)]))
    assert pauses.beyond == 370.0
    assert pauses.engine == pytest.approx(30, abs=0.1), "only the rest of the silence"


def test_waiting_for_a_core_is_nobodys_pause():
    pauses = read(Notes(knocks(0.3, excused=0.29), [told(0.0, 0.3), told(0.0, 0.3)]))
    assert pauses.knock.most == 300.0
    assert pauses.beyond == 10.0


def test_a_stream_that_the_engine_leaves_out_pauses():
    """The first chunk of the other stream may be from the step at which the gap begins, so only the second one
    counts.

    A step's chunk may come in two parts.
    """
    other = told(0.001, 0.1, 0.2, 0.3, 0.399)
    assert read(Notes([], [told(0.0, 0.4), other])).left_out == pytest.approx(300, abs=0.1)
    assert read(Notes([], [told(0.0, 0.4), told(0.001, 0.399)])).left_out == 1.0
    assert read(Notes([], [told(0.0, 0.4), told(0.001, 0.0015, 0.399)])).left_out == 1.0
    assert read(Notes([], [told(0.0, 0.4, waited=0.25), other])).beyond == pytest.approx(50, abs=0.1)


def test_between_two_answers_there_is_no_gap():
    answers = [*told(0.0, 0.1), *told(5.0, 5.1)]
    pauses = read(Notes([], [answers, told(0.0, 0.1, 5.0, 5.1)]))
    assert pauses.left_out == 0.0
    assert pauses.chunks == 8
    assert read(joined([Notes([], [told(0.0, 0.1)]), Notes([], [told(5.0, 5.1)], 2)])).refused == 2


def test_memory_that_grows_with_requests_is_seen_and_memory_that_has_grown_is_not():
    mib = 1 << 20
    grows = [Sample(float(k), 10 * k, 50 * mib + k * mib // 10, 300 * mib) for k in range(100)]
    assert memory_slopes(grows) == {"api": 10.0, "worker": 0.0}
    grown = [Sample(float(k), 10 * k, min(k, 40) * mib, 300 * mib) for k in range(100)]
    assert memory_slopes(grown)["api"] == 0.0
    assert slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == 2.0


def test_prompts_that_touch_pages_share_none():
    """A shared page would be a prefix cache hit, and would not be written."""
    prompts = [json.loads(one)["prompt"] for one in fresh_prompts(105_000, 65_536)]
    assert sum(map(len, prompts)) >= 105_000
    first_pages = {tuple(prompt[:PAGE_TOKENS]) for prompt in prompts}
    assert len(first_pages) == len(prompts)


def test_texts_fill_what_the_api_keeps_and_no_engine_hears_of_them():
    most = 1 << 20

    async def fill() -> None:
        async with world.World(say([1]), Limits(known_bytes=most), max_model_len=4096) as served:
            for request in too_long(most, 4096):
                reply = await served.http.post("/v1/chat/completions", content=request)
                assert reply.status_code == 400
                assert reply.json()["error"]["code"] == "context_length_exceeded"
            assert most - 10_000 < served.gateway.encoder.known.bytes <= most  # pyright: ignore[reportPrivateUsage]
            assert served.engine.jobs == []

    asyncio.run(fill())


def test_random_requests_are_a_function_of_their_seed_and_of_every_route():
    first, again, other = (list(islice(requests(seed), 400)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    routes = Counter(request.route for request in first)
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "GET", "other"} <= set(routes)
    assert {"leave_s", "pause_s", "pieces"} <= {key for request in first for key in request.how}
    rng = random.Random(0)
    assert any(draw(rng).shape == "stream" for _ in range(50))


def test_attacks_have_names_of_their_own():
    assert max(Counter(attack.name for attack in ATTACKS).values()) == 1
    assert {"A1", "A2", "A4", "A5", "A7", "A8", "A9"} <= {attack.item for attack in ATTACKS}


class Listener(World):
    """Sends nothing, and records the size of each body."""

    def __init__(self) -> None:
        super().__init__(port=0, token=1, blank=2, context=8192)
        self.sizes: list[int] = []

    async def send(self, request: bytes, **how: Any) -> Reply:
        self.sizes.append(len(request.partition(b"\r\n\r\n")[2]))
        return Reply("answered", 200, b"", 0.0)


@pytest.mark.parametrize(
    "name", ["many_ids", "many_large_bodies", "millions_of_prompts", "long_past", "odd_json", "too_large_bodies"]
)
def test_large_bodies_reach_the_parser_in_all_attacks_but_one(name: str):
    (prepare,) = [attack.prepare for attack in ATTACKS if attack.name == name]
    listener = Listener()
    asyncio.run(cast("Coroutine[Any, Any, None]", prepare(listener)()))
    most = Limits().body_bytes
    if name == "too_large_bodies":
        assert min(listener.sizes) > most
    else:
        assert most / 2 < max(listener.sizes) <= most


@pytest.mark.slow
def test_a_small_run_against_a_real_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bystander, "POLITE_TOKENS", 100)
    saved = tmp_path / "bystander.json"
    sizes = {
        "kv-memory": "15MB",
        "kv-tokens": 1000,
        "known-bytes": 1,
        "control": 0.5,
        "requests": 12,
        "minutes": 1,
        "save": saved,
    }
    words = [f"--{name}={value}" for name, value in sizes.items()]
    only = [f"--only={name}" for name in ("tiny_penalty", "foreign_pages")]
    with forked.all_processes():
        assert bystander.main([str(ROOT / "models" / "kimi-nano"), *words, *only]) == 0
    record = json.loads(saved.read_text())
    phases = {phase["name"]: phase for phase in record["phases"]}
    assert {"control", "polite", "tiny_penalty", "foreign_pages", "random"} <= set(phases)
    assert phases["control"]["pauses"]["chunks"] > 2
    assert phases["tiny_penalty"]["replies"].get("unanswered", 0) == 0
    assert sum(phases["random"]["replies"].values()) == record["random"]["sent"] == 12
    assert all(phase["right"] for phase in phases.values()), "greedy answers are unchanged"
    assert record["random"]["odd"] == []
    assert record["end"]["clean"], record["end"]
    assert saved.with_suffix(".png").stat().st_size > 1000
    assert "the end:" in capsys.readouterr().out
