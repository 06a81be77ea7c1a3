"""Predicted times of tier reads and of prefill, and the number of pages to fetch that follows."""

import random
from collections.abc import Callable
from statistics import median

import pytest

from redline.policy.steps import StepModel
from redline.policy.tiers import LEAST, FetchChoice, PrefillTimes, ReadTimes, choose

PAGE_TOKENS, STEP_TOKENS = 64, 512
TRUE = StepModel(base=2.0, prompt=0.5, pair=5e-4, expand=0.2)  # approximately Kimi-Nano on one core
BEGIN_S, HOST_S, DISK_S = 0.002, 0.0005, 0.003
Noise = Callable[[], float]


KINDS = ((1, 0), (4, 0), (64, 0), (16, 3), (0, 20), (128, 0))  # pages of a read, by tier


def true_s(pages: tuple[int, int]) -> float:
    return BEGIN_S + HOST_S * pages[0] + DISK_S * pages[1]


def predicted_s(times: ReadTimes, pages: tuple[int, int]) -> float:
    begin_s, host_s, disk_s = times.predict(pages)
    return begin_s + host_s * pages[0] + disk_s * pages[1]


def readings(count: int, noise: Noise, seed: int = 1) -> list[float]:
    """Relative errors of the later half of `count` reads, after initial estimates that are too low by half and too high
    by two.
    """
    times, draw, off = ReadTimes(0.001, (0.00025, 0.006)), random.Random(seed), list[float]()
    for number in range(count):
        pages = draw.choice(KINDS)
        took = true_s(pages) * noise()
        if 2 * number >= count:
            off.append(abs(predicted_s(times, pages) - took) / took)
        times.observed(pages, took)
    return off


def learnt(noise: Noise = lambda: 1.0, prompts: int = 12, seed: int = 1) -> PrefillTimes:
    """Prefill times learned from prompts of all lengths; each step took the true time multiplied by the noise."""
    times, draw = PrefillTimes(), random.Random(seed)
    for _ in range(prompts):
        computed(times, draw.randrange(100, 4000), noise)
    return times


def computed(times: PrefillTimes, positions: int, noise: Noise = lambda: 1.0) -> None:
    for first in range(0, positions, STEP_TOKENS):
        count = min(STEP_TOKENS, positions - first)
        times.observed([(first, count)], 0, TRUE.prompt_ms(first, count, STEP_TOKENS) / 1e3 * noise())


def chosen(times: PrefillTimes, page_s: list[float], wait_s: float = 0.0, positions: int = 1100) -> FetchChoice:
    return choose(0, positions, page_s, wait_s, times, page_tokens=PAGE_TOKENS, step_tokens=STEP_TOKENS)


def test_readings_of_each_tier_and_size_are_predicted_whatever_the_guess_was() -> None:
    assert median(readings(200, lambda: 1.0)) < 0.05


def test_one_reading_in_five_that_took_ten_times_as_long_changes_little() -> None:
    draw = random.Random(3)
    assert median(readings(300, lambda: draw.choice((0.97, 1.0, 1.03, 1.0, 10.0)))) < 0.1


def test_a_first_reading_that_took_ten_times_as_long_is_outvoted_by_the_guess_and_the_next() -> None:
    times = ReadTimes(BEGIN_S, (HOST_S, DISK_S))
    times.observed((16, 0), 10 * true_s((16, 0)))
    times.observed((16, 0), true_s((16, 0)))
    assert predicted_s(times, (16, 0)) == pytest.approx(true_s((16, 0)), rel=0.01)
    assert predicted_s(times, (0, 16)) == pytest.approx(true_s((0, 16)), rel=0.01)


def test_readings_of_now_count_more_than_those_of_before() -> None:
    times = ReadTimes(BEGIN_S, (HOST_S, DISK_S))
    for slower in (1, 3):
        for _ in range(10):
            times.observed((16, 0), slower * true_s((16, 0)))
    assert predicted_s(times, (16, 0)) == pytest.approx(3 * true_s((16, 0)), rel=0.01)


def test_a_prompt_behind_cached_pages_is_predicted_from_prompts_that_had_none() -> None:
    """Keys and values are expanded for all cached positions, a cost that neither pairs nor tokens alone include."""
    times = learnt()
    for first, end in ((0, 500), (1024, 1100), (3968, 4033), (0, 3000)):
        true_s = TRUE.prompt_ms(first, end - first, STEP_TOKENS) / 1e3
        assert times.predict(first, end, STEP_TOKENS) == pytest.approx(true_s, rel=0.02)


def test_a_machine_that_has_become_slower_is_noticed_within_some_steps() -> None:
    times = learnt()
    for _ in range(3):
        computed(times, 1600, lambda: 1.8)
    slower_s = 1.8 * TRUE.prompt_ms(0, 2000, STEP_TOKENS) / 1e3
    assert times.predict(0, 2000, STEP_TOKENS) == pytest.approx(slower_s, rel=0.15)


def test_whatever_is_kept_is_fetched_until_steps_have_told_something() -> None:
    times = PrefillTimes()
    assert chosen(times, [1.0] * 5, 0.5) == FetchChoice(5, 5.5)
    computed(times, LEAST * STEP_TOKENS)
    assert chosen(times, [60.0] * 5).pages == 0


def test_pages_that_take_longer_than_computing_them_are_computed() -> None:
    times, cheap, dear = learnt(), 0.001, 5.0
    assert chosen(times, [cheap] * 16).pages == 16
    assert chosen(times, [cheap] * 10 + [dear] * 6).pages == 10
    assert chosen(times, [dear] * 16) == FetchChoice(0)
    assert chosen(times, [cheap] * 16, wait_s=60.0) == FetchChoice(0)


def test_what_is_saved_is_the_first_token_of_the_whole_prompt() -> None:
    times = learnt()
    choice = chosen(times, [0.001] * 16)
    whole_s, rest_s = (TRUE.prompt_ms(first, 1100 - first, STEP_TOKENS) / 1e3 for first in (0, 1024))
    assert choice.saves_s == pytest.approx(whole_s - rest_s - 0.016, rel=0.02)


def test_a_gain_below_the_error_of_predictions_is_left() -> None:
    times = learnt()
    whole, rest = times.predict(0, 1100, STEP_TOKENS), times.predict(64, 1100, STEP_TOKENS)
    assert whole is not None
    assert rest is not None
    assert chosen(times, [0.85 * (whole - rest)]).pages == 1
    assert chosen(times, [0.95 * (whole - rest)]).pages == 0


def test_steps_that_mostly_decode_say_nothing_of_prompts() -> None:
    times = PrefillTimes()
    for _ in range(10):
        times.observed([(0, 16)], 0, 1.0)
        times.observed([(0, 64)], 16, 1.0)
    assert not times.known


def test_a_pace_that_the_fit_has_learnt_is_not_counted_twice() -> None:
    """A machine that was slow for a worker's first prompts and is fast from then on: the predictions are soon right."""
    times, draw, off = PrefillTimes(), random.Random(4), list[float]()
    for number in range(26):
        slow, positions = 1.7 if number < 6 else 1.0, draw.randrange(100, 1000)
        predicted_s, true_s = times.predict(0, positions, STEP_TOKENS), TRUE.prompt_ms(0, positions, STEP_TOKENS) / 1e3
        if predicted_s is not None and number >= 10:
            off.append(abs(predicted_s - true_s) / true_s)
        computed(times, positions, lambda slow=slow: slow)
    assert median(off) < 0.03
    assert max(off) < 0.2


def test_the_few_tokens_behind_what_was_read_do_not_read_every_expert() -> None:
    """All layers of Kimi K2.6 on one H100: 64 tokens read three quarters of the experts, 1,024 all."""
    true = StepModel(base=56.0, experts=196.0, prompt=0.09, expand=0.005, experts_of=384, experts_chosen=8)
    times, draw = PrefillTimes(384, 8), random.Random(5)
    for _ in range(24):
        for first, count in (
            (0, draw.randrange(900, 2048)),
            (1024 * draw.randrange(1, 9), draw.choice((64, 128, 256))),
        ):
            times.observed([(first, count)], 0, true.prompt_ms(first, count, 2048) / 1e3 * draw.gauss(1, 0.01))
    for first, count in ((1024, 40), (1024, 64), (8192, 64)):
        true_s = true.prompt_ms(first, count, 2048) / 1e3
        assert times.predict(first, first + count, 2048) == pytest.approx(true_s, rel=0.05)


def test_steps_of_about_the_size_say_most_of_one() -> None:
    """If the fit is wrong for one size, because the time of its steps has a part that no term of the
    model represents.
    """
    times, off = PrefillTimes(), list[float]()
    for number in range(60):
        for first, count in ((0, 500), (0, 250), (1024, 40), (1024, 64 + number % 3 * 20)):
            true_s = TRUE.prompt_ms(first, count, STEP_TOKENS) / 1e3 * (2 if 60 < count < 120 else 1)
            predicted_s = times.predict(first, first + count, STEP_TOKENS)
            if predicted_s is not None and number >= 20 and count == 250:
                off.append(abs(predicted_s - true_s) / true_s)
            times.observed([(first, count)], 0, true_s)
    assert median(off) < 0.08


def test_pages_that_are_saved_first_are_of_a_readings_time() -> None:
    times = ReadTimes(BEGIN_S, (HOST_S, DISK_S), HOST_S / 4)
    for _ in range(6):
        times.observed((128, 0), true_s((128, 0)) + 128 * 2 * HOST_S, saved=128)
        times.observed((128, 0), true_s((128, 0)))
    for saved in (0, 128):
        begin_s, host_s, _ = times.predict((128, 0), saved)
        want = true_s((128, 0)) + saved * 2 * HOST_S
        assert begin_s + 128 * host_s == pytest.approx(want, rel=0.02)
