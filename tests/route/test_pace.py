"""What is learned of prompts, steps and answers while they come."""

import random

import pytest

from redline.route.pace import BUSY_S, FRESH_OUTPUT, FRESH_TOKEN_S, Busy, Pace


def test_a_prompts_pace_follows_what_is_measured() -> None:
    pace = Pace()
    assert pace.token_s == FRESH_TOKEN_S
    for _ in range(50):
        pace.computed(1000, 1.0)
    assert pace.token_s == pytest.approx(1e-3)
    for _ in range(50):
        pace.computed(100, 0.3)
    assert pace.token_s == pytest.approx(3e-3, rel=0.05)


def test_what_a_row_adds_is_found_from_steps_that_differ() -> None:
    pace, draw = Pace(), random.Random(1)
    assert pace.between() == (0.0, 0.0)
    for _ in range(200):
        rows = draw.randint(1, 12)
        pace.stepped(rows, (4 + 0.5 * rows) * 1e-3 * draw.uniform(0.9, 1.1), rows)
    step_s, row_s = pace.between()
    assert step_s == pytest.approx(4e-3, rel=0.1)
    assert row_s == pytest.approx(0.5e-3, rel=0.2)
    for _ in range(400):  # the load is another now, and with it the rows' contexts
        rows = draw.randint(1, 12)
        pace.stepped(rows, (4 + 1.5 * rows) * 1e-3, rows)
    assert pace.between()[1] == pytest.approx(1.5e-3, rel=0.1)


def test_drafts_that_hold_bring_tokens_closer() -> None:
    pace = Pace()
    for rows in (2, 4, 6) * 20:
        pace.stepped(rows, (4 + rows) * 1e-3, 2.5 * rows)
    assert pace.between() == (pytest.approx(1.6e-3), pytest.approx(0.4e-3))


def test_nothing_is_below_zero() -> None:
    alike, falling, steep = Pace(), Pace(), Pace()
    for rows in (1, 2, 4) * 9:
        alike.stepped(3, 6e-3, 3)
        falling.stepped(rows, (9 - rows) * 1e-3, rows)
        steep.stepped(rows, rows * rows * 1e-3, rows)
    assert alike.between() == (pytest.approx(6e-3), 0.0), "what a row adds is not known"
    assert falling.between()[1] == 0.0
    assert falling.between()[0] > 0
    assert steep.between()[0] == 0.0
    assert steep.between()[1] > 0


def test_how_long_answers_become_is_learned_by_class() -> None:
    pace = Pace()
    assert pace.output("chat") == FRESH_OUTPUT
    for _ in range(9):
        pace.answered("chat", 100)
        pace.answered("agents", 0)
    assert pace.output("chat") == pytest.approx(100)
    assert pace.output("agents") == 1
    for _ in range(300):
        pace.answered("chat", 400)
    assert pace.output("chat") == pytest.approx(400, rel=0.01)


def test_a_share_of_prompts_comes_to_what_is_computed_and_is_forgotten() -> None:
    busy = Busy()
    assert busy.share(0.0) == 0.0
    for second in range(300):
        busy.add(0.4, float(second))
    assert busy.share(299.5) == pytest.approx(0.4, rel=0.05)
    assert busy.share(300 + 5 * BUSY_S) < 0.01
