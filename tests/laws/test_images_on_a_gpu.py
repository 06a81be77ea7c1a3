"""Laws with images in the prompt, on a GPU: log probabilities are a CPU's within the rounding of bf16; chunks, the
prefix cache and drafts change nothing."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from redline.worker.config import Learned, Suffix
from redline.worker.engine import Engine
from tests.laws.test_images_change_nothing import ASKED, ONE, PARTS, TWO, folder, job, opened, run, spoken, text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
__all__ = ["folder"]  # a fixture
ROUNDING = 0.05  # nats, of bf16 through the tiny model's layers


def on_gpu(folder: Path, **config: Any) -> AbstractContextManager[Engine]:
    return opened(folder, device="cuda", kv_dtype="bf16", kv_memory=64_000_000, **config)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with on_gpu(folder) as engine:
        yield engine


def same(found: Any, expected: Any) -> None:
    """Equal tokens up to a near tie, and log probabilities within the rounding of bf16."""
    for token, other, row, their in zip(found[0], expected[0], found[1], expected[1], strict=True):
        assert abs(row.logprob - their.logprob) < 4 * ROUNDING
        if token != other:
            gap = row.top[0][1] - row.top[1][1]
            assert gap < 2 * ROUNDING, f"{token} and {other} differ by {gap} nats"
            return


def test_log_probabilities_of_a_prompt_with_images_are_those_of_a_cpu(folder: Path, engine: Engine):
    with opened(folder) as cpu:
        ((_, _, expected),) = run(cpu, job("cpu", cpu, *PARTS))
    ((_, _, found),) = run(engine, job("gpu", engine, *PARTS))
    distances = [abs(one.logprob - other.logprob) for one, other in zip(found, expected, strict=True)]
    assert median(distances) < ROUNDING / 4
    far = sum(distance > 4 * ROUNDING for distance in distances)
    assert far <= len(distances) / 20, f"{far} of {len(distances)}"  # where rounding decides between two experts


@pytest.mark.parametrize("step_tokens", [33, 64])
def test_chunks_change_nothing(step_tokens: int, folder: Path, engine: Engine):
    with on_gpu(folder, step_tokens=step_tokens, max_running=4) as other:
        (found,) = run(other, job("law 2", other, *PARTS, sampling=ASKED))
    (expected,) = run(engine, job("law 2", engine, *PARTS, sampling=ASKED))
    same(found, expected)


def test_the_cache_changes_nothing_and_a_second_question_encodes_nothing(folder: Path):
    with on_gpu(folder) as engine, on_gpu(folder) as other:
        parts = text(1, 30), ONE, text(2, 41), TWO, text(3, 57)
        run(engine, job("first", engine, *parts, sampling=ASKED))
        features = engine.engine.features
        assert features is not None
        second = job("second", engine, *parts, text(4, 20), sampling=ASKED)
        engine.images.clear()
        deltas = engine.generate([second])[second.id]
        assert deltas[-1].cached_tokens >= 64
        assert features.encoded == 2
        same(spoken(deltas), run(other, job("alone", other, *parts, text(4, 20), sampling=ASKED))[0])


@pytest.mark.parametrize("drafts", ["learned", "suffix"])
def test_drafts_change_nothing(drafts: str, folder: Path, engine: Engine):
    parts = *[text(8, 24), ONE] * 3, text(8, 12)
    (expected,) = run(engine, job("without", engine, *parts, sampling=ASKED))
    given = Learned(drafter=str(folder / "drafter"), adaptive=False) if drafts == "learned" else Suffix(adaptive=False)
    with on_gpu(folder, speculation=given) as other:
        same(run(other, job("with", other, *parts, sampling=ASKED))[0], expected)
