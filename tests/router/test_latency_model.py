"""Times of prompts, steps and answers, learned during operation."""

import random

import pytest

from redline.policy.pairs import Work
from redline.policy.steps import StepModel
from redline.router.latency_model import BUSY_S, FRESH_OUTPUT, FRESH_TOKEN_S, LatencyModel, PrefillShare


def stepped(pace: LatencyModel, seconds: float, tokens: float, **work: float) -> None:
    pace.stepped(Work(**work), seconds, tokens)  # type: ignore[arg-type]


def test_a_prompts_pace_follows_what_is_measured() -> None:
    pace = LatencyModel()
    assert pace.token_s(pace.model) == FRESH_TOKEN_S
    for _ in range(9):
        stepped(pace, 0.01, 2, rows=2, context=900)
    assert pace.token_s(pace.model) > FRESH_TOKEN_S, "a full step takes the time of other steps and of its prompts"
    for tokens in (100, 400) * 25:
        stepped(pace, 0.02 + 1e-3 * tokens, 0, prompt=tokens)
    assert pace.model.prompt_ms(0, 200, 512) == pytest.approx(220, rel=0.02)
    for tokens in (100, 400) * 100:
        stepped(pace, 0.02 + 3e-3 * tokens, 0, prompt=tokens)
    assert pace.model.prompt_ms(0, 200, 512) == pytest.approx(620, rel=0.05)


def test_what_a_step_takes_whatever_is_in_it_counts_for_a_short_prompt() -> None:
    """64 tokens read all experts as 512 do, which a line through the origin cannot represent."""
    pace, draw = LatencyModel(), random.Random(1)
    pace.experts(384, 8)
    pace.step_tokens = 512
    real = StepModel(base=2.0, experts=40.0, row=0.1, prompt=0.02, experts_of=384, experts_chosen=8)
    for _ in range(300):
        rows, tokens = draw.randint(1, 12), draw.choice((0, 0, 64, 200, 512))
        took_ms = real.step_ms(Work(prompt=tokens, rows=rows, context=900 * rows)) * draw.uniform(0.95, 1.05)
        stepped(pace, took_ms / 1e3, rows, prompt=tokens, rows=rows, context=900 * rows, expanded=tokens)
    assert pace.model.prompt_ms(0, 64, 512) == pytest.approx(real.prompt_ms(0, 64, 512), rel=0.1)
    assert pace.model.prompt_ms(448, 64, 512) < pace.model.prompt_ms(0, 512, 512) - 5, "cached tokens cost little"
    assert pace.token_s(pace.model) == pytest.approx(1e-3 * (42 / 512 + 0.02), rel=0.1)
    assert pace.context == pytest.approx(900)


def test_what_a_row_adds_is_found_from_steps_that_differ() -> None:
    pace, draw = LatencyModel(), random.Random(1)
    assert pace.between_s(3) == 0.0
    for _ in range(200):
        rows = draw.randint(1, 12)
        stepped(pace, (4 + 0.5 * rows) * 1e-3 * draw.uniform(0.9, 1.1), rows, rows=rows)
    assert pace.between_s(0) == pytest.approx(4e-3, rel=0.1)
    assert pace.between_s(1) - pace.between_s(0) == pytest.approx(0.5e-3, rel=0.2)
    for _ in range(400):  # the load, and with it the rows' contexts, is different now
        rows = draw.randint(1, 12)
        stepped(pace, (4 + 1.5 * rows) * 1e-3, rows, rows=rows)
    assert pace.between_s(1) - pace.between_s(0) == pytest.approx(1.5e-3, rel=0.1)


def test_drafts_that_hold_bring_tokens_closer() -> None:
    pace = LatencyModel()
    for rows in (2, 4, 6) * 20:
        stepped(pace, (4 + rows) * 1e-3, 2.5 * rows, rows=rows)
    assert pace.between_s(1) == pytest.approx(2e-3)
    assert pace.between_s(6) == pytest.approx(4e-3)


def test_nothing_is_below_zero() -> None:
    alike, falling, steep = LatencyModel(), LatencyModel(), LatencyModel()
    for rows in (1, 2, 4) * 9:
        stepped(alike, 6e-3, 3, rows=3)
        stepped(falling, (9 - rows) * 1e-3, rows, rows=rows)
        stepped(steep, rows * rows * 1e-3, rows, rows=rows)
    assert alike.between_s(3) == pytest.approx(6e-3)
    assert falling.between_s(1) == falling.between_s(9) > 0
    assert steep.model.base == 0.0
    assert steep.between_s(1) > 0


def test_how_long_answers_become_is_learned_by_class() -> None:
    pace = LatencyModel()
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
    busy = PrefillShare()
    assert busy.share(0.0) == 0.0
    for second in range(300):
        busy.add(0.4, float(second))
    assert busy.share(299.5) == pytest.approx(0.4, rel=0.05)
    assert busy.share(300 + 5 * BUSY_S) < 0.01
