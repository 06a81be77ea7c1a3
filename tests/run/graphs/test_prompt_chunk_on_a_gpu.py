"""On a GPU no prompt makes the host wait: torch raises if one of its operations would synchronise. Run by hand:

python -m pytest -m gpu tests/run/graphs/test_prompt_chunk_on_a_gpu.py
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from redline.messages.job import Job
from redline.worker.config import DraftConfig, EngineConfig, Learned, Suffix
from redline.worker.engine import EngineCore
from tests.tiny_model import job, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NANO = Path(__file__).parents[3] / "models" / "kimi-nano"
DRAFTER = NANO.parent / "kimi-nano-eagle3"
KINDS = {}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}


@contextmanager
def no_waits() -> Iterator[None]:
    """Within this context, a torch operation that waits for the device raises, in every thread."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that this mode does not detect every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 7919 + place * (104_729 + seed)) % 4000 for place in range(length))


def waves(seed: int) -> list[list[Job]]:
    """Eight answers; while they run, prompts in one chunk, in several, together, and with a cached prefix."""

    def one(name: str, of: int, length: int, most: int) -> Job:
        return job(f"{seed}.{name}", tokens(seed + of, length), max_tokens=most, logprobs=None, **KINDS[of % 3])

    return [
        [one(f"decodes.{n}", n, 20 + 9 * n, 400) for n in range(8)],
        [one("long", 10, 2000, 20)],
        [one("longer", 11, 5000, 20)],
        [one(f"together.{n}", 12 + n, 30 + 97 * n, 20) for n in range(4)],
        [one("again", 10, 2000, 20), one("one token", 13, 1, 20)],
    ]


@pytest.mark.parametrize(
    "speculation",
    [None, Suffix(adaptive=False), Learned(drafter=str(DRAFTER), adaptive=False)],
    ids=["plain", "suffix", "drafter"],
)
def test_prompts_beside_decoding_rows_make_nobody_wait(speculation: DraftConfig | None):
    config = EngineConfig(
        max_model_len=8192, kv_memory=1 << 30, step_tokens=2048, device="cuda", speculation=speculation
    )
    engine = EngineCore.load(NANO, config)
    runner = engine.runner
    try:
        run(engine, *waves(0), every=12)  # compiles kernels that are compiled at first use
        chunks = runner.chunks
        with no_waits():
            answers = run(engine, *waves(1000), every=12)
        assert [(name, one.error) for name, one in answers.items() if one.error is not None] == []
        assert runner.chunks - chunks >= 7
        assert answers["1000.again"].cached_tokens >= 1984
        assert not runner.led
    finally:
        runner.close()


def test_a_wait_is_noticed():
    with no_waits(), pytest.raises(RuntimeError, match="synchron"):
        torch.ones(3, device="cuda").tolist()
