"""Reports of steps and their times."""

import pytest

from redline.messages.step import Row, RowResult, Step, StepResult
from redline.policy.floor import StepFloor, StepWork
from redline.scheduler.active import ActiveJob
from redline.scheduler.timed import EVERY, KEPT, TimedSteps
from tests.fakes import World, make_job


def test_steps_are_told_by_what_they_computed_and_how_long_it_took() -> None:
    world = World(seconds=lambda step, _: (step.number + 1) / 1000)
    world.submit(tuple(range(40)), max_tokens=64)
    world.submit(tuple(range(50, 60)), max_tokens=64)
    while world.planner.load().steps <= 3 * EVERY:
        world.turn()
    world.settle()
    timed = world.planner.load().timed
    prompts = [step for step in timed if step.prompt]
    assert sum(step.prompt for step in prompts) == 50
    assert sum(step.pairs for step in prompts) == 40 * 41 / 2 + 10 * 11 / 2
    answers = [step for step in timed if not step.prompt]
    assert [step.number for step in answers] == [EVERY * of for of in range(4 - KEPT, 4)]
    newest = answers[-1]
    assert (newest.rows, newest.tokens) == (2, 2)
    assert newest.context > 50 + 2 * 2 * EVERY
    assert round(newest.ms) == newest.number + 1
    world.finish()


WORK = StepWork(
    weight_bytes=1000, head_bytes=300, expert_bytes=800, experts_of=8, experts_chosen=2, latent_bytes=48,
    position_ops=1, head_ops=1, pair_ops=1, prompt_pair_ops=1, draft_bytes=10_000, draft_ops=1,
)  # fmt: skip


def test_steps_are_added_up_beside_what_they_take_at_least() -> None:
    world = World(seconds=lambda step, _: 0.25)
    world.planner.stand_beside(StepFloor(WORK, bytes_per_s=1e6, ops_per_s=1e12))
    world.submit(tuple(range(40)), max_tokens=20)
    while world.planner.load().steps <= EVERY + 1:
        world.turn()
    world.settle()
    prompts, decode = world.planner.load().step_times
    assert (prompts.kind, prompts.steps, prompts.seconds) == ("prompts", 1, 0.25)
    assert prompts.floor_s == pytest.approx((1000 + 300 + 800 * (1 - 0.75**40) + 40 * 48) / 1e6)
    assert (decode.kind, decode.steps, decode.seconds) == ("decode", 1, 0.25)  # one of EVERY steps
    context = 40 + EVERY - 1  # the first step was the prompt's
    assert decode.floor_s == pytest.approx((1000 + 300 + 800 * 2 / 8 + context * 48) / 1e6)
    world.finish()


def test_drafts_that_were_verified_are_positions_and_each_pass_of_the_drafter_is_read() -> None:
    jobs = [ActiveJob(make_job("a", range(10), max_tokens=90), 0, 100) for _ in range(2)]
    for job in jobs:
        job.computed = 52  # includes the two tokens that the row gave
    rows = tuple(Row(slot=slot, start=None, count=4, drafts=3, propose=3, drafting=True) for slot in range(2))
    verified = (RowResult(tokens=(1, 2), proposed=3, accepted=1),) * 2
    for drafted, passes in ((None, 3), ((), 0), ((2,), 2)):
        timed = TimedSteps()
        timed.floor = StepFloor(WORK, bytes_per_s=1e6, ops_per_s=1e12)
        result = StepResult(number=0, rows=verified, drafted=drafted)
        timed.took(Step(number=0, rows=rows), jobs, result, 1.0)
        [sums] = timed.sums
        read = 1000 + 300 + 800 * (1 - 0.75**8) + 2 * (50 + 4) * 48 + passes * 10_000
        assert sums.floor_s == pytest.approx(read / 1e6)


def test_a_machine_that_was_not_measured_has_no_sums() -> None:
    world = World(seconds=lambda step, _: 0.25)
    world.submit(tuple(range(40)), max_tokens=4)
    world.finish()
    assert world.planner.load().timed
    assert not world.planner.load().step_times


def test_what_the_host_does_between_two_steps_counts_while_somebody_waits() -> None:
    """Steps of 2 ms, the next one ending 3 ms after the one before; then no job was there for a second."""
    now = 0.0
    timed = TimedSteps(lambda: now)
    one, other = (ActiveJob(make_job(name, tuple(range(10)), max_tokens=90), 0, 100) for name in "ab")
    row = Row(slot=0, start=None, count=1)
    for number, (at, job) in enumerate(((5.0, one), (5.003, one), (6.003, other), (6.006, other))):
        now = at
        result = StepResult(number=EVERY * number, rows=(RowResult(tokens=(1,)),))
        timed.took(Step(number=EVERY * number, rows=(row,)), [job], result, 0.002)
        assert timed.newest[-1].ms == pytest.approx((2, 3, 2, 3)[number])


def test_whoever_watches_is_told_of_every_step_with_its_floor_and_the_tokens_that_jobs_got() -> None:
    world = World(seconds=lambda step, _: 0.25)
    seen: list[tuple[int, float, int]] = []
    world.planner.watch_steps(lambda step, floor_s, tokens: seen.append((step.prompt, floor_s, tokens)))
    world.submit(tuple(range(40)), max_tokens=20)
    while world.planner.load().steps <= EVERY + 1:
        world.turn()
    world.settle()
    world.finish()
    assert [prompt for prompt, _, _ in seen if prompt] == [40]
    assert sum(tokens for prompt, _, tokens in seen if not prompt) == 19, "the first token belongs to the prompt's step"
    assert {floor_s for _, floor_s, _ in seen} == {0.0}, "no rates were measured"
