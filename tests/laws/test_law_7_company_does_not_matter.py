"""Law 7: a row alone = the row in a batch, bit for bit on a CPU; for all other rows, numbers of threads, and
pre-emptions.
"""

import functools
import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from redline.kernels.cpu import native
from redline.limits import processors
from redline.messages.job import Job
from tests import forked
from tests.tiny_model import BLOCK, BOTH, SUFFIX, Answer, job, open_engine, prompt, run, run_alone, tiny_model

KINDS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "narrow": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
}


def mixed(count: int, max_tokens: int = 20) -> list[Job]:
    """Jobs of every kind and of many lengths, each with its own seed."""
    lengths = (3, 70, 129, 200, 64, 31)
    return [
        job(
            f"{n}",
            prompt(seed=100 + n, length=lengths[n % len(lengths)]),
            max_tokens=max_tokens + n % 5,
            seed=n,
            **list(KINDS.values())[n % len(KINDS)],
        )
        for n in range(count)
    ]


def digest(answers: Sequence[Answer]) -> str:
    return hashlib.sha256(repr(answers).encode()).hexdigest()


@pytest.mark.parametrize("company", [2, 5, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_is_the_row_in_a_batch(kind: str, company: int):
    asked = job("asked", prompt(seed=1, length=150), max_tokens=40, seed=42, **KINDS[kind])
    # so prompts are computed in chunks next to decode rows
    engine = open_engine(tiny_model(), step_tokens=48, pages=128)
    others = mixed(company - 1)
    half = len(others) // 2
    try:
        together = run(engine, others[:half], [asked], others[half:])
    finally:
        engine.runner.close()
    assert together["asked"] == alone(asked)


@functools.cache
def alone(asked: Job) -> Answer:
    return run_alone(tiny_model(), asked)


def test_every_row_of_a_batch_is_what_it_is_alone():
    jobs = mixed(16)
    engine = open_engine(tiny_model(), step_tokens=40, pages=128)
    try:
        together = run(engine, jobs[:5], jobs[5:11], jobs[11:])
    finally:
        engine.runner.close()
    for one in jobs:
        assert together[one.id] == run_alone(tiny_model(), one), one.id


@pytest.mark.parametrize("length", [40, 129, 200])
@pytest.mark.parametrize("way", ["alone", "drafter", "block", "suffix", "fp8"])
def test_choices_of_one_request_share_its_prompt_and_are_what_they_are_alone(length: int, way: str):
    """They arrive together: the first computes the full pages, the others reuse them."""
    config: dict[str, Any] = {
        "alone": {},
        "drafter": {"speculation": BOTH},
        "block": {"speculation": BLOCK},
        "suffix": {"speculation": SUFFIX},
        "fp8": {"kv_dtype": torch.float8_e4m3fn},
    }[way]
    asked = prompt(seed=1, length=length)
    jobs = [
        job(f"{n}", asked, max_tokens=30, **({} if n == 3 else {"temperature": 1.0, "seed": n, "seeded": True}))
        for n in range(4)
    ]
    engine = open_engine(tiny_model(), **config)
    try:
        together = run(engine, jobs)
    finally:
        engine.runner.close()
    shared = (length - 1) // 64 * 64
    assert [together[one.id].cached_tokens for one in jobs] == [0, shared, shared, shared]
    for one in jobs:
        told = run_alone(tiny_model(), one, **config)
        assert together[one.id]._replace(cached_tokens=0, proposed=0, accepted=0) == told._replace(
            proposed=0, accepted=0
        ), one.id
        if way != "fp8":
            plain = run_alone(tiny_model(), one)
            assert together[one.id].tokens == plain.tokens, one.id


def test_nor_does_it_over_fp8_pages():
    jobs = mixed(9)
    engine = open_engine(tiny_model(), step_tokens=40, pages=12, max_model_len=384, kv_dtype=torch.float8_e4m3fn)
    try:
        together = run(engine, jobs[:4], jobs[4:])
    finally:
        engine.runner.close()
    for one in jobs:
        alone = run_alone(tiny_model(), one, max_model_len=384, kv_dtype=torch.float8_e4m3fn)
        assert together[one.id]._replace(cached_tokens=0) == alone, one.id


def test_jobs_that_are_pre_empted_resume_as_if_nothing_had_been():
    kinds = list(KINDS.values())
    jobs = [
        job(f"{n}", prompt(seed=n, length=40 + 20 * n), max_tokens=150, seed=n, **kinds[n % len(kinds)])
        for n in range(6)
    ]
    engine = open_engine(tiny_model(), step_tokens=64, pages=10, max_model_len=384, max_running=8)
    try:
        crowded = run(engine, jobs)
    finally:
        engine.runner.close()
    assert engine.planner.load().preemptions >= 3
    for one in jobs:
        assert crowded[one.id] == run_alone(tiny_model(), one, max_model_len=384), one.id


def test_another_seed_is_another_answer():
    one, other = (job("asked", prompt(seed=1, length=9), max_tokens=20, temperature=1.0, seed=seed) for seed in (1, 2))
    assert run_alone(tiny_model(), one).tokens != run_alone(tiny_model(), other).tokens


OTHERWISE = """
import os, sys, torch
os.environ["OMP_NUM_THREADS"] = sys.argv[1]
torch.set_num_threads(int(sys.argv[1]))
from redline.kernels.cpu import native
from tests.laws.test_law_7_company_does_not_matter import digest, mixed
from tests.tiny_model import run_alone, tiny_model
assert native.library() is not None
print(native.threads(), digest([run_alone(tiny_model(), one) for one in mixed(6)]))
"""


@pytest.mark.skipif(processors() == 1, reason="this process has one core")
def test_one_thread_computes_what_many_do():
    """If this process uses one thread, its child uses many, and vice versa."""
    assert native.library() is not None
    most = 1 if native.threads() > 1 else processors()
    child = forked.run([sys.executable, "-c", OTHERWISE, str(most)], capture_output=True, text=True, check=True)
    threads, text = child.stdout.split()
    assert sorted((int(threads) > 1, native.threads() > 1)) == [False, True]
    assert text == digest([run_alone(tiny_model(), one) for one in mixed(6)])
