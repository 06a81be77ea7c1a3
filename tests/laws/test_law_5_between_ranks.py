"""Law 5 for workers with several ranks: a prompt's pages come from rank 0 of the prefill worker, and reach all ranks of
the decode worker.

The last tests here end the ranks of the engines that the tests before them use.
"""

import itertools
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from redline.chat.tokenizer import Tokenizer
from redline.errors import RankLost
from redline.messages.handoff import WorkerDown
from redline.messages.job import Grammar, Job
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.write import random_checkpoint
from redline.worker import ranks
from redline.worker.config import EngineConfig, Learned
from redline.worker.engine import EngineCore
from tests import forked, tiers
from tests.handoff import Pair
from tests.laws.test_law_4_drafts_change_nothing import SAMPLINGS
from tests.laws.test_law_6_ranks_change_nothing import counted
from tests.tiny_model import Answer, job, kernel_config, prompt, run
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer
from tests.waiting import LIMIT_S, until

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
AREA = 1 << 17  # bytes of a transfer buffer, so small that a prompt takes several KV chunks


@pytest.fixture(autouse=True, scope="module")
def parcels_are_waited_for() -> Iterator[None]:
    """Wait for KV chunks without a time limit, so that slow machines pass."""
    with mock.patch("redline.worker.kv_transfer.receiver.READ_S", LIMIT_S):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a drafter, which can be divided over two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    config = kernel_config(vocab_size=TINY_VOCAB + 2, moe_intermediate_size=64, intermediate_size=64)
    random_checkpoint(folder, config)
    write_tiny_tokenizer(folder)
    torch.manual_seed(0)
    Eagle3(Eagle3Config.for_target(config)).save(folder / "drafter")
    return folder


def opened(folder: Path, count: int, **tiers: Any) -> EngineCore:
    asked: dict[str, Any] = {"kv_dtype": "float32", "max_model_len": 1024, "max_running": 8, "step_tokens": 100}
    drafts = Learned(drafter=str(folder / "drafter"), adaptive=False)
    return EngineCore.load(
        folder, EngineConfig(kv_memory=20_000_000, device="cpu", ranks=count, speculation=drafts, **asked, **tiers)
    )


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[Callable[[str], EngineCore]]:
    """Engines by a name that begins with the number of ranks, with an empty prefix cache; a new one in place of one
    whose ranks a test has ended. The engine "2 more" has KV offload tiers for evicted pages.
    """
    made: dict[str, EngineCore] = {}
    disks = (folder / f"disk {number}" for number in itertools.count())

    def engine(name: str) -> EngineCore:
        if name in made and int(name[0]) > 1 and others(made[name]).reason:
            made.pop(name).runner.close()
        if name not in made:
            below = {"host_memory": 1 << 24, "disk": str(next(disks)), "disk_size": 1 << 28}
            with forked.all_processes():
                made[name] = opened(folder, int(name[0]), **below if name.endswith("more") else {})
        made[name].planner.forget_idle()
        return made[name]

    yield engine
    for each in made.values():
        each.runner.close()


def jobs(folder: Path) -> list[Job]:
    tokens = Tokenizer.open(folder).encode("the functions of a page and " * 20)
    grammar = Grammar(text=f"start: json\njson: %json {json.dumps(SCHEMA)}")
    return [
        job("grammar", tokens[:90], max_tokens=24, grammar=grammar),
        job("whole pages", prompt(seed=8, length=128), max_tokens=20),
        job("scored", prompt(seed=9, length=100), max_tokens=10, prompt_logprobs=1),
        *(
            job(name, prompt(seed=n, length=70 + 90 * n), max_tokens=30, **how)
            for n, (name, how) in enumerate(SAMPLINGS.items())
        ),
    ]


@pytest.fixture(scope="module")
def expected(folder: Path, engines: Callable[[str], EngineCore]) -> dict[str, Answer]:
    with torch.inference_mode():
        return run(engines("1"), jobs(folder))


@pytest.mark.parametrize(("computes", "answers"), [("1", "2"), ("2", "1"), ("2", "2 more")])
def test_answers_are_those_of_one_worker_of_one_rank(
    computes: str, answers: str, folder: Path, engines: Callable[[str], EngineCore], expected: dict[str, Answer]
) -> None:
    """Over float32 pages, in which another order of summation does not change a token (see law 6)."""
    both = Pair(engines(computes), engines(answers), area_bytes=AREA)
    got = both.run(jobs(folder)[:4], jobs(folder)[4:])
    assert both.answers.exchange.counts == {"taken over": len(expected)}
    assert both.answers.engine.planner.load().pages_used == both.computes.engine.planner.load().pages_used == 0
    assert counted(got, expected, near=1e-3) == 0
    assert sum(one.accepted for one in got.values()) == sum(one.accepted for one in expected.values()) > 0
    both.close_exchanges()


def test_pages_below_the_cache_come_back_to_every_rank(
    folder: Path, engines: Callable[[str], EngineCore], expected: dict[str, Answer]
) -> None:
    """From host memory, from disk by way of host memory, and directly from disk if host memory has no room."""
    engine = engines("2 more")
    assert engine.tiers is not None
    engine.tiers.prefills.observed = lambda *_: None  # type: ignore[method-assign]  # always fetch all pages
    store = engine.tiers.store
    assert counted(tiers.run(engine, jobs(folder)), expected, near=1e-3) == 0
    for tier, room in (("host", store._tables.room), ("disk", store._tables.room), ("disk", lambda: None)):
        engine.planner.forget_idle()
        store.flush(tiers.WAIT_S)
        if tier == "disk":
            for hash in [*store._tables.host.clean]:
                store._tables.host.drop(hash)
        before = tiers.tier(engine, tier).hit_tokens
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store._tables, "room", room)
            again = tiers.run(engine, jobs(folder))
        assert tiers.tier(engine, tier).hit_tokens - before >= 64 * (len(again) - 1)
        assert counted(again, expected, near=1e-3) == 0
        assert [name for name, one in again.items() if not one.cached_tokens] == ["scored"]


def placing(engines: Callable[[str], EngineCore], name: str) -> Pair:
    """A pair in which the second engine, of this name, has placed one KV chunk and waits for more."""
    run(engines(name), [job("first", prompt(seed=22, length=20))])  # until then a rank may be loading
    both = Pair(engines("1 of prompts"), engines(name), area_bytes=AREA)
    memory = others(both.answers.engine).memory
    before = memory.told
    both.send([job("long", prompt(seed=20, length=900), max_tokens=900, stop_ids=())])
    while memory.told == before:
        both.turn()
    return both


def others(engine: EngineCore) -> ranks.Ranks:
    return engine.runner._ranks  # type: ignore[attr-defined]


def lost(both: Pair) -> str:
    """The error of the second worker's ranks, once they are lost."""
    return str(until(lambda: others(both.answers.engine).reason))


def given_back(both: Pair) -> None:
    """The prefill worker is notified that the other has ended: all of its pages are freed, and it continues."""
    side = both.computes
    side.exchange.hear(WorkerDown(worker="decode", epoch=1))
    for _ in range(3):
        side.turn()
    assert side.idle
    assert side.engine.planner.load().pages_used == 0
    asked = job("next", prompt(seed=21, length=90))
    assert run(side.engine, [asked])["next"].finish == "length"


@torch.inference_mode()
def test_a_rank_that_is_killed_while_parcels_come_ends_its_worker_and_no_other(
    engines: Callable[[str], EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "END_S", 1.0)
    both = placing(engines, "2")
    others(both.answers.engine)._processes[0].kill()
    said = lost(both)
    assert said.startswith("rank 1 failed in step "), said
    assert said.endswith("it exited with code -9")
    with pytest.raises(RankLost, match="rank 1 failed in step"):
        until(both.turn)  # a thread detects that a KV chunk is no longer being read
    given_back(both)


@torch.inference_mode()
def test_a_rank_that_is_stopped_with_a_parcel_and_no_step_is_named(
    engines: Callable[[str], EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "SILENT_BEATS", 3)
    run(engines("2 more"), [job("first", prompt(seed=22, length=20))])
    both = Pair(engines("1 of prompts"), engines("2 more"), area_bytes=AREA)
    others(both.answers.engine)._processes[0].send_signal(signal.SIGSTOP)
    number = others(both.answers.engine).memory.told + 1
    both.send([job("long", prompt(seed=20, length=900), max_tokens=900, stop_ids=())])
    while others(both.answers.engine).memory.told < number:
        both.turn()
    assert lost(both) == (
        f"rank 1 has kept rank 0 waiting for 2 s with KV chunk {number:,}: its process sends no heartbeats"
    )
    given_back(both)
