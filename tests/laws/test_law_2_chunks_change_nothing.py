"""Law 2: prefill in chunks = prefill at once, bit for bit on a CPU: every log probability and the answer."""

import pytest
import torch

from redline.model.k2.cpu import K2
from redline.policy.chunk_budget import SHARE
from redline.policy.pairs import Work
from redline.worker.config import Learned
from tests.tiny_model import BLOCK, BOTH, Answer, drafter_rows, job, open_engine, prompt, run, run_alone, tiny_model

PROMPT = prompt(seed=2, length=300)
ASKED = {"max_tokens": 12, "prompt_logprobs": 3}


@pytest.fixture(scope="module")
def model() -> K2:
    return tiny_model()


@pytest.fixture(scope="module")
def at_once(model: K2) -> Answer:
    return run_alone(model, job("whole", PROMPT, **ASKED), step_tokens=512)


@pytest.mark.parametrize("step_tokens", [7, 63, 64, 65, 100, 299])
def test_a_prompt_in_chunks_is_the_prompt_at_once(model: K2, at_once: Answer, step_tokens: int):
    assert len(at_once.prompt_logprobs) == len(PROMPT) - 1
    engine = open_engine(model, step_tokens=step_tokens, max_running=1)
    try:
        assert run(engine, [job("chunked", PROMPT, **ASKED)])["chunked"] == at_once
    finally:
        engine.runner.close()
    assert engine.planner.load().steps >= -(-len(PROMPT) // step_tokens) + ASKED["max_tokens"] - 1


class Uneven:
    """A forecast with which mixed steps have room for 64, 192, 256 and 128 prompt tokens, in rotation."""

    known = True

    def __init__(self) -> None:
        self._steps = 0

    def took(self, work: Work, ms: float) -> None:
        self._steps += work.prompt > 0

    def ms(self, work: Work) -> float:
        return work.prompt / (64, 192, 256, 128)[self._steps % 4]


def test_chunks_that_vary_beside_answers_change_nothing(model: K2):
    beside = [job(f"{number}", prompt(seed=7 + number, length=20), max_tokens=40) for number in range(2)]
    long = job("long", prompt(seed=3, length=900), max_tokens=4)
    engine = open_engine(model, step_tokens=512, step_ms=1 / SHARE)
    engine.planner.foresee(Uneven())
    try:
        together = run(engine, beside, [long])
        assert engine.planner.load().bounded == 5, "900 tokens in 64, 192, 256, 128, 64 and 192"
    finally:
        engine.runner.close()
    for one in (*beside, long):
        assert together[one.id] == run_alone(model, one), one.id


def test_chunks_by_what_the_worker_has_measured_change_nothing_either(model: K2):
    """No step is shorter than a tenth of a millisecond, so once step times are measured, chunks have their minimum
    length.
    """
    waves = [[job(f"{n}", prompt(seed=20 + n, length=30 + 90 * n), max_tokens=40)] for n in range(5)]
    engine = open_engine(model, step_tokens=512, step_ms=0.1)
    try:
        together = run(engine, *waves, every=10)
        forecast = engine.planner._beside.forecast
        assert forecast is not None, "a time bound needs a forecast"
        assert forecast.known
    finally:
        engine.runner.close()
    for (one,) in waves:
        assert together[one.id] == run_alone(model, one), one.id


def test_several_prompts_in_one_step_are_each_their_own(model: K2):
    jobs = [job(f"{length}", prompt(seed=length, length=length), **ASKED) for length in (1, 2, 64, 65, 130, 200)]
    engine = open_engine(model, step_tokens=512)
    try:
        together = run(engine, jobs)
    finally:
        engine.runner.close()
    for one in jobs:
        assert together[one.id] == run_alone(model, one), one.id


@pytest.mark.parametrize("step_tokens", [63, 100])
def test_over_fp8_pages_chunks_change_nothing_either(model: K2, step_tokens: int):
    asked = job("asked", PROMPT, **ASKED)
    whole, chunked = (
        run_alone(model, asked, kv_dtype=torch.float8_e4m3fn, step_tokens=count) for count in (512, step_tokens)
    )
    assert chunked == whole
    assert chunked != run_alone(model, asked), "pages of four bits should change the answer"


@pytest.mark.parametrize("speculation", [BOTH, BLOCK], ids=["chain", "block"])
@pytest.mark.parametrize("step_tokens", [32, 64, 100])
def test_the_rows_of_a_drafter_are_the_same_too(model: K2, step_tokens: int, speculation: Learned):
    """Also if a chunk ends with a page: the drafter's row of the next token waits for the next page."""
    jobs = [job(f"{length}", prompt(seed=length, length=length), max_tokens=40) for length in (90, 127, 128, 129, 200)]
    rows: list[list[torch.Tensor]] = []
    for tokens in (512, step_tokens):
        engine = open_engine(model, speculation=speculation, step_tokens=tokens, max_running=5)
        try:
            run(engine, jobs)
            rows.append([drafter_rows(engine, slot, len(one.tokens) + 35) for slot, one in enumerate(jobs)])
        finally:
            engine.runner.close()
    for one, at_once, in_chunks in zip(jobs, *rows, strict=True):
        assert torch.equal(at_once, in_chunks), one.id
