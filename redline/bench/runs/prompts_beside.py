"""What prompts that arrive cost the rows that decode beside them, on a GPU.

    python -m redline.bench.runs.prompts_beside [--weights models/kimi-nano] [--draft models/kimi-nano-eagle3]
    python -m redline.bench.runs.prompts_beside --shape kimi-k2.6 --layers 61 --alias 12

Eight answers run through planner, runner and loop. Prompts arrive one at a time, each to be read in one step; what a
prompt adds is the time of the steps from its arrival to the next one's, less the time of as many steps without. Beside
it stands what the same chunk takes alone: prompts one behind another and nothing else, each launched while the one
before it runs. The goal is that a prompt adds what its chunk takes alone and 3 %.
"""

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from redline import clock
from redline.bench.program import output, program
from redline.bench.record import provenance
from redline.bench.runs.loop_gap import random_engine
from redline.chat.hashing import make_job
from redline.model.k2.shapes import shape
from redline.wire.job import JobId, Sampling
from redline.worker.config import EngineConfig, drafts_of
from redline.worker.engine import EngineCore
from redline.worker.loop import StepInFlight, turn

FINGERPRINT = "prompts beside"
GOAL = 0.03  # of the chunk's time, beyond it


class Turns:
    """Turns of one engine's loop, and when each of its steps ended."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._flight: StepInFlight | None = None
        self._random = random.Random(0)
        self._jobs = 0
        self.ends: list[float] = []  # seconds, of each step

    def submit(self, prompt: int, tokens: int) -> None:
        """Queues a greedy job over a random prompt of its own. Raises AssertionError where it is refused."""
        vocabulary = self._engine.model.config.vocab_size
        ids = tuple(self._random.randrange(vocabulary) for _ in range(prompt))
        name = JobId(f"job {self._jobs}")
        self._jobs += 1
        job = make_job(name, ids, Sampling(max_tokens=tokens, temperature=0.0), self._engine.fingerprint)
        refused = self._engine.planner.submit(job)
        assert not refused, f"the job is refused: {refused[0].error}"

    def turn(self) -> int:
        """One turn; returns how many new tokens it brought. Raises AssertionError where a job fails."""
        settled = self._flight is not None
        self._flight, deltas = turn(self._engine.planner, self._engine.runner, self._flight)
        if settled:
            self.ends.append(clock.perf_counter())
        for delta in deltas:
            assert delta.error is None, delta.error
        return sum(len(delta.tokens) for delta in deltas)

    def milliseconds(self, steps: int) -> float:
        """Milliseconds from the end of a step to the end of the one so many steps behind it."""
        began = len(self.ends) - 1
        while len(self.ends) <= began + steps:
            self.turn()
        return (self.ends[began + steps] - self.ends[began]) * 1000

    def idle(self) -> None:
        """Aborts all jobs, and waits for the step that is in flight."""
        self._engine.planner.abort_all()
        while self._flight is not None:
            self.turn()


def alone(turns: Turns, prompt: int, prompts: int) -> float:
    """Milliseconds of a chunk of so many tokens with nothing beside it, each launched while the last one runs."""
    for _ in range(3):
        turns.submit(prompt, 1)
        turns.turn()
    spent: list[float] = []
    for _ in range(prompts):
        turns.submit(prompt, 1)
        spent.append(turns.milliseconds(1))
    turns.idle()
    return statistics.median(spent)


def beside(turns: Turns, prompt: int, prompts: int, every: int) -> tuple[float, list[float]]:
    """(ms of a step without prompts, ms that each prompt adds), while answers run that do not end.

    Steps without prompts are timed before each prompt, as many as are timed with it, so that contexts that grow count
    alike.
    """
    step, added = list[float](), list[float]()
    for _ in range(prompts):
        turns.milliseconds(2)  # the last prompt's step has ended
        step.append(turns.milliseconds(every) / every)
        turns.submit(prompt, 1)
        added.append(turns.milliseconds(every) - every * step[-1])
    return statistics.median(step), added


def opened(asked: argparse.Namespace, tokens: int) -> tuple[str, EngineCore]:
    """(what it is called, the engine that the command line says, with pages for so many tokens)."""
    draft: Path | None = asked.draft
    config = EngineConfig(
        max_running=asked.rows + 8,
        max_model_len=tokens,
        kv_memory=asked.kv_gib << 30,
        step_tokens=asked.prompt + 8 * (asked.rows + 8),
        device="cuda",
        speculation=None if draft is None else msgspec.structs.replace(drafts_of(str(draft)), adaptive=False),
    )
    if asked.shape is None:
        return asked.weights.name, EngineCore.load(asked.weights, config)
    whole = shape(asked.shape)
    sizes = replace(whole, num_hidden_layers=asked.layers or whole.num_hidden_layers)
    in_memory = asked.alias or sizes.num_hidden_layers
    name = f"{asked.shape}, {sizes.num_hidden_layers} layers, {in_memory} of them in memory"
    return name, random_engine(sizes, in_memory, config, torch.device("cuda"))


def record_of(name: str, asked: argparse.Namespace, engine: EngineCore) -> dict[str, object]:
    """Measures, and gives what is kept."""
    turns = Turns(engine)
    by_itself = alone(turns, asked.prompt, asked.prompts)
    runner = engine.runner
    for _ in range(asked.rows):
        turns.submit(asked.context, 8 * asked.prompts * (2 * asked.every + 2))
    turns.milliseconds(3 * asked.every)
    before = dict(runner.led)
    step, added = beside(turns, asked.prompt, asked.prompts, asked.every)
    turns.idle()
    return {
        **provenance("torch", "triton"),
        "device": torch.cuda.get_device_name(),
        "model": name,
        "draft": None if asked.draft is None else asked.draft.name,
        "rows": asked.rows,
        "context": asked.context,
        "prompt": asked.prompt,
        "prompts": asked.prompts,
        "ms_step": round(step, 4),
        "ms_chunk_alone": round(by_itself, 4),
        "ms_added": round(statistics.median(added), 4),
        "ms_added_quartiles": [round(ms, 4) for ms in statistics.quantiles(added)],
        "beyond_the_chunk": round(statistics.median(added) / by_itself - 1, 4),
        "goal": GOAL,
        "led_meanwhile": {why: count - before.get(why, 0) for why, count in runner.led.items()},
        "replays": runner.replays,
        "chunks": runner.chunks,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures as the command line says, and writes JSON. Raises SystemExit where torch sees no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=Path("models/kimi-nano"))
    parser.add_argument("--draft", type=Path, help="the folder of a drafter for the weights, or suffix")
    parser.add_argument("--shape", help="random weights of this shape instead")
    parser.add_argument("--layers", type=int, help="of the shape; all of them where nothing is said")
    parser.add_argument("--alias", type=int, help="layers of the shape in memory; the others are one of those")
    parser.add_argument("--rows", type=int, default=8, help="answers that run")
    parser.add_argument("--context", type=int, default=1000, help="tokens of each answer's prompt")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of a prompt that arrives")
    parser.add_argument("--prompts", type=int, default=20, help="how many arrive")
    parser.add_argument("--every", type=int, default=10, help="steps from one prompt to the next")
    parser.add_argument("--kv-gib", type=int, default=4, help="memory for pages")
    parser.add_argument("--save", type=output, default="runs/prompts-beside.json")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and torch sees none")
    answer = asked.context + 8 * asked.prompts * (2 * asked.every + 2) + 64
    name, engine = opened(asked, max(asked.rows * answer + 8 * asked.prompt, 1 << 14) if asked.shape else answer)
    try:
        with torch.inference_mode():
            record = record_of(name, asked, engine)
    finally:
        engine.runner.close()
    asked.save.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    program(main)
