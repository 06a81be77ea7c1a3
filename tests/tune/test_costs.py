"""What a step costs: read from a grid, corrected by what steps take."""

import math

import pytest

from redline.tune.costs import StepCosts

COSTS = StepCosts(
    rows=(1, 4, 16),
    counts=(1, 2, 8),
    target_ms=((10, 12, 24), (20, 26, 62), (40, 60, 180)),
    draft_ms=(1, 2, 4),
)


def test_measured_points_are_given_back():
    for row, line in zip(COSTS.rows, COSTS.target_ms, strict=True):
        for count, ms in zip(COSTS.counts, line, strict=True):
            assert COSTS.step_ms(row, row * count) == pytest.approx(ms)


def test_between_points_costs_are_linear_and_above_the_last_in_proportion():
    assert COSTS.step_ms(1, 5) == pytest.approx(18)
    assert COSTS.step_ms(10, 10) == pytest.approx(30)
    assert COSTS.step_ms(32, 32) == pytest.approx(80)


def test_every_drafter_pass_is_added():
    assert COSTS.step_ms(4, 8, [8.0, 4, 1]) == pytest.approx(26 + (2 + 4 / 12 * 2) + 2 + 1)


def test_without_measurements_every_step_costs_the_same_and_nothing_is_learnt():
    costs = StepCosts()
    assert not costs.known
    assert costs.step_ms(1, 1) == costs.step_ms(64, 512, [64.0] * 7)
    assert costs.observed(1, 1, [], 5.0) is costs


def test_a_machine_that_is_slower_than_measured_is_found_out():
    costs = COSTS
    for step in range(200):
        rows = (1, 4, 16)[step % 3]
        costs = costs.observed(rows, rows * 2, [float(rows)], 1.5 * COSTS.step_ms(rows, rows * 2, [float(rows)]))
    assert costs.step_ms(4, 8, [4.0]) == pytest.approx(1.5 * COSTS.step_ms(4, 8, [4.0]), rel=0.03)
    assert costs.step_ms(1, 8) == pytest.approx(1.5 * COSTS.step_ms(1, 8), rel=0.15), (
        "nobody went there, yet it follows"
    )


def test_a_wrong_point_is_mended_and_the_others_stay():
    """Two positions for one row cost twice what the grid says; one position costs what it says."""
    costs = COSTS
    for _ in range(400):
        costs = costs.observed(1, 2, [], 24.0)
        costs = costs.observed(1, 1, [], 10.0)
    assert costs.step_ms(1, 2) == pytest.approx(24, rel=0.15)
    assert costs.step_ms(1, 1) == pytest.approx(10, rel=0.15)


def test_one_wild_step_changes_little_and_is_forgotten():
    wild = COSTS.observed(1, 1, [], 10_000.0)
    assert wild.step_ms(1, 1) < 1.1 * COSTS.step_ms(1, 1)
    for _ in range(2000):
        wild = wild.observed(4, 4, [], 20.0)
    assert wild.step_ms(1, 1) == pytest.approx(COSTS.step_ms(1, 1), rel=0.03)


def test_no_correction_of_a_point_is_larger_than_fourfold():
    costs = COSTS
    for step in range(3000):
        costs = costs.observed(1, 1 if step % 2 else 2, [], 1000.0 if step % 2 else 0.1)
    assert all(abs(point) <= math.log(4) for line in costs.target_points for point in line)


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
