"""The peer: transformers' `generate` on the dequantised weights, timed in a separate process.

    python -m lab.peers.peer_transformers FOLDER

reads one task per line as JSON from stdin and writes one JSON line of seconds for each, so that a benchmark can
alternate between it and us, without the two sharing threads. A task is {"way": {...}, "prompts": [[1, 2, ...]], "new":
64}; a way is dtype, experts and threads, and the benchmark determines the fastest one.
"""

import json
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from redline import clock
from tests.oracle import transformers_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXPERTS = ("eager", "grouped_mm")


class Way(NamedTuple):
    """How transformers runs the model. dtype: a key of DTYPES. experts: as `oracle.transformers_model` takes it."""

    dtype: str
    experts: str
    threads: int


def ways(threads: int) -> list[Way]:
    """Every dtype with every way to compute experts, on one thread and on `threads`."""
    return [Way(*way) for way in product(DTYPES, EXPERTS, sorted({1, threads}))]


class Times(NamedTuple):
    """Seconds of one generation."""

    first_s: float  # until the first new token of every row
    rest_s: float  # for the other new tokens


@torch.inference_mode()
def run(model: Any, prompts: list[list[int]], new: int) -> Times:
    """Greedy, `new` tokens for every prompt (all of one length), never ending early."""
    ids, ticks = torch.tensor(prompts), _clock()
    start = clock.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[ticks],
    )
    assert len(ticks.ticks) == new
    return Times(ticks.ticks[0] - start, ticks.ticks[-1] - ticks.ticks[0])


def serve(folder: Path) -> None:
    """Answers tasks until stdin ends.

    folder: of the checkpoint; its weights are kept once for each dtype that was requested.
    """

    @cache
    def model(dtype: str) -> Any:
        return transformers_model(folder, DTYPES[dtype])

    for line in sys.stdin:
        task = json.loads(line)
        way = Way(**task["way"])
        torch.set_num_threads(way.threads)
        model(way.dtype).set_experts_implementation(way.experts)
        times = run(model(way.dtype), task["prompts"], task["new"])
        print(json.dumps(times._asdict()), flush=True)


def _clock() -> Any:
    from transformers import StoppingCriteria

    class Clock(StoppingCriteria):
        """Records the time at which each token was chosen; stops nothing."""

        def __init__(self) -> None:
            self.ticks: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
            self.ticks.append(clock.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    return Clock()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
