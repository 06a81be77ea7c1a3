"""The cost of a step: read from a measured grid, and corrected by the times of steps."""

import math
from dataclasses import replace

import pytest

from redline.policy.costs import RoundTimes, StepCosts

COSTS = StepCosts(
    rows=(1, 4, 16),
    counts=(1, 2, 8),
    target_ms=((10, 12, 24), (20, 26, 62), (40, 60, 180)),
    draft_ms=(1, 2, 4),
)


def test_measured_points_are_given_back():
    for row, line in zip(COSTS.rows, COSTS.target_ms, strict=True):
        for count, ms in zip(COSTS.counts, line, strict=True):
            assert COSTS.step_ms(row, count) == pytest.approx(ms)


def test_between_points_costs_are_linear_and_above_the_last_in_proportion():
    assert COSTS.step_ms(1, 5) == pytest.approx(18)
    assert COSTS.step_ms(10, 1) == pytest.approx(30)
    assert COSTS.step_ms(32, 1) == pytest.approx(80)


def test_every_drafter_pass_is_added():
    assert COSTS.step_ms(4, 2, 3, 1) == pytest.approx(26 + 3 * 1)
    assert COSTS.step_ms(4, 2, 2, 10) == pytest.approx(26 + 2 * 3)


def test_without_measurements_every_step_costs_the_same():
    costs = StepCosts()
    assert not costs.known
    assert costs.step_ms(1, 1) == costs.step_ms(64, 8, 7, 64)


def test_a_round_has_the_positions_of_its_rows():
    """Four rows, one of them with a draft; the drafter follows two."""
    assert RoundTimes(COSTS).ms(4, 1, 2, drafted=1) == pytest.approx(COSTS.step_ms(4, 1.25, 1, 2))
    assert RoundTimes(COSTS).ms(4, 0, 2) == pytest.approx(COSTS.step_ms(4, 1, 1, 2)), (
        "the drafter reads tokens even without drafts"
    )
    padded = replace(COSTS, padded=True)
    assert RoundTimes(padded).ms(4, 1, 2, drafted=1) == pytest.approx(COSTS.step_ms(4, 2, 1, 4))


@pytest.mark.parametrize("padded", [False, True])
def test_a_machine_that_is_slower_than_measured_is_found_out(padded: bool):
    costs = replace(COSTS, padded=padded)
    fresh, times = RoundTimes(costs), RoundTimes(costs)
    for step in range(200):
        rows = (1, 4, 16)[step % 3]
        times.observed(rows, 1, rows, rows, 1.5 * fresh.ms(rows, 1, rows))
    assert times.ms(4, 1, 4) == pytest.approx(1.5 * fresh.ms(4, 1, 4), rel=0.03)
    assert times.ms(1, 7, 0) == pytest.approx(1.5 * fresh.ms(1, 7, 0), rel=0.35), (
        "an unobserved point must follow the others"
    )


def test_a_wrong_point_is_mended_and_the_others_stay():
    """Two positions for one row cost twice the grid's value; one position costs the grid's value."""
    times = RoundTimes(COSTS)
    for _ in range(400):
        times.observed(1, 1, 0, 1, 24.0)
        times.observed(1, 0, 0, 0, 10.0)
    assert times.ms(1, 1, 0) == pytest.approx(24, rel=0.05)
    assert times.ms(1, 0, 0) == pytest.approx(10, rel=0.05)


def test_one_wild_step_changes_little():
    times = RoundTimes(COSTS)
    times.observed(1, 0, 0, 0, 10_000.0)
    assert times.ms(1, 0, 0) < 1.2 * COSTS.step_ms(1, 1)


def test_no_correction_of_a_kind_is_larger_than_fourfold():
    times = RoundTimes(COSTS)
    for step in range(3000):
        times.observed(1, step % 2, 0, step % 2, 1000.0 if step % 2 else 0.1)
    assert all(abs(factor) <= math.log(4) for factor in times._of_kind.values())


@pytest.mark.parametrize(
    "grid",
    [
        {"rows": (4, 1), "counts": (1,), "target_ms": ((1,), (2,))},
        {"rows": (1, 4), "counts": (1,), "target_ms": ((1,),)},
        {"rows": (1,), "counts": (1, 2), "target_ms": ((1,),)},
        {"rows": (1,), "counts": (1,), "target_ms": ((0,),)},
        {"rows": (1,), "counts": (1,), "target_ms": ((1,),), "draft_ms": (1, 2)},
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(grid: dict):
    with pytest.raises(AssertionError):
        StepCosts(**grid)
