"""Synthetic acceptance: a random draw sets how many drafts are accepted, equally in eager steps and in CUDA graphs."""

import functools
from typing import Any

import msgspec
import pytest

from redline.messages.job import Job
from redline.ops.draws import VERDICT
from redline.run.drafting.verify import verify_synthetic
from redline.run.runner import Runner
from redline.run.sampling.on_host import uniform, uniform_of
from redline.worker.config import DraftConfig
from tests.tiny_model import LEARNED, SUFFIX, Answer, job, open_engine, prompt, run, tiny_model

RATES = (0.9, 0.6, 0.3)
TOKENS = 80
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5, "seeded": True},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "seed": (1 << 64) - 3},
    "penalised": {"frequency_penalty": 0.4, "seed": 9},
}


def jobs() -> list[Job]:
    return [
        job(name, prompt(seed, 20 + seed), max_tokens=TOKENS, **{"logprobs": None, "seed": seed, **sampling})
        for seed, (name, sampling) in enumerate(SAMPLINGS.items())
    ]


def answers(monkeypatch: pytest.MonkeyPatch, speculation: DraftConfig, *, captured: bool) -> dict[str, Answer]:
    with monkeypatch.context() as patch:
        patch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=captured))
        engine = open_engine(tiny_model(), speculation=speculation)
    try:
        return run(engine, jobs())
    finally:
        engine.runner.close()


def synthetic(acceptance: float | tuple[float, ...], of: DraftConfig = LEARNED) -> DraftConfig:
    return msgspec.structs.replace(of, synthetic_acceptance=acceptance)


def test_recorded_rounds_give_the_verdicts_of_those_that_the_host_leads(monkeypatch: pytest.MonkeyPatch):
    led = answers(monkeypatch, synthetic(RATES), captured=False)
    replayed = answers(monkeypatch, synthetic(RATES), captured=True)
    for name in SAMPLINGS:
        certain = TOKENS - 8  # in the last rounds, a round planned ahead has no room for all drafts
        assert replayed[name].tokens[:certain] == led[name].tokens[:certain], name


@pytest.mark.parametrize("captured", [False, True])
def test_all_drafts_that_a_rate_of_1_names_hold_and_none_of_0(monkeypatch: pytest.MonkeyPatch, captured: bool):
    for length, held in ((1.0, 0), (2.0, 1), (4.0, 3)):
        for name, answer in answers(monkeypatch, synthetic(length), captured=captured).items():
            assert len(answer.tokens) == TOKENS
            rounds = answer.proposed / 3
            assert answer.accepted == pytest.approx(held * rounds, abs=3), name


@pytest.mark.parametrize("captured", [False, True])
def test_without_drafts_there_is_nothing_to_draw(monkeypatch: pytest.MonkeyPatch, captured: bool):
    """If no draft is accepted, the output is the target model's own, token for token."""
    plain = answers(monkeypatch, LEARNED, captured=captured)
    none_hold = answers(monkeypatch, synthetic(1.0), captured=captured)
    assert plain["greedy"].tokens == none_hold["greedy"].tokens
    assert plain["seeded"].tokens == none_hold["seeded"].tokens


def test_matches_of_the_texts_own_past_are_judged_by_the_same_draw(monkeypatch: pytest.MonkeyPatch):
    for answer in answers(monkeypatch, synthetic(1.0, SUFFIX), captured=True).values():
        assert len(answer.tokens) == TOKENS
        assert answer.accepted == 0


def test_drafts_hold_as_often_as_the_rates_say():
    held = [verify_synthetic(RATES, seed, position, 3) for seed in range(40) for position in range(200)]
    for place, rate in enumerate(RATES):
        assert sum(count > place for count in held) / len(held) == pytest.approx(rate, abs=0.02)
    assert max(verify_synthetic(RATES, 3, position, 1) for position in range(50)) == 1


def test_the_verdict_has_random_numbers_of_its_own():
    drawn = [uniform_of(7, VERDICT, position) < 0.5 for position in range(400)]
    assert drawn != [uniform(7, position) < 0.5 for position in range(400)]
    assert [verify_synthetic((0.5,), 7, position, 1) for position in range(400)] == drawn
