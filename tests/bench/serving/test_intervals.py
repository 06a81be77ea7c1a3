"""Intervals contain the true value with their nominal frequency."""

import numpy as np
import pytest

from redline.bench.serving.intervals import BOOTSTRAP_FROM, LEAST, interval, student


@pytest.mark.parametrize("many", [4, 8, BOOTSTRAP_FROM, 40])
def test_the_interval_holds_the_mean_in_about_95_of_100_runs(many: int):
    draw = np.random.default_rng(many)
    held = 0
    for seed in range(300):
        found = interval(draw.normal(0.1, 0.05, many).tolist(), seed)
        assert found is not None
        held += found.low <= 0.1 <= found.high
    assert 0.92 <= held / 300 <= 0.98


def test_a_bootstrap_of_skewed_values_leans_to_their_long_side():
    found = interval(np.random.default_rng(3).exponential(1.0, 40).tolist())
    assert found is not None
    assert found.high - found.mean > 1.1 * (found.mean - found.low)


def test_the_same_seed_gives_the_same_interval():
    values = np.random.default_rng(0).normal(0, 1, 30).tolist()
    assert interval(values, 5) == interval(values, 5)


def test_too_few_values_have_no_interval():
    assert interval([0.1] * (LEAST - 1)) is None
    assert interval([0.1] * LEAST) is not None


def test_values_without_noise_have_an_interval_without_width():
    found = interval([0.25] * 25)
    assert found is not None
    assert (found.low, found.mean, found.high) == (0.25, 0.25, 0.25)


def test_student_goes_on_where_its_table_ends():
    assert student(30) > student(31) > student(100) > 1.96
    assert student(31) == pytest.approx(2.0395, abs=1e-4)
    assert student(100) == pytest.approx(1.98397, abs=1e-5)


@pytest.mark.parametrize(("many", "least", "most"), [(8, 0.83, 0.92), (24, 0.90, 0.98)])
def test_few_skewed_numbers_have_an_interval_that_is_too_narrow_as_the_docs_say(many: int, least: float, most: float):
    draw = np.random.default_rng(0)
    held = 0
    for seed in range(300):
        found = interval(list(draw.exponential(1.0, many)), seed)
        assert found is not None
        held += found.low <= 1.0 <= found.high
    assert least <= held / 300 <= most
