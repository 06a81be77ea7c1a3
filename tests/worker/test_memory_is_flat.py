"""Many jobs in sequence: the memory of an engine does not grow after the first ones."""

import gc
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.chat.page_hashes import make_job
from redline.messages.job import JobId, Sampling
from redline.worker.turn import StepInFlight, turn
from tests.tiny_model import BOTH, FINGERPRINT, VOCABULARY, open_engine, tiny_model

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 2},
    {"temperature": 0.7, "presence_penalty": 0.5},
)
WAVES = 40  # waves of 8 jobs each, in each of three thirds


def anonymous() -> int:
    gc.collect()
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])


def jobs() -> Iterator[Any]:
    """Short jobs, all different; every fourth is aborted, every seventh has an invalid token id."""
    pick = random.Random(0)
    for number in range(sys.maxsize):
        tokens = [pick.randrange(VOCABULARY) for _ in range(pick.randrange(1, 150))]
        if number % 7 == 0:
            tokens[-1] = VOCABULARY
        sampling = Sampling(max_tokens=pick.randrange(1, 9), seed=number, **KINDS[number % len(KINDS)])
        yield make_job(JobId(f"{number}"), tuple(tokens), sampling, FINGERPRINT)


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")
@pytest.mark.parametrize(
    "drafts", [pytest.param(False, marks=pytest.mark.slow, id="plain"), pytest.param(True, id="drafter")]
)
def test_memory_is_flat_over_many_jobs(drafts: bool):
    how = BOTH if drafts else None
    engine, coming = open_engine(tiny_model(), pages=24, max_model_len=256, step_tokens=64, speculation=how), jobs()
    flight: StepInFlight | None = None

    def wave() -> None:
        nonlocal flight
        for number, job in zip(range(8), coming, strict=False):
            engine.planner.submit(job)
            if number % 4 == 3:
                flight, _ = turn(engine.planner, engine.runner, flight)
                engine.planner.abort(job.id)
        while not engine.planner.idle:
            flight, _ = turn(engine.planner, engine.runner, flight)

    held: list[int] = []
    with torch.inference_mode():
        for _ in range(3):
            for _ in range(WAVES):
                wave()
            held.append(anonymous())
            objects = len(gc.get_objects())
    engine.runner.close()
    engine.planner.check()
    # A leak grows in every third; a process with a large heap may allocate some megabytes at once. With 320 jobs, 12 KB
    # each would be a leak of a prompt's size.
    growth = min(held[1] - held[0], held[2] - held[1])
    assert growth < 4 << 20, f"{growth / 1e6:.1f} MB more after {8 * WAVES} jobs more; {objects:,} objects"
