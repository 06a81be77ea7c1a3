"""Law 5: where an answer is computed does not matter.

An answer that one worker has begun and another goes on with is the one that would have come of one worker alone: greedy
and seeded to the token, and on a CPU its log probabilities to the bit.
"""

from typing import Any

import msgspec
import pytest

from redline.wire.job import Job
from redline.worker.config import DraftConfig
from tests.laws.test_law_4_drafts_change_nothing import SAMPLINGS, plain
from tests.tiny_model import BOTH, Answer, job, open_engine, prompt, run, run_alone, tiny_model


def moved(asked: Job, whole: Answer, given: int) -> Job:
    """What a gateway sends to the next worker, once so many tokens have come of the answer."""
    scored = len(whole.prompt_logprobs) if given else 0
    return msgspec.structs.replace(asked, answer=whole.tokens[:given], scored=scored)


def rest(whole: Answer, given: int) -> Answer:
    scored = () if given else whole.prompt_logprobs
    return whole._replace(tokens=whole.tokens[given:], logprobs=whole.logprobs[given:], prompt_logprobs=scored)


@pytest.mark.parametrize("speculation", [None, BOTH], ids=["plain", "drafter and suffix"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_answer_goes_on_elsewhere(sampling: str, speculation: DraftConfig | None) -> None:
    asked = job("asked", prompt(seed=1, length=90), max_tokens=80, prompt_logprobs=1, **SAMPLINGS[sampling])
    whole = run_alone(tiny_model(), asked)
    for given in (1, 2, 38, 79):
        answer = run_alone(tiny_model(), moved(asked, whole, given), speculation=speculation)
        assert plain(answer) == plain(rest(whole, given)), given


@pytest.mark.parametrize("given", [0, 5, 40])
def test_it_may_begin_from_pages_that_are_cached_there(given: int) -> None:
    """Those of its prompt, as a prefill computes them; and none that an answer has filled."""
    asked = job("asked", prompt(seed=2, length=150), max_tokens=60)
    whole = run_alone(tiny_model(), asked)
    engine = open_engine(tiny_model(), speculation=BOTH)
    try:
        run(engine, [job("before", (*asked.tokens, *whole.tokens[:58]), max_tokens=40)])
        run(engine, [job("after", asked.tokens, max_tokens=60)])
        answer = run(engine, [moved(asked, whole, given)])["asked"]
    finally:
        engine.runner.close()
    assert answer.cached_tokens == 128
    assert plain(answer) == plain(rest(whole, given))


def test_many_come_at_once_and_are_pre_empted() -> None:
    engine = open_engine(tiny_model(), pages=12, max_model_len=400, step_tokens=90, speculation=BOTH)
    asked: list[Job] = []
    wholes: dict[str, Answer] = {}
    for n, sampling in enumerate((*SAMPLINGS.values(), *SAMPLINGS.values())):
        one: dict[str, Any] = {"max_tokens": 100 + 5 * n, **sampling}
        fresh = job(f"{n}", prompt(seed=n % 3, length=30 + 25 * n), **one)
        wholes[fresh.id] = run_alone(tiny_model(), fresh)
        asked.append(moved(fresh, wholes[fresh.id], 9 * n))
    try:
        answers = run(engine, asked, every=2)
        assert engine.planner.load().preemptions > 0
    finally:
        engine.runner.close()
    for one in asked:
        assert answers[one.id].tokens == wholes[one.id].tokens[len(one.answer) :], one.id


def test_an_answer_that_is_complete_already_is_refused() -> None:
    asked = job("asked", prompt(seed=1, length=20), max_tokens=5)
    answer = run_alone(tiny_model(), msgspec.structs.replace(asked, answer=(1, 2, 3, 4, 5)))
    assert answer.finish == "error"
    assert "5 tokens of the answer are there already" in str(answer.error)
