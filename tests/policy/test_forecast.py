"""The forecast of a worker's next step from its past steps."""

import pytest

from redline.policy.forecast import LEAST, NEW_STEPS, NEWEST, StepForecast
from redline.policy.pairs import Work
from redline.policy.steps import StepModel

TRUE = StepModel(base=8.0, row=0.5, prompt=0.1)
STEPS = [
    *(Work(rows=rows, context=500 * rows) for rows in (1, 4, 8, 16)),
    *(Work(prompt=tokens, pairs=tokens**2 / 2) for tokens in (64, 200, 512)),
    *(Work(prompt=tokens, pairs=tokens**2 / 2, rows=rows) for tokens in (64, 256) for rows in (2, 8)),
]


def shown(times: float = 1.0) -> StepForecast:
    forecast = StepForecast()
    for work in STEPS:
        forecast.took(work, times * TRUE.step_ms(work))
    return forecast


def test_steps_like_those_that_ran_are_predicted() -> None:
    forecast = shown()
    for work in (Work(prompt=128, pairs=128**2 / 2, rows=4), Work(prompt=320, pairs=320**2 / 2, rows=12)):
        assert forecast.ms(work) == pytest.approx(TRUE.step_ms(work), rel=0.02)


def test_nothing_is_known_before_steps_of_both_kinds_have_run() -> None:
    forecast = StepForecast()
    for _ in range(LEAST):
        assert not forecast.known
        forecast.took(STEPS[0], 8.0)
    assert not forecast.known
    for _ in range(LEAST):
        assert not forecast.known
        forecast.took(STEPS[-1], 30.0)
    assert forecast.known
    assert forecast.ms(STEPS[-1]) == pytest.approx(30.0, rel=0.05)


def test_the_pace_follows_a_machine_that_becomes_slower_before_the_fit_does() -> None:
    forecast, asked = shown(), STEPS[-1]
    for _ in range(NEW_STEPS):  # so that the next fit is many steps away
        forecast.took(asked, TRUE.step_ms(asked))
    forecast.ms(asked)
    for _ in range(NEWEST // 2 + 1):
        forecast.took(asked, 1.5 * TRUE.step_ms(asked))
    assert forecast.ms(asked) == pytest.approx(1.5 * TRUE.step_ms(asked), rel=0.02)
    forecast.took(asked, 100 * TRUE.step_ms(asked))  # a single step disturbed by something else changes nothing
    assert forecast.ms(asked) == pytest.approx(1.5 * TRUE.step_ms(asked), rel=0.02)
