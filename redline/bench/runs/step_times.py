"""What steps of a worker take, by what is in them: the recorded steps on which the step model is held.

    python -m redline.bench.runs.step_times [--weights models/kimi-nano] [--rounds 1] [--save FILE]

Plays loads with the product's planner and runner, one thread: jobs of random ids, each as soon as a slot is free. Those
named `fit` are what the model is fitted to; those named `held` have other lengths and other numbers of jobs and are
only predicted. For each step: prompt tokens, prompt tokens x positions that they attend to, decode rows, tokens of
their contexts, positions that are expanded, milliseconds. All loads are played in rounds with the same lengths, so that
each step happens in every round; the least counts, of the process's own time, since other work on the machine only ever
slows. Rounds are added to those of a saved result. It says how far predictions are off: of single steps, and of whole
runs.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.chat.hashing import make_job
from redline.errors import ConfigError
from redline.run.layer_marks import Meanwhile
from redline.run.runner import Pending
from redline.tune.pairs import Work, expanded_of, pairs_of
from redline.tune.steps import StepFit, StepModel
from redline.wire.job import JobId, Sampling
from redline.wire.step import Recorded, Step, StepResult
from redline.worker.config import EngineConfig
from redline.worker.engine import EngineCore
from redline.worker.loop import Failures, Runner, turn


class Load(NamedTuple):
    """So many jobs, and how many at once; (least, most) tokens of their prompts and answers."""

    name: str
    jobs: int
    at_once: int
    prompt: tuple[int, int]
    answer: tuple[int, int]


LOADS = (
    Load("fit: one", 5, 1, (50, 1500), (8, 24)),
    Load("fit: four", 8, 4, (50, 700), (8, 24)),
    Load("fit: sixteen", 16, 16, (20, 200), (6, 20)),
    Load("fit: many", 40, 40, (8, 40), (4, 16)),
    Load("held: two, longer", 2, 2, (1600, 2400), (10, 20)),
    Load("held: nine", 9, 9, (100, 400), (5, 20)),
    Load("held: twenty-four", 24, 24, (16, 80), (5, 14)),
)
STEP_TOKENS = 256


class Timed:
    """A runner that keeps what each step computed and what it took. Only for steps without drafts."""

    def __init__(self, runner: Runner) -> None:
        self.steps: list[tuple[Work, float]] = []
        self.begins: Callable[[str], object] = lambda _: None
        self._runner = runner
        self._lengths: dict[int, int] = {}  # of slots: tokens that they have

    @property
    def recorded(self) -> Recorded:
        """None of a CPU's."""
        return self._runner.recorded

    def record_more(self) -> bool:
        """As the runner has it."""
        return self._runner.record_more()

    def launch(self, step: Step) -> Pending:
        """Runs the step at once."""
        for begin in step.begins:
            self._lengths[begin.slot] = len(begin.tokens)
        prompt, pairs, rows, context, expanded = 0, 0.0, 0, 0, 0
        for row in step.rows:
            if row.start is None:
                rows, context = rows + 1, context + self._lengths[row.slot]
                self._lengths[row.slot] += 1
            else:
                prompt, pairs = prompt + row.count, pairs + pairs_of(row.start, row.count)
                expanded += expanded_of(row.start, row.count)
                self._lengths[row.slot] += row.samples
        before = clock.process_time()
        result = self._runner.launch(step).wait()
        self.steps.append((Work(prompt, pairs, rows, context, expanded), 1e3 * (clock.process_time() - before)))
        return _Done(result)


class _Done(NamedTuple):
    result: StepResult

    def watch(self, meanwhile: Meanwhile) -> None:
        """It has ended."""

    def wait(self) -> StepResult:
        return self.result


def played(engine: EngineCore, load: Load, seed: int, round: int) -> list[tuple[Work, float]]:
    """The steps of a load. The seed says how long its jobs are; rounds have other tokens, so that none is cached."""
    lengths, tokens, timed = (
        random.Random(f"{seed} {load.name}"),
        random.Random(f"{seed} {round}"),
        Timed(engine.runner),
    )
    vocabulary = engine.model.config.vocab_size - 300  # no control token
    planner, failures, last, sent = engine.planner, Failures(), None, 0
    with torch.inference_mode():
        while sent < load.jobs or not planner.idle:
            running = planner.load().running + planner.load().waiting
            for _ in range(min(load.at_once - running, load.jobs - sent)):
                prompt = tuple(tokens.randrange(vocabulary) for _ in range(lengths.randint(*load.prompt)))
                sampling = Sampling(max_tokens=lengths.randint(*load.answer), temperature=0.0)
                planner.submit(make_job(JobId(f"{load.name} {round} {sent}"), prompt, sampling, engine.fingerprint))
                sent += 1
            last, _ = turn(planner, timed, last, failures)
    return timed.steps


def least(rounds: Sequence[list[tuple[Work, float]]]) -> list[tuple[Work, float]]:
    """Each step, with the least that it took. Raises ConfigError where rounds had other steps."""
    if any([work for work, _ in each] != [work for work, _ in rounds[0]] for each in rounds):
        raise ConfigError("rounds had other steps: an answer ended early; give other --weights or another --seed")
    return [(steps[0][0], min(ms for _, ms in steps)) for steps in zip(*rounds, strict=True)]


def fitted(runs: Mapping[str, Sequence[tuple[Work, float]]], experts_of: int, experts_chosen: int) -> StepModel:
    """The model of the runs named `fit`."""
    fit = StepFit(experts_of=experts_of, experts_chosen=experts_chosen)
    for name, steps in runs.items():
        if name.startswith("fit"):
            for work, ms in steps:
                fit.add(work, ms)
    return fit.model()


def errors(model: StepModel, steps: Sequence[tuple[Work, float]]) -> dict[str, float]:
    """How far predictions are off: on the mean of single steps, and of the sum of all of them."""
    predicted = [model.step_ms(work) for work, _ in steps]
    single = statistics.fmean(abs(a / ms - 1) for a, (_, ms) in zip(predicted, steps, strict=True))
    whole = sum(predicted) / sum(ms for _, ms in steps) - 1
    return {"steps": len(steps), "of_a_step": round(single, 4), "of_all": round(whole, 4)}


def read(path: Path) -> tuple[dict[str, list[tuple[Work, float]]], dict[str, Any]]:
    """The runs of a saved result, and all else that it says."""
    record = json.loads(path.read_text())
    runs = {name: [(Work(*line[:-1]), line[-1]) for line in lines] for name, lines in record.pop("runs").items()}
    return runs, record


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=Path("models/kimi-nano"))
    parser.add_argument("--rounds", type=count, default=1, help="in which all loads are played")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=output, default="runs/step-times-cpu.json")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Runs the program with `words` in place of the command line's, and writes JSON."""
    asked = arguments().parse_args(words)
    torch.set_num_threads(1)
    config = EngineConfig(device="cpu", max_running=64, step_tokens=STEP_TOKENS, kv_memory=1 << 29)
    engine = EngineCore.load(asked.weights, config)
    played(engine, LOADS[0], asked.seed, -1)  # warms up
    taken: dict[str, list[list[tuple[Work, float]]]] = {load.name: [] for load in LOADS}
    for round in range(asked.rounds):
        for load in LOADS:
            taken[load.name].append(played(engine, load, asked.seed, round))
    done = asked.rounds
    if asked.save.exists() and asked.save.stat().st_size:
        before, said = read(asked.save)
        done += said["rounds"]
        for name, steps in before.items():
            taken[name].append(steps)
    runs = {name: least(rounds) for name, rounds in taken.items()}
    k2 = engine.model.config
    model = fitted(runs, k2.n_routed_experts, k2.num_experts_per_tok)
    record = {
        **provenance("torch"),
        "model": asked.weights.name,
        "rounds": done,
        "step_tokens": STEP_TOKENS,
        "experts_of": k2.n_routed_experts,
        "experts_chosen": k2.num_experts_per_tok,
        "fitted": msgspec.to_builtins(model),
        "errors": {run: errors(model, steps) for run, steps in runs.items()},
        "columns": ["prompt", "pairs", "rows", "context", "expanded", "ms"],
    }
    print(json.dumps(record, indent=1), flush=True)
    lines = ",\n".join(f"  {json.dumps(name)}: [{', '.join(map(_line, steps))}]" for name, steps in runs.items())
    head = json.dumps(record, indent=1).removesuffix("\n}")
    asked.save.write_text(f'{head},\n "runs": {{\n{lines}\n }}\n}}\n')


def _line(step: tuple[Work, float]) -> str:
    work, ms = step
    return json.dumps([*work, round(ms, 3)])


if __name__ == "__main__":
    program(main)
