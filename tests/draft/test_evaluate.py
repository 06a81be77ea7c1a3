"""Evaluation: rounds as reported by the engine, their mean and interval, the ceiling, the trainer's estimate."""

import io
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from redline.draft import evaluate as module
from redline.draft.evaluate import EvalConfig, TokenizedPrompt, agree, evaluate, first_draft_check
from redline.draft.mine.difficulty import Scores, Serving
from redline.errors import ConfigError
from redline.messages.delta import Delta
from redline.messages.job import Job, JobId
from redline.worker.acceptance import DraftRound, Spoken, acceptance_length, by_position, perfect, spoken

CONFIG = EvalConfig(target="t", draft="d", prompts="p", k=(3,), modes=("greedy",), rounds=0, offline=0)


def delta(*tokens: int, proposed: int = 0, accepted: int = 0, **more: Any) -> Delta:
    return Delta(job=JobId("job"), tokens=tokens, proposed=proposed, accepted=accepted, **more)


# ---------------------------------------------------------------------------------------------------------- rounds


def test_a_round_is_a_row_that_verified_drafts_and_the_first_token_is_of_none():
    answer = spoken("a", "code", [1, 2], [delta(3), delta(4, 5, proposed=3, accepted=1), delta(6, finish="length")])
    assert answer.rounds == (DraftRound(3, 3, 1),)
    assert (answer.tokens, answer.rows, answer.finish) == ((1, 2, 3, 4, 5, 6), 2, "length")
    assert acceptance_length([answer.rounds]).mean == 2


def test_drafts_behind_the_end_are_not_counted():
    """The stop token is the first of the row's tokens; two more accepted draft tokens follow it."""
    answer = spoken("a", "code", [1], [delta(2), delta(9, proposed=3, accepted=3, finish="stop")])
    assert answer.rounds == (DraftRound(2, 3, 1),)


def test_the_interval_is_over_prompts_and_holds_the_mean():
    rounds = [[DraftRound(5, 3, 3)] * 10] * 20 + [[DraftRound(5, 3, 0)] * 10] * 20
    found = acceptance_length(rounds)
    assert found.mean == 2.5
    assert found.low < 2.5 < found.high
    assert found.high - found.low > 0.5, "prompts are resampled whole, because their rounds are correlated"
    assert acceptance_length([[DraftRound(5, 3, 2)]] * 9)[:3] == (3, 3, 3)
    assert math.isnan(acceptance_length([[], []]).mean)


def test_each_place_counts_the_rounds_that_proposed_so_many():
    assert by_position([[DraftRound(5, 3, 3), DraftRound(9, 3, 1), DraftRound(11, 1, 0)]], 3) == pytest.approx(
        [2 / 3, 1 / 2, 1 / 2]
    )


@pytest.mark.parametrize(("finish", "last"), [("stop", 2), ("length", 1)])
def test_a_perfect_drafter_loses_only_at_the_end(finish: Any, last: int):
    answer = Spoken("a", "code", tuple(range(13)), 2, finish, (), 0)  # 10 tokens after the answer's first
    assert perfect(answer, 3) == [DraftRound(3, 3, 3), DraftRound(7, 3, 3), DraftRound(11, last, last)]


# ---------------------------------------------------------------------------------------------------------- engine


class FakeEngine:
    """Every answer has a first token, then `rounds` rounds of 3 draft tokens with `held` accepted, then a stop."""

    fingerprint = "fake"
    tokenizer = SimpleNamespace(stop_ids=(0,))
    engine = SimpleNamespace(layout=SimpleNamespace(max_model_len=1000))

    def __init__(self, rounds: int = 4, held: int = 2) -> None:
        self.asked: list[Job] = []
        self._rounds, self._held = rounds, held

    def generate(self, jobs: Sequence[Job]) -> dict[JobId, list[Delta]]:
        self.asked += jobs
        middle = [delta(*[7] * (self._held + 1), proposed=3, accepted=self._held)] * self._rounds
        return {job.id: [delta(7), *middle, delta(0, finish="stop")] for job in jobs}

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None: ...


def asked(domain: str, count: int) -> list[TokenizedPrompt]:
    return [TokenizedPrompt(f"{domain} {number}", domain, "en", (1, 2, 3)) for number in range(count)]


def test_lengths_come_by_domain_with_rounds_and_ceiling():
    found = evaluate(lambda k: FakeEngine(), [*asked("code", 3), *asked("math", 2)], CONFIG)  # type: ignore[arg-type]
    code, math_ = found.measured
    assert (code.domain, code.rounds, code.prompts, code.length) == ("code", 12, 3, 3)
    assert (math_.domain, math_.rounds) == ("math", 8)
    assert code.positions == (1, 1, 0)
    assert 3 < code.ceiling <= 4
    assert code.rows == 15


def test_greedy_prompts_are_asked_once_and_what_is_missing_is_said():
    engine = FakeEngine()
    config = EvalConfig(target="t", draft="d", k=(3,), modes=("greedy",), rounds=100, offline=0)
    found = evaluate(lambda k: engine, asked("code", 3), config)  # type: ignore[arg-type]
    assert len(engine.asked) == 3
    assert found.short == ("code, k = 3, greedy: 12 rounds of 100",)
    assert {job.sampling.temperature for job in engine.asked} == {0}


def test_sampled_prompts_are_asked_again_with_other_seeds_until_there_are_rounds_enough():
    engine = FakeEngine()
    config = EvalConfig(target="t", draft="d", k=(3,), modes=("sampled",), rounds=100, offline=0)
    found = evaluate(lambda k: engine, asked("code", 3), config)  # type: ignore[arg-type]
    assert found.measured[0].rounds >= 100
    assert not found.short
    assert len({job.sampling.seed for job in engine.asked}) == len(engine.asked)


def test_a_domain_in_which_nothing_is_proposed_is_asked_once():
    engine = FakeEngine(rounds=0)
    config = EvalConfig(target="t", draft="d", k=(3,), modes=("sampled",), rounds=100, offline=0)
    found = evaluate(lambda k: engine, asked("code", 3), config)  # type: ignore[arg-type]
    assert len(engine.asked) == 3
    assert found.measured[0].rounds == 0


def test_a_domain_that_has_its_rounds_is_not_asked_further(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BATCH", 2)
    engine = FakeEngine()
    config = EvalConfig(target="t", draft="d", k=(3,), modes=("greedy",), rounds=8, offline=0)
    evaluate(lambda k: engine, [*asked("code", 9), *asked("math", 1)], config)  # type: ignore[arg-type]
    assert sum(job.id.startswith("code") for job in engine.asked) < 5


def foretold(hit: bool) -> Any:
    def offline(answers: Sequence[Spoken], serving: Serving, k: int) -> list[Scores]:
        found: list[Scores] = []
        for answer in answers:
            positions = np.arange(answer.prompt + 1, len(answer.tokens))
            values = np.full((len(positions), k), float(hit), dtype=np.float32)
            found.append(Scores(positions, values, np.ones_like(values), values > 0, values >= 0))
        return found

    return lambda engine: offline


@pytest.mark.parametrize(("hit", "agreed"), [(True, True), (False, False)])
def test_the_trainers_estimate_must_agree_at_the_first_draft(hit: bool, agreed: bool):
    config = EvalConfig(target="t", draft="d", k=(3,), modes=("greedy",), rounds=0, offline=1000)
    found = evaluate(lambda k: FakeEngine(rounds=4), asked("code", 300), config, foretold(hit))  # type: ignore[arg-type]
    assert first_draft_check(found) == (1.0, float(hit), 1200)
    assert agree(found) is agreed


def test_few_rounds_say_nothing_about_agreement():
    config = EvalConfig(target="t", draft="d", k=(3,), modes=("greedy",), rounds=0, offline=1000)
    assert agree(evaluate(lambda k: FakeEngine(), asked("code", 3), config, foretold(False)))  # type: ignore[arg-type]


def test_prompts_and_corpus_are_either_or():
    console = Console(file=io.StringIO())
    with pytest.raises(ConfigError, match="one of --prompts, --corpus and --domain"):
        module.run(EvalConfig(target="t", draft="d"), console)
    with pytest.raises(ConfigError, match="--k"):
        module.run(EvalConfig(target="t", draft="d", prompts="p", k=(0,)), console)
