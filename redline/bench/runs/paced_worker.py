"""A worker whose steps take what some machine of its own takes for them, times a number, whatever else this one does.

It is `redline.worker.main` over random weights of two layers, which compute in a part of that time; the rest of each
step it waits. What a step takes is the step model that was fitted to Kimi-Nano on a core of an AMD EPYC
(`step_times.py`), or with AS_A_GPU in the environment that of four layers of Kimi K2.6 on an H100, each token of a
prompt standing for eight. So several workers fit on two cores that others use, and do not compete: planner, pages,
handoffs, roles and the API are the product's own, what steps take is given. PACED in the environment has the number.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import structs

import redline.worker.main as worker
from redline import clock
from redline.bench.runs.tiny_tokenizer import RESERVED, words, write_tiny_tokenizer
from redline.model.k2.shapes import shape
from redline.model.k2.write import k25_config
from redline.run.layer_marks import Meanwhile
from redline.run.runner import Pending
from redline.tune.pairs import Work, expanded_of, pairs_of
from redline.tune.steps import StepModel
from redline.wire.step import Step, StepResult
from redline.worker.engine import EngineCore

PACED, AS_A_GPU = "REDLINE_PACED", "REDLINE_PACED_AS_A_GPU"
LAYERS = 2  # the first has no experts
FITTED = Path(__file__).parents[3] / "benchmarks" / "results" / "step-times-cpu.json"
# Four layers of Kimi K2.6 on an H100, fitted by hand to first tokens of prompts of 64 to 8,192 tokens, 9 ms less for
# client and API, and to steps of 1 to 32 answers (2026-11-27, commit ad8cce8a; a lead).
LAYERS_ON_AN_H100 = StepModel(
    base=1.45, experts=9.1, row=0.03, prompt=0.0064, pair=3.5e-7, experts_of=384, experts_chosen=8
)
# The same where a token of a prompt stands for EIGHT; it reads one in 48 of fewer experts.
EIGHT = 8
ON_AN_H100 = structs.replace(
    LAYERS_ON_AN_H100,
    prompt=EIGHT * LAYERS_ON_AN_H100.prompt,
    pair=EIGHT**2 * LAYERS_ON_AN_H100.pair,
    experts_of=96,
    experts_chosen=2,
)
# A server whose workers are these, in the place of a Python that is told `-m redline serve ...`.
PYTHON = f"""#!{sys.executable}
import sys
from redline.fleet import process
process.WORKER = sys.executable, "-m", "redline.bench.runs.paced_worker"
del sys.argv[1:3]
from redline.__main__ import main
sys.exit(main())
"""


def write(folder: Path, as_a_gpu: bool = False) -> tuple[Path, Path]:
    """(a model's folder, the Python that serves it with such workers), written into this one. as_a_gpu: as many experts
    as `ON_AN_H100` has."""
    config = replace(shape("kimi-nano"), num_hidden_layers=LAYERS)
    if as_a_gpu:
        of, chosen = ON_AN_H100.experts_of, ON_AN_H100.experts_chosen
        config = replace(config, n_routed_experts=of, num_experts_per_tok=chosen)
    model, python = folder / "paced", folder / "python"
    model.mkdir()
    write_tiny_tokenizer(model, words(config.vocab_size - 256 - RESERVED))
    (model / "config.json").write_text(json.dumps(k25_config(config)))
    python.write_text(PYTHON)
    python.chmod(0o700)
    return model, python


def step_model() -> StepModel:
    """Milliseconds of a step, of Kimi-Nano on a core of its own or as a GPU's."""
    if os.environ.get(AS_A_GPU):
        return ON_AN_H100
    return msgspec.convert(json.loads(FITTED.read_text())["fitted"], StepModel)


def work_of(step: Step) -> Work:
    """What a step computes, but for the contexts of its answers, of which it does not say how long they are."""
    prompts = [(row.start, row.count) for row in step.rows if row.start is not None]
    return Work(
        prompt=sum(count for _, count in prompts),
        pairs=sum(pairs_of(first, count) for first, count in prompts),
        rows=len(step.rows) - len(prompts),
        expanded=sum(expanded_of(first, count) for first, count in prompts),
    )


class _Paced(NamedTuple):
    """A step that has not ended before a time of the clock."""

    pending: Pending
    until: float

    def watch(self, meanwhile: Meanwhile) -> None:
        self.pending.watch(meanwhile)

    def wait(self) -> StepResult:
        result = self.pending.wait()
        clock.sleep(max(0.0, self.until - clock.perf_counter()))
        return result


class PacedCore(EngineCore):
    """An engine whose steps take as long as they are to."""

    def measure(self) -> None:
        """Nothing is measured: steps are slowed from now on."""
        launch, model, times = self.runner.launch, step_model(), float(os.environ[PACED])

        def paced(step: Step) -> Pending:
            until = clock.perf_counter() + times * model.step_ms(work_of(step)) / 1e3
            return _Paced(launch(step), until)

        self.runner.launch = paced


if __name__ == "__main__":
    worker.__dict__["EngineCore"] = PacedCore
    sys.exit(worker.main())
