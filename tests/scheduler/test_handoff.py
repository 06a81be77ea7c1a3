"""Jobs prefilled on another worker, together with those of the queue: order, pages and slots, and random worlds."""

import functools
import random

import msgspec
import pytest
import torch

from redline.messages.delta import Delta
from redline.messages.handoff import PrefillDone
from redline.messages.job import Abort, Job, JobId, PagesFrom
from redline.messages.step import RowResult, StepResult
from redline.scheduler.config import PlanConfig
from redline.scheduler.planner import Planner
from redline.transport.memory import Disturbance, MemoryTransport
from tests.fakes import hash_page, make_job
from tests.handoff import Pair
from tests.laws.test_law_4_drafts_change_nothing import SAMPLINGS
from tests.tiny_model import BOTH, job, joined, open_engine, prompt, run_alone, tiny_model


def elsewhere(name: str, length: int, max_tokens: int = 100) -> Job:
    """A job with its prompt computed by another worker."""
    one = make_job(name, tuple(range(1, 1 + length)), max_tokens=max_tokens)
    return msgspec.structs.replace(one, pages_from=PagesFrom(worker="p", epoch=1, inbox="p"))


def step_of(planner: Planner) -> list[Delta] | None:
    """Run a step in which all rows give token 5; -> its deltas, or None if there is no step."""
    if (step := planner.next_step()) is None:
        return None
    begun = [begin.slot for begin in step.begins]
    assert len(set(begun)) == len(begun), "two jobs begin in the same slot"
    assert set(begun) <= {row.slot for row in step.rows}, "a job begins without a row"
    rows = tuple(RowResult(tokens=(5,) if row.samples else ()) for row in step.rows)
    deltas = planner.settle(step, StepResult(number=step.number, rows=rows))
    planner.check()
    return deltas


def finish_all(planner: Planner) -> dict[JobId, int]:
    """Run every job to its end; -> the number of tokens of each from here on."""
    tokens: dict[JobId, int] = {}
    while (deltas := step_of(planner)) is not None:
        for delta in deltas:
            tokens[delta.job] = tokens.get(delta.job, 0) + len(delta.tokens)
    return tokens


def test_the_order_holds_where_a_landed_job_begins_while_another_has_lost_its_pages() -> None:
    planner = Planner(8, PlanConfig(step_tokens=128, max_running=2, ahead=0), 1024, hash_page)
    planner.submit(make_job("runs", tuple(range(60)), max_tokens=400))
    step_of(planner)
    planner.transfers.expect(elsewhere("lands", 255))
    assert planner.transfers.open(JobId("lands")) is not None
    told = 0
    for _ in range(240):
        told += sum(len(delta.tokens) for delta in step_of(planner) or ())
    assert planner.load().preemptions == 1, "the running job must lose its pages to the expected one"
    planner.transfers.land(PrefillDone(job=JobId("lands"), tokens=(5,)))
    assert finish_all(planner) == {"lands": 99, "runs": 400 - 1 - told}
    assert planner.idle
    assert planner.load().pages_used == 0


def test_one_that_lost_its_pages_runs_again_before_a_landed_job_that_began_after_it() -> None:
    planner = Planner(8, PlanConfig(step_tokens=128, max_running=2, ahead=0), 320, hash_page)
    planner.submit(make_job("runs", tuple(range(60)), max_tokens=120))
    step_of(planner)
    for name in ("lands", "leaves"):
        planner.transfers.expect(elsewhere(name, 130))
        assert planner.transfers.open(JobId(name)) is not None
    for _ in range(100):
        step_of(planner)
    assert planner.transfers.starved, "the running job was not pre-empted"
    planner.transfers.land(PrefillDone(job=JobId("lands"), tokens=(5,)))
    step_of(planner)
    planner.abort(JobId("leaves"))
    step_of(planner)
    assert [job.job.id for job in planner._table.running] == ["runs", "lands"]
    assert finish_all(planner)
    assert planner.idle


def test_a_landed_job_for_whose_next_token_there_is_no_page_waits_for_one() -> None:
    planner = Planner(5, PlanConfig(step_tokens=128, max_running=2, ahead=0), 320, hash_page)
    planner.submit(make_job("runs", tuple(range(60)), max_tokens=250))
    step_of(planner)
    planner.transfers.expect(elsewhere("lands", 128))
    assert planner.transfers.open(JobId("lands")) is not None
    for _ in range(100):
        step_of(planner)
    assert planner.load().pages_used == 5, "no page may be left"
    planner.transfers.land(PrefillDone(job=JobId("lands"), tokens=(5,)))
    assert finish_all(planner) == {"lands": 99, "runs": 149}
    assert planner.idle


def test_jobs_that_wait_for_pages_of_prompts_that_have_not_come_are_starved_until_one_is_given_up() -> None:
    planner = Planner(12, PlanConfig(step_tokens=128, max_running=4, ahead=0), 1024, hash_page)
    planner.submit(make_job("runs", tuple(range(70)), max_tokens=500))
    step_of(planner)
    for n in range(3):
        planner.transfers.expect(elsewhere(f"{n}", 190 + n, max_tokens=8))
        assert planner.transfers.open(JobId(f"{n}")) is not None
    assert not planner.transfers.starved
    finish_all(planner)
    assert planner.transfers.starved, "the pre-empted job waits for pages, and no running job will free any"
    planner.transfers.compute_here(JobId("2"))
    assert step_of(planner) is not None
    assert not planner.transfers.starved


@functools.cache
def alone(seed: int, length: int, most: int, sampling: str) -> tuple[int, ...]:
    one = job("x", prompt(seed=seed, length=length), max_tokens=most, **SAMPLINGS[sampling])
    return tuple(run_alone(tiny_model(), one).tokens)


@pytest.mark.parametrize("seed", range(2))
def test_in_a_world_of_few_pages_every_answer_is_that_of_one_worker(seed: int) -> None:
    """Some prompts come from another worker and some do not; clients leave; jobs are pre-empted. All jobs end, and
    every page is returned.
    """
    random_, now = random.Random(seed), 0.0

    def disturb(*_: int) -> Disturbance | None:
        return Disturbance(polls=random_.randrange(4)) if random_.random() < 0.3 else None

    engines = [
        open_engine(
            tiny_model(),
            speculation=BOTH if seed % 2 else None,
            step_tokens=90,
            pages=random_.choice(pages),
            max_running=random_.choice([2, 3, 6]),
            max_model_len=500,
        )
        for pages in ([10, 16, 24], [8, 10, 12, 14])
    ]
    both = Pair(*engines, transport=MemoryTransport(disturb, lambda: now), clock=lambda: now)
    worlds = {
        f"{n}": (
            random_.randrange(6),
            random_.randrange(40, 300, 13),
            random_.randrange(2, 190, 17),
            random_.choice(list(SAMPLINGS)),
        )
        for n in range(12)
    }
    waiting = [
        job(name, prompt(seed=of, length=length), max_tokens=most, **SAMPLINGS[sampling])
        for name, (of, length, most, sampling) in worlds.items()
    ]
    left: set[str] = set()
    turns = 0
    try:
        with torch.inference_mode():
            while waiting or not (both.answers.idle and both.computes.idle):
                if waiting and turns % 4 == 0:
                    one = waiting.pop(0)
                    if one.pages and random_.random() < 0.75:
                        both.send([one])
                    else:
                        both.deltas[one.id] = []
                        both.answers.box.put(one)
                if random_.random() < 0.02 and both.deltas:
                    left.add(name := random_.choice(list(both.deltas)))
                    both.answers.box.put(Abort(job=JobId(name)))
                both.turn()
                turns, now = turns + 1, now + 0.01
                assert turns < 8000, "the jobs did not end"
        assert [side.engine.planner.load().pages_used for side in (both.answers, both.computes)] == [0, 0]
    finally:
        both.close()
    for name, world in worlds.items():
        parts = both.deltas[name]
        assert sum(part.finish is not None for part in parts) == 1, name
        if name not in left:
            assert tuple(joined(parts).tokens) == alone(*world), name
