"""Scheduling order: a short prompt does not wait for long ones, tenants take turns, and no job starves."""

import random

import pytest

from tests.fakes import Story, World

CHUNK = 512  # tokens per step


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + at * at) % 89 for at in range(length))


class Timed(World):
    """A world in which a step's time is proportional to its tokens, and no step overlaps another (a CPU)."""

    def __init__(self, pages: int = 400, **config: int) -> None:
        super().__init__(pages=pages, max_model_len=4000, ahead=0, **config)
        self.now = 0
        self.first_at: dict[str, int] = {}

    def turn(self) -> None:
        step = self.plan()
        if step is None:
            return
        self.now += sum(row.count for row in step.rows)
        self.settle()
        for story in self.stories.values():
            if story.tokens:
                self.first_at.setdefault(story.job.id, self.now)

    def until_first(self, story: Story) -> int:
        """Run until the job has its first token; -> the time of it."""
        while story.job.id not in self.first_at:
            self.turn()
        return self.first_at[story.job.id]


@pytest.mark.parametrize("before", range(14))
def test_a_short_prompt_does_not_wait_behind_six_long_ones(before: int):
    """Its first token comes within twice the sum of its time alone and of a full chunk of the others."""
    world = Timed(step_tokens=CHUNK)
    long = [world.submit(prompt(2000, first), max_tokens=3) for first in range(6)]
    for _ in range(before):
        world.turn()
    came = world.now  # a step has just begun: the worst moment for an arrival
    world.turn()
    hi = world.submit(prompt(25, 70), max_tokens=3)
    assert world.until_first(hi) - came <= 2 * (25 + CHUNK)
    world.finish()
    assert all(story.finish == "length" for story in [*long, hi])


def test_long_prompts_alone_are_computed_one_after_the_other():
    """Sharing a step between them would delay the first ones and speed up none."""
    world = Timed(step_tokens=CHUNK)
    stories = [world.submit(prompt(1000, first), max_tokens=1) for first in range(4)]
    first_at = [world.until_first(story) for story in stories]
    assert first_at == sorted(first_at)
    assert all(at <= 1000 * number + CHUNK for number, at in enumerate(first_at, 1))


def test_a_shorter_prompt_gets_half_of_each_step_until_it_is_done():
    world = Timed(step_tokens=CHUNK)
    world.submit(prompt(2000), max_tokens=1)
    world.turn()
    shorter = world.submit(prompt(600, 7), max_tokens=1)
    steps = []
    while shorter.finish is None:
        steps.append(world.plan())
        world.settle()
    assert [sorted(row.count for row in step.rows) for step in steps] == [[256, 256], [256, 256], [88, 424]]
    world.finish()


@pytest.mark.parametrize("shorts", [1, 5, 20])
def test_short_prompts_without_end_delay_a_long_one_to_twice_its_time_and_no_further(shorts: int):
    """In every step `shorts` new prompts arrive, together at least half a step; the long one arrived among them."""
    world = Timed(step_tokens=CHUNK, max_running=16)
    rivals = iter(range(10_000))

    def crowd() -> None:
        for _ in range(shorts):
            # prompt log probabilities, so that no page is taken from the prefix cache
            world.submit(prompt(30, next(rivals) % 89), max_tokens=2, prompt_logprobs=0)

    crowd()
    blocking = world.submit(prompt(3000, 3), max_tokens=1)
    long = world.submit(prompt(3000, 5), max_tokens=1)
    for _ in range(100):
        crowd()
        world.turn()
        if long.finish:
            break
    assert blocking.finish == long.finish == "length"
    # At least half of each step goes to the oldest prompt; the uncached parts of both have 6,000 positions.
    assert world.now <= 2 * 6000 + 4 * CHUNK + 16 * 100


def test_what_begins_before_a_waiting_job_is_together_no_longer_than_that_job():
    """There are no pages for the long job; small ones overtake it, but not for ever."""
    world = Timed(pages=8, step_tokens=CHUNK, max_running=8)
    world.submit(prompt(300), max_tokens=100)
    world.turn()
    large = world.submit(prompt(250, 5), max_tokens=1)
    began: list[int] = []
    for number in range(200):
        world.submit(prompt(40, number % 80), max_tokens=1, prompt_logprobs=0)
        step = world.plan()
        assert step is not None
        world.settle()
        began += [len(begin.tokens) for begin in step.begins]
        if 250 in began:
            break
        world.planner.check()
    assert began.index(250) == 250 // 40, "jobs may overtake up to the length of the waiting job"
    world.finish()
    assert large.finish == "length"


def test_names_take_turns_however_many_jobs_each_has():
    world = Timed(step_tokens=CHUNK, max_running=1)
    for number in range(6):
        world.submit(prompt(10, number), max_tokens=2, tenant="greedy")
    for number in range(2):
        world.submit(prompt(10, 20 + number), max_tokens=2, tenant="modest")
    world.submit(prompt(10, 30), max_tokens=2, tenant="third")
    order: list[str] = []
    while not world.planner.idle:
        step = world.plan()
        if step is not None:
            order += [world.stories[f"job-{begin.sampling.seed}"].job.tenant for begin in step.begins]
            world.settle()
    assert order == ["greedy", "modest", "third", "greedy", "modest", "greedy", "greedy", "greedy", "greedy"]
    world.check_end()


def test_a_name_that_comes_back_does_not_begin_before_those_that_waited():
    world = Timed(step_tokens=CHUNK, max_running=1)
    for number in range(3):
        world.submit(prompt(10, number), max_tokens=2, tenant="a")
    order: list[str] = []
    for number in range(20, 23):  # each arrives when the last has ended
        story = world.submit(prompt(10, number), max_tokens=2, tenant="b")
        while story.finish is None:
            step = world.plan()
            assert step is not None
            order += [world.stories[f"job-{begin.sampling.seed}"].job.tenant for begin in step.begins]
            world.settle()
    assert order == ["a", "b", "a", "b", "a", "b"]
    world.finish()


def test_among_three_names_with_jobs_of_every_length_each_job_ends():
    random_ = random.Random(5)
    world = Timed(pages=40, step_tokens=64, max_running=4)
    for number in range(120):
        length = random_.choice([1, 5, 30, 90, 400])
        world.submit(prompt(length, number % 89), max_tokens=random_.choice([1, 5, 40]), tenant=random_.choice("abc"))
        world.turn()
        world.planner.check()
    world.finish()
    assert {story.finish for story in world.stories.values()} <= {"length", "stop"}
