"""A simulated worker, compared with the same steps taken one by one, and with the product's own planner."""

import math
import random
from collections import Counter

import msgspec
import pytest

from redline.messages.job import PAGE_TOKENS
from redline.messages.step import Step
from redline.policy.expected import WorkerModel
from redline.policy.pairs import Work, expanded_of, pairs_of
from redline.policy.steps import StepModel
from redline.simulate.worker import Played, Worker, gap_ms
from tests.fakes import Story, World

STEPS = StepModel(base=4.0, row=0.3, context=1e-3, prompt=0.05, pair=2e-5, expand=1e-3)
MODEL = WorkerModel(name="made", steps=STEPS, step_tokens=128, slots=8, kv_tokens=60_000)
Times = tuple[float, float]  # seconds: a job's first token, its last
Asked = tuple[float, int, int]  # a job's arrival time, tokens of its prompt and of its answer


def played(
    asked: list[Asked], model: WorkerModel = MODEL, ttft_s: float = math.inf, slow_s: float = math.inf
) -> tuple[list[Times], Worker]:
    worker = Worker(0, model, "both", Counter(), slow_s)
    jobs = [Played(index, at, prompt, output, "", ttft_s) for index, (at, prompt, output) in enumerate(asked)]
    ends: dict[int, float] = {}
    coming = 0
    while coming < len(jobs) or worker.wake != math.inf:
        if coming < len(jobs) and jobs[coming].came <= worker.wake:
            job = jobs[coming]
            job.computer = job.answerer = worker
            worker.compute(job, job.came)
            coming += 1
            continue
        now = worker.wake
        whole, ended = worker.advance()
        for job in whole:
            job.first = now
        for job in ended:
            ends[job.index] = now
    return [(job.first, ends[job.index]) for job in jobs], worker


class Known:
    """A forecast that is always right."""

    known = True

    def took(self, work: Work, ms: float) -> None:
        assert work.rows or work.prompt, f"a step without work took {ms} ms"

    def ms(self, work: Work) -> float:
        return STEPS.step_ms(work)


def planned(asked: list[Asked], ttft_s: float | None = None, **config: float) -> list[Times]:
    """The same jobs by the product's planner; each step takes the model's time."""
    pages = MODEL.kv_tokens // PAGE_TOKENS
    config = {"step_tokens": MODEL.step_tokens, "max_running": MODEL.slots, "ahead": 0, **config}
    world = World(
        pages=pages,
        max_model_len=4_000,
        seconds=lambda step, _: STEPS.step_ms(work_of(world, step)) / 1e3,
        forecast=Known(),
        **config,  # type: ignore[arg-type]
    )
    stories: list[Story] = []
    firsts: dict[int, float] = {}
    ends: dict[int, float] = {}
    now = 0.0
    while len(stories) < len(asked) or not world.planner.idle:
        while len(stories) < len(asked) and asked[len(stories)][0] <= now:
            _, prompt, output = asked[len(stories)]
            tokens = tuple(7 + (len(stories) * 31 + place) % 50 for place in range(prompt))
            ttft_ms = None if ttft_s is None else 1e3 * ttft_s
            stories.append(world.submit(tokens, max_tokens=output, salt=str(len(stories)), ttft_ms=ttft_ms))
        step = world.plan()
        if step is None:
            now = asked[len(stories)][0]
            continue
        now += STEPS.step_ms(work_of(world, step)) / 1e3
        world.settle()
        for index, story in enumerate(stories):
            if story.tokens:
                firsts.setdefault(index, now)
            if story.finish is not None:
                ends.setdefault(index, now)
    assert [len(story.tokens) for story in stories] == [output for _, _, output in asked]
    return [(firsts[index], ends[index]) for index in range(len(asked))]


def work_of(world: World, step: Step) -> Work:
    prompt, pairs, rows, context, expanded = 0, 0.0, 0, 0, 0
    for row in step.rows:
        if row.start is None:
            rows, context = rows + 1, context + len(world.runner.slots[row.slot].tokens) - 1
        else:
            prompt, pairs = prompt + row.count, pairs + pairs_of(row.start, row.count)
            expanded += expanded_of(row.start, row.count)
    return Work(prompt, pairs, rows, context, expanded)


def some_jobs(count: int, every_s: float, seed: int) -> list[Asked]:
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(1 / every_s)
        found.append((at, draw.choice((draw.randrange(5, 100), draw.randrange(200, 900))), draw.randrange(1, 60)))
    return found


@pytest.mark.parametrize("every_s", [1.0, 0.15, 0.05])
def test_times_are_those_of_the_products_planner(every_s: float):
    """From hardly any load to more than the capacity. The two differ in how often a job may be passed over."""
    asked = some_jobs(40, every_s, seed=5)
    ours, theirs = played(asked)[0], planned(asked)
    for place, most_off in ((0, 0.05), (1, 0.02)):
        took = [sum(times[place] - at for times, (at, _, _) in zip(all, asked, strict=True)) for all in (ours, theirs)]
        assert took[0] == pytest.approx(took[1], rel=most_off), (place, took)


@pytest.mark.parametrize(("every_s", "ttft_s"), [(0.15, None), (0.08, 0.5)])
def test_steps_that_are_bounded_are_so_as_the_planner_bounds_them(every_s: float, ttft_s: float | None):
    asked, long = some_jobs(40, every_s, seed=5), {"step_tokens": 512}
    model = msgspec.structs.replace(MODEL, step_ms=25.0, **long)
    ours = played(asked, model, math.inf if ttft_s is None else ttft_s)[0]
    theirs = planned(asked, ttft_s, step_ms=25.0, **long)
    whole = planned(asked, **long)
    took = [
        [sum(times[place] - at for times, (at, _, _) in zip(all, asked, strict=True)) for place in (0, 1)]
        for all in (ours, theirs, whole)
    ]
    assert took[0] == pytest.approx(took[1], rel=0.1), took
    assert took[1][0] > 1.05 * took[2][0], "the bound delays no first token: it is not reached"


def test_prompts_wait_for_a_slot_while_answers_alone_take_longer_than_a_bound() -> None:
    model = msgspec.structs.replace(MODEL, slots=2, step_ms=1.0)
    times, worker = played([(0.0, 40, 30), (0.0, 40, 30), (0.05, 40, 30)], model)
    assert times[2][0] > min(times[0][1], times[1][1])
    worker.check()


def test_gaps_that_are_longer_than_a_bound_are_counted_for_each_answer():
    """Without a prompt 20 tokens take steps of 4.3 ms plus 1 us per token of context; a prompt slows a step down."""
    asked = [(0.0, 10, 20), (0.03, 100, 1)]
    jobs, worker = [], Worker(0, MODEL, "both", Counter(), 6e-3)
    for index, (at, prompt, output) in enumerate(asked):
        jobs.append(Played(index, at, prompt, output, ""))
        jobs[-1].computer = jobs[-1].answerer = worker
        while worker.wake < at:
            worker.advance()
        worker.compute(jobs[-1], at)
    while worker.wake != math.inf:
        worker.advance()
    assert [job.slow for job in jobs] == [1, 0]


def test_one_job_alone_takes_its_steps():
    (first, last), worker = *played([(1.0, 300, 50)])[0], played([(1.0, 300, 50)])[1]
    assert first - 1.0 == pytest.approx(STEPS.prompt_ms(0, 300, 128) / 1e3, rel=0.02)
    steps = sum(STEPS.decode_ms(1, 301 + place) for place in range(49)) / 1e3
    assert last - first == pytest.approx(steps, rel=1e-6)
    assert worker.computed == 300
    assert worker.busy_s == pytest.approx(last - 1.0)


def test_gaps_between_tokens_are_counted_each():
    asked = some_jobs(40, 0.1, seed=2)
    times, worker = played(asked)
    assert worker.gaps.total() == sum(output - 1 for _, _, output in asked)
    waited = sum(last - first for first, last in times)
    counted = sum(count * gap_ms(kind) for kind, count in worker.gaps.items()) / 1e3
    assert counted == pytest.approx(waited, rel=0.02)


def test_two_tokens_a_step_take_half_the_steps():
    one, two = (
        played([(0.0, 100, 101)], msgspec.structs.replace(MODEL, tokens_per_step=tokens))[0][0] for tokens in (1.0, 2.0)
    )
    assert (two[1] - two[0]) == pytest.approx((one[1] - one[0]) / 2, rel=0.01)


def test_who_finds_no_slot_waits_and_everything_is_given_back():
    asked = [(0.0, 50, 30)] * 20
    times, worker = played(asked)
    firsts = sorted(first for first, _ in times)
    assert firsts[8] >= min(last for _, last in times), (
        "the ninth job for eight slots began before another one had ended"
    )
    worker.check()
    assert worker.rows == 0


def test_a_prompt_that_is_larger_than_all_pages_runs_alone():
    asked = [(0.0, 500, 30), (0.0, 2_000, 20), (0.0, 500, 30)]
    times, worker = played(asked, msgspec.structs.replace(MODEL, kv_tokens=1_000))
    assert all(math.isfinite(last) for _, last in times)
    worker.check()
