"""Law 3: from a cached prefix = from nothing.

Bit-equal if the cached pages were computed by a prefill. A page filled with generated tokens was computed by the
absorbed form of attention, and a new prompt over the same tokens by the expanded one; the two agree to rounding
(redline/run/slots.py), so in this case the log probabilities agree within a tolerance.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch

from redline.worker.config import Learned
from redline.worker.engine import EngineCore
from tests.tiny_model import BLOCK, BOTH, Answer, drafter_rows, job, open_engine, prompt, run, run_alone, tiny_model


@pytest.fixture
def engine() -> Iterator[EngineCore]:
    opened = open_engine(tiny_model(), step_tokens=100)
    yield opened
    opened.runner.close()


@pytest.mark.parametrize(("length", "cached"), [(63, 0), (64, 0), (65, 64), (200, 192), (300, 256)])
def test_the_same_prompt_again(engine: EngineCore, length: int, cached: int):
    asked = prompt(seed=3, length=length)
    first, second = (run(engine, [job(name, asked, max_tokens=16)])[name] for name in ("first", "second"))
    assert (first.cached_tokens, second.cached_tokens) == (0, cached)
    assert second._replace(cached_tokens=0) == first


@pytest.mark.parametrize("shared", [64, 100, 192])
def test_another_prompt_that_begins_alike(engine: EngineCore, shared: int):
    run(engine, [job("before", prompt(seed=3, length=250))])
    asked = job("after", prompt(seed=3, length=shared) + prompt(seed=4, length=170), max_tokens=16)
    answer = run(engine, [asked])["after"]
    assert answer.cached_tokens == shared // 64 * 64
    assert answer._replace(cached_tokens=0) == run_alone(engine.model, asked)


def test_a_prefix_that_is_shared_while_its_first_job_still_runs(engine: EngineCore):
    asked = prompt(seed=5, length=200)
    waves = [[job("first", asked, max_tokens=40)], [job(f"{n}", (*asked, n), max_tokens=20) for n in range(4)]]
    answers = run(engine, *waves, every=8)
    for one in itertools.chain(*waves):
        assert answers[one.id].cached_tokens == (0 if one.id == "first" else 192)
        assert answers[one.id]._replace(cached_tokens=0) == run_alone(engine.model, one), one.id


def test_pages_that_were_evicted_and_computed_again():
    asked = job("asked", prompt(seed=6, length=150))
    engine = open_engine(tiny_model(), pages=6, max_model_len=320)
    try:
        first = run(engine, [asked])["asked"]
        run(engine, [job("other", prompt(seed=7, length=310))])
        again = run(engine, [asked])["asked"]
    finally:
        engine.runner.close()
    assert again.cached_tokens < 128
    assert again._replace(cached_tokens=0) == first


def test_a_conversation_goes_on_from_pages_that_its_answer_filled():
    engine = open_engine(tiny_model(), kv_dtype=torch.float32)
    asked = prompt(seed=8, length=70)
    try:
        answer = run(engine, [job("first", asked, max_tokens=140)])["first"]
        later = job("second", (*asked, *answer.tokens, *prompt(seed=9, length=20)), max_tokens=1, logprobs=20)
        warm = run(engine, [later])["second"]
    finally:
        engine.runner.close()
    cold = run_alone(engine.model, later, kv_dtype=torch.float32)
    assert warm.cached_tokens == 192
    assert warm.tokens == cold.tokens
    a, b = dict(warm.logprobs[0].top), dict(cold.logprobs[0].top)
    assert a.keys() == b.keys()
    assert max(abs(a[token] - b[token]) for token in a) < 1e-4


def test_over_fp8_pages_too_whoever_shares_them():
    before, asked = prompt(seed=3, length=250), prompt(seed=3, length=150) + prompt(seed=4, length=90)
    engine = open_engine(tiny_model(), step_tokens=100, kv_dtype=torch.float8_e4m3fn)
    after = [job(f"{n}", asked[: len(asked) - n], max_tokens=16) for n in range(3)]
    try:
        answers = run(engine, [job("before", before)], after, every=20)
    finally:
        engine.runner.close()
    for one in after:
        assert answers[one.id].cached_tokens >= 128
        alone = run_alone(engine.model, one, kv_dtype=torch.float8_e4m3fn)
        assert answers[one.id]._replace(cached_tokens=0) == alone, one.id


@pytest.mark.parametrize("speculation", [BOTH, BLOCK], ids=["chain", "block"])
@pytest.mark.parametrize("shared", [64, 100, 192])
def test_with_a_drafter_its_rows_are_the_same_too(shared: int, speculation: Learned):
    """The drafter's rows of shared pages do not depend on the tokens that followed when they were computed, nor on the
    jobs that share them.
    """
    asked = job("after", prompt(seed=3, length=shared) + prompt(seed=4, length=170), max_tokens=16)
    answers: list[Answer] = []
    rows: list[torch.Tensor] = []
    for before in ([], [job("before", prompt(seed=3, length=250)), job("again", prompt(seed=3, length=191))]):
        engine = open_engine(tiny_model(), speculation=speculation, max_running=1)
        try:
            run(engine, before)
            answers.append(run(engine, [asked])["after"])
            rows.append(drafter_rows(engine, 0, len(asked.tokens) + 10))
        finally:
            engine.runner.close()
    assert [answer.cached_tokens for answer in answers] == [0, shared // 64 * 64]
    assert torch.equal(rows[0], rows[1])
    assert answers[1]._replace(cached_tokens=0) == answers[0]
