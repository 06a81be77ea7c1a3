"""Mixed steps with a bounded time: the tokens of prefill next to decode rows. Expected numbers are computed by hand."""

import pytest

from redline.errors import ConfigError
from redline.messages.step import Step
from redline.policy.pairs import Work
from redline.scheduler.config import PlanConfig
from tests.fakes import World


class Linear:
    """10 ms a step, 1 ms a row, 0.1 ms a prompt token, and 1 ms for each 1,000 pairs."""

    def __init__(self, *, known: bool = True) -> None:
        self.known = known
        self.told: list[tuple[Work, float]] = []

    def took(self, work: Work, ms: float) -> None:
        self.told.append((work, ms))

    def ms(self, work: Work) -> float:
        return 10 + work.rows + 0.1 * work.prompt + work.pairs / 1000


class Flat(Linear):
    """Without pairs, so that a chunk is (0.9 x step_ms - 10 - rows) / 0.1 tokens."""

    def ms(self, work: Work) -> float:
        return 10 + work.rows + 0.1 * work.prompt


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first * 31 + place) % 90 for place in range(length))


def world(forecast: Linear | None, step_ms: float | None, **config: float) -> World:
    config = {"pages": 400, "max_model_len": 8000, "step_tokens": 512, "max_running": 8, "ahead": 0, **config}
    more = {} if step_ms is None else {"step_ms": step_ms}
    seconds = (
        None if forecast is None else (lambda step, _: forecast.ms(Work(sum(row.count for row in step.rows))) / 1e3)
    )
    return World(forecast=forecast, seconds=seconds, **config, **more)  # type: ignore[arg-type]


def decoding(world: World, count: int, length: int = 10) -> None:
    for number in range(count):
        world.submit(prompt(length, number), max_tokens=400)
    step = world.plan()
    assert step is not None
    world.settle()


def chunks(step: Step | None) -> list[int]:
    assert step is not None
    return [row.count for row in step.rows if row.start is not None]


def next_chunks(world: World) -> list[int]:
    step = world.plan()
    world.settle()
    return chunks(step)


def test_a_chunk_beside_answers_takes_what_the_bound_leaves_in_whole_pages():
    """0.9 x 40 = 36 ms; less 10 for the step and 4 for the rows, 22 ms remain, that is 220 tokens: 3 pages."""
    bounded = world(Flat(), 40)
    decoding(bounded, 4)
    bounded.submit(prompt(1000, 9), max_tokens=1)
    assert [next_chunks(bounded) for _ in range(5)] == [[192]] * 5
    assert next_chunks(bounded) == [40]
    assert next_chunks(bounded) == []
    assert bounded.planner.load().bounded == 5  # the last chunk was the rest of the prompt, shorter than the bound
    bounded.finish()


def test_deeper_chunks_are_shorter():
    """0.9 x 60 - 14 = 40 ms remain: the first 192 tokens take 19.2 + 18.5, 256 would take 25.6 + 32.9; after 192
    tokens, 128 take 12.8 + 32.8 and 64 take 6.4 + 14.4; after 1,000 tokens a page takes 72 ms, over the bound, and is
    granted all the same.
    """
    bounded = world(Linear(), 60)
    decoding(bounded, 4)
    bounded.submit(prompt(2000, 9), max_tokens=1)
    assert [next_chunks(bounded) for _ in range(2)] == [[192], [64]]
    assert {chunk for _ in range(20) for chunk in next_chunks(bounded)} == {64}
    bounded.finish()


@pytest.mark.parametrize(("forecast", "step_ms"), [(None, 40), (Flat(known=False), 40), (Flat(), None), (Flat(), 1e6)])
def test_a_step_is_whole_where_nothing_bounds_it_or_nothing_is_known(forecast: Linear | None, step_ms: float | None):
    free = world(forecast, step_ms)
    decoding(free, 4)
    free.submit(prompt(1000, 9), max_tokens=1)
    assert [next_chunks(free) for _ in range(2)] == [[508], [492]]
    assert free.planner.load().bounded == 0
    free.finish()


def test_a_step_whose_prompts_cannot_begin_is_not_called_bounded():
    """Two answers hold at least eight of ten pages: a prompt of five pages cannot begin until one ends, so no step was
    bounded.
    """
    full = world(Flat(), 17, pages=10, max_model_len=400)
    decoding(full, 2, 230)
    full.submit(prompt(310, 9), max_tokens=1)
    steps = 0
    while full.planner.load().waiting:
        full.plan()
        full.settle()
        steps += 1
    assert steps > 20
    assert full.planner.load().bounded == 0
    full.finish()


def test_a_step_without_answers_is_whole():
    alone = world(Flat(), 40)
    alone.submit(prompt(1000, 9), max_tokens=1)
    assert [next_chunks(alone) for _ in range(2)] == [[512], [488]]
    alone.finish()


def test_prompts_go_on_by_pages_where_answers_alone_take_longer_than_the_bound():
    bounded = world(Flat(), 5)
    decoding(bounded, 4)
    bounded.submit(prompt(200, 9), max_tokens=1)
    assert [next_chunks(bounded) for _ in range(4)] == [[64], [64], [64], [8]]
    bounded.finish()


def test_several_prompts_share_what_is_left_as_they_share_a_whole_step():
    """192 tokens as above: half of them may go to a shorter prompt."""
    bounded = world(Flat(), 40)
    decoding(bounded, 4)
    bounded.submit(prompt(1000, 9), max_tokens=1)
    assert next_chunks(bounded) == [192]
    bounded.submit(prompt(150, 10), max_tokens=1)
    assert [next_chunks(bounded) for _ in range(2)] == [[96, 96], [54, 138]]
    bounded.finish()


def test_drafts_have_their_half_before_prompts_are_bounded():
    bounded = world(Flat(), 40, draft_tokens=3)
    decoding(bounded, 4)
    bounded.submit(prompt(1000, 9), max_tokens=1)
    step = bounded.plan()
    assert chunks(step) == [192]
    assert step is not None
    assert sum(row.count for row in step.rows if row.start is None) == 16
    bounded.settle()
    bounded.finish()


def beside_one(first_ms: float | None, second_ms: float | None, **config: float) -> World:
    """One answer, and prompts of 600 and 650 tokens. 36 ms less 10 and 1 are 25 ms, that is 3 pages. Prompt tokens per
    millisecond: 6.36 with chunks of 192, 7.44 with 320, 7.77 with 384, 8.23 with all 511.
    """
    bounded = world(Flat(), 40, **config)
    decoding(bounded, 1)
    bounded.submit(prompt(600, 9), max_tokens=20, ttft_ms=first_ms)
    bounded.submit(prompt(650, 10), max_tokens=20, ttft_ms=second_ms)
    return bounded


@pytest.mark.parametrize(
    ("first_ms", "second_ms", "expected"),
    [
        (None, None, 192),
        # 600 tokens in 0.9 x 100 ms need 6.67 per ms: one first token is at stake, against one answer
        (100.0, None, 192),
        (100.0, 180.0, 384),  # together 1,250 tokens in 0.9 x 180 ms need 7.72 per ms
        (100.0, 240.0, 192),  # 5.8 per ms, which chunks of 192 reach
        (80.0, 180.0, 192),  # 600 tokens in 72 ms need 8.33 per ms: it is late in any case
    ],
)
def test_first_tokens_that_would_be_late_get_longer_chunks(
    first_ms: float | None, second_ms: float | None, expected: int
):
    bounded = beside_one(first_ms, second_ms)
    assert next_chunks(bounded) == [expected]
    bounded.finish()


def test_time_that_steps_took_is_gone():
    bounded = beside_one(130.0, 210.0)
    bounded.planner._beside.spent_s += 0.03  # as if another step had run in between
    assert next_chunks(bounded) == [384]
    bounded.planner._beside.spent_s += 0.2  # now both are late in any case, and longer chunks gain nothing
    assert next_chunks(bounded) == [192]
    bounded.finish()


def test_who_waits_for_a_slot_counts_too():
    bounded = beside_one(100.0, 180.0, max_running=2)
    assert next_chunks(bounded) == [384]
    assert bounded.planner.load().waiting == 1
    bounded.finish()


def test_a_first_token_that_was_given_is_not_promised_any_more():
    """The prompt of a job that was requeued from another worker is computed again, without a TTFT target."""
    bounded = world(Flat(), 40)
    decoding(bounded, 1)
    for number in range(2):
        bounded.submit(prompt(600, 9 + number), max_tokens=20, ttft_ms=95.0, given=3)
    assert next_chunks(bounded) == [192]
    bounded.finish()


def test_steps_that_were_timed_are_told_to_the_forecast():
    forecast = Flat()
    bounded = world(forecast, 40)
    decoding(bounded, 2)
    bounded.submit(prompt(300, 9), max_tokens=1)
    next_chunks(bounded)
    work, ms = forecast.told[-1]
    assert (work.prompt, work.rows, work.pairs) == (192, 2, 192 * 193 / 2)
    assert ms == pytest.approx(10 + 0.1 * 194)
    bounded.finish()


def test_a_bound_is_a_time():
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"step_ms is .*; expected a time in milliseconds"):
            PlanConfig(step_ms=wrong)
