"""Law 4: with a drafter = without.

Greedy and seeded answers are the same token for token, and on a CPU the log probabilities to the bit, for all drafts
and all batches: with chunked prompts, cached prefixes, pre-emption, and rows that do not speculate. Tokens sampled
without a given seed follow the same distribution (tests/run/drafting/test_verify.py).
"""

import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from redline.chat.conversation import Conversation, Message
from redline.chat.template import encode, style_of
from redline.chat.tokenizer import Tokenizer
from redline.messages.job import Job, JobId
from redline.model.eagle3.module import Eagle3
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.cpu import K2, load
from redline.worker.config import DraftConfig, Learned
from redline.worker.engine import EngineCore
from tests.tiny_model import BLOCK, BOTH, LEARNED, SUFFIX, Answer, job, open_engine, prompt, run, run_alone, tiny_model

MODELS = Path(__file__).parents[2] / "models"
WAYS: dict[str, DraftConfig] = {
    "suffix": SUFFIX,
    "a drafter that is wrong": LEARNED,
    "both": BOTH,
    "a block drafter that is wrong": BLOCK,
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


def speculating(way: str, **engine: Any) -> EngineCore:
    return open_engine(tiny_model(), speculation=WAYS[way], **engine)


def plain(answer: Answer) -> Answer:
    return answer._replace(proposed=0, accepted=0, cached_tokens=0)


def _alone(asked: Job) -> Answer:
    return _answer_of(unnamed(asked))


@functools.cache
def _answer_of(unnamed: Job) -> Answer:
    return run_alone(tiny_model(), unnamed)


def unnamed(asked: Job) -> Job:
    """The parts of a job that determine its answer: jobs that differ only in name are answered alone once."""
    return msgspec.structs.replace(asked, id=JobId("unnamed"))


def answers_of(engine: EngineCore, *waves: list[Job], every: int = 3) -> dict[str, Answer]:
    try:
        return run(engine, *waves, every=every)
    finally:
        engine.runner.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_one_answer(way: str, sampling: str):
    asked = job("asked", prompt(seed=1, length=70), max_tokens=90, **SAMPLINGS[sampling])
    answer = answers_of(speculating(way), [asked])["asked"]
    assert answer.proposed > 0 or way == "suffix"  # text sampled from a random model has no repetitions
    assert plain(answer) == _alone(asked)


@pytest.mark.parametrize("way", WAYS)
def test_one_answer_over_fp8_pages(way: str):
    """The drafter's rows are e4m3 too."""
    sampled = SAMPLINGS["greedy"], SAMPLINGS["seeded, top_p"]
    jobs = [job(f"{n}", prompt(seed=1, length=70 + n), max_tokens=60, **sampling) for n, sampling in enumerate(sampled)]
    engine = speculating(way, kv_dtype=torch.float8_e4m3fn)
    assert engine.runner.kv.draft.dtype == torch.float8_e4m3fn
    answers = answers_of(engine, jobs)
    for asked in jobs:
        alone = run_alone(tiny_model(), asked, kv_dtype=torch.float8_e4m3fn)
        assert plain(answers[asked.id]) == alone, asked.id


@pytest.mark.parametrize("way", WAYS)
def test_many_in_one_batch_with_chunks_prefixes_and_few_pages(way: str):
    """16 jobs over 12 pages: pre-emption, prefix cache hits, chunked prompts, and sampled next to greedy rows."""
    engine = speculating(way, pages=12, max_model_len=400, step_tokens=90)
    waves = [
        [
            job(f"{wave}.{n}", prompt(seed=n % 3, length=20 + 30 * n), max_tokens=120 + 15 * n, **sampling)
            for n, sampling in enumerate(SAMPLINGS.values())
        ]
        + [job(f"{wave}.again", prompt(seed=1, length=130), max_tokens=60)]
        for wave in range(2)
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
    both = Learned(drafter="tiny", tokens=drafts, adaptive=False)
    answer = answers_of(open_engine(tiny_model(), speculation=both), [asked])["asked"]
    assert plain(answer) == _alone(asked)


def test_a_draft_that_runs_past_a_stop_id_is_forgotten():
    asked = job("asked", prompt(seed=1, length=70), max_tokens=90)
    stop = _alone(asked).tokens[-40]
    stopped = job("stopped", prompt(seed=1, length=70), max_tokens=90, stop_ids=(stop,))
    answer = answers_of(speculating("suffix"), [stopped])["stopped"]
    assert plain(answer) == _alone(stopped)
    assert answer.finish == "stop"


# ------------------------------------------------------------------------------------------------ the shipped models


@functools.cache
def nano() -> tuple[K2, Eagle3]:
    checkpoint = Checkpoint.open(MODELS / "kimi-nano")
    model, drafter = load(checkpoint, torch.device("cpu")), Eagle3.open(MODELS / "kimi-nano-eagle3", checkpoint.config)
    drafter.prepare(model)
    return model, drafter


QUESTIONS = (
    "What is 347 + 586?",
    "Write a Python function that adds two numbers.",
    "How do you say water in Spanish?",
    "A farmer has 12 sheep and buys 5 more. How many has he now?",
    "Name three colours.",
    "What is 12 * 9?",
)


SYSTEM = Message(role="system", content="You are a helpful assistant. Answer in short sentences. " * 5)


def test_nano_answers_as_it_does_without_its_drafter_and_most_drafts_hold():
    """16 at once, with cached prefixes and pre-emption, some seeded: the shipped models."""
    model, drafter = nano()
    tokenizer, style = Tokenizer.open(MODELS / "kimi-nano"), style_of(MODELS / "kimi-nano")
    asked: list[Job] = []
    for n in range(18):
        user = Message(role="user", content=QUESTIONS[n % len(QUESTIONS)])
        chat = Conversation(messages=(SYSTEM, user), thinking=n % 2 == 0)
        drawn = {"temperature": 0.7, "seeded": True, "seed": n} if n % 6 == 5 else {}
        tokens = encode(chat, tokenizer, style)
        ends = tokenizer.stop_ids if n % 3 else ()  # some do not stop, so that pages run out
        asked.append(job(f"{n}", tokens, max_tokens=170, stop_ids=ends, logprobs=None, **drawn))
    settings = {"pages": 8, "max_model_len": 320, "step_tokens": 128, "kv_dtype": torch.bfloat16}
    alone = {one: run_alone(model, one, **settings) for one in {unnamed(one) for one in asked}}
    speculation = Learned(drafter="kimi-nano-eagle3", adaptive=False, suffix=False)
    engine = open_engine(model, drafter=drafter, speculation=speculation, **settings)
    answers = answers_of(engine, asked[:9], asked[9:], every=1)
    load = engine.planner.load()
    for one in asked:
        assert answers[one.id].tokens == alone[unnamed(one)].tokens, one.id
    assert load.preemptions > 0
    assert load.prompt_tokens_cached > 0
    ended = [answer for answer in answers.values() if answer.finish == "stop"]
    assert sum(answer.accepted for answer in ended) > 0.7 * sum(answer.proposed for answer in ended)
