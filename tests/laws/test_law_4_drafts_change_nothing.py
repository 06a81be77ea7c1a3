"""Law 4: with a drafter = without.

Greedy and seeded answers are the same token for token, and on a CPU the log probabilities to the bit, whatever is
drafted and whoever is company: in prompts cut into chunks, from cached prefixes, after pre-emption, beside rows that do
not speculate. What is drawn without a given seed follows the same distribution (tests/run/test_verify.py).
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.model.checkpoint import Checkpoint
from redline.model.eagle3 import Eagle3
from redline.model.k2 import K2, load
from redline.wire.job import Job
from redline.worker.engine import Engine
from tests.tiny_model import Answer, job, open_engine, prompt, run, run_alone, tiny_drafter, tiny_model

MODELS = Path(__file__).parents[2] / "models"
WAYS: dict[str, dict[str, Any]] = {
    "suffix": {"draft": "suffix"},
    "a drafter that is wrong": {"drafter": "tiny", "suffix": False},
    "both": {"drafter": "tiny"},
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5, "seeded": True},
    "seeded, top_p": {"temperature": 0.8, "top_p": 0.9, "seed": 6, "seeded": True},
    "seeded, penalties and bias": {
        "temperature": 0.7,
        "seed": 7,
        "seeded": True,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": ((3, 4.0), (9, -2.0)),
    },
    "greedy, penalties": {"frequency_penalty": 0.4, "min_tokens": 12, "stop_ids": (1, 2, 3)},
}


def speculating(way: str, **engine: Any) -> Engine:
    settings = {**WAYS[way], "draft_adaptive": False, "draft_tokens": 3, **engine}
    if settings.get("drafter") == "tiny":
        settings["drafter"] = tiny_drafter()
    return open_engine(tiny_model(), **settings)


def plain(answer: Answer) -> Answer:
    return answer._replace(proposed=0, accepted=0, cached_tokens=0)


@functools.cache
def _alone(asked: Job) -> Answer:
    return run_alone(tiny_model(), asked)


def answers_of(engine: Engine, *waves: list[Job], every: int = 3) -> dict[str, Answer]:
    try:
        return run(engine, *waves, every=every)
    finally:
        engine.runner.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_one_answer(way: str, sampling: str):
    asked = job("asked", prompt(seed=1, length=70), max_tokens=90, **SAMPLINGS[sampling])
    answer = answers_of(speculating(way), [asked])["asked"]
    assert answer.proposed > 0 or way == "suffix"  # what is drawn from a random model repeats nothing
    assert plain(answer) == _alone(asked)


@pytest.mark.parametrize("way", WAYS)
def test_many_in_one_batch_with_chunks_prefixes_and_few_pages(way: str):
    """18 jobs over 12 pages: pre-emption, prefix hits, chunked prompts, and rows that are drawn beside greedy ones."""
    engine = speculating(way, pages=12, max_model_len=400, step_tokens=90)
    waves = [
        [
            job(f"{wave}.{n}", prompt(seed=n % 3, length=20 + 30 * n), max_tokens=120 + 15 * n, **sampling)
            for n, sampling in enumerate(SAMPLINGS.values())
        ]
        + [job(f"{wave}.again", prompt(seed=1, length=130), max_tokens=60)]
        for wave in range(3)
    ]
    answers = answers_of(engine, *waves, every=9)
    assert engine.planner.load().preemptions > 0
    assert any(answer.cached_tokens for answer in answers.values())
    for wave in waves:
        for asked in wave:
            assert plain(answers[asked.id]).tokens == _alone(asked).tokens, asked.id


@pytest.mark.parametrize("drafts", [1, 2, 7])
def test_any_number_of_drafts(drafts: int):
    asked = job("asked", prompt(seed=2, length=61), max_tokens=80)
    answer = answers_of(speculating("both", draft_tokens=drafts), [asked])["asked"]
    assert plain(answer) == _alone(asked)


def test_a_draft_that_runs_past_a_stop_id_is_forgotten():
    asked = job("asked", prompt(seed=1, length=70), max_tokens=90)
    stop = _alone(asked).tokens[-40]
    stopped = job("stopped", prompt(seed=1, length=70), max_tokens=90, stop_ids=(stop,))
    answer = answers_of(speculating("suffix"), [stopped])["stopped"]
    assert plain(answer) == _alone(stopped)
    assert answer.finish == "stop"


# ------------------------------------------------------------------------------------ the models as they are shipped


@functools.cache
def nano() -> tuple[K2, Eagle3]:
    checkpoint = Checkpoint.open(MODELS / "kimi-nano")
    model, drafter = load(checkpoint, torch.device("cpu")), Eagle3.open(MODELS / "kimi-nano-eagle3", checkpoint.config)
    drafter.prepare(model)
    return model, drafter
