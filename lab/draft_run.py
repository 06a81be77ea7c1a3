"""`redline draft run` of a recipe, timed stage by stage, and its drafter compared with another one.

    python -m lab.draft_run models/kimi-nano-eagle3/recipe_h200.toml \
        --beside models/kimi-nano-eagle3 --save benchmarks/results/draft-run-h200.json

Seconds of a stage are those of the run that completed it, including loading; tokens and tokens/s are of its work alone:
answers of synth, positions of a capture, positions trained on. The other drafter is measured after the run and not
included in its time, with the recipe's [eval]: the same prompts, the same rounds.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from lab.program import output, program
from redline import clock
from redline.bench.machine import device_name
from redline.bench.record import provenance
from redline.draft import evaluate
from redline.draft.evaluate import EvalConfig, Evaluation
from redline.draft.recipe import RunConfig, run, stages_of
from redline.draft.stages import RecipeStage, seconds_of
from redline.draft.train.train import TrainConfig
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.worker.engine import pick_device


class Took(Record, frozen=True, omit_defaults=True):
    """The figures of one stage. tokens, work_s: of its work without loading; absent if a stage does not report them."""

    name: str
    seconds: float
    tokens: int | None = None
    work_s: float | None = None
    tokens_per_s: int | None = None


class Accepted(Record, frozen=True):
    """A drafter in the engine: tokens a round by domain, and their mean."""

    drafter: str
    k: int
    mode: str
    rounds: int
    mean: float
    by_domain: dict[str, float]


def took(stage: RecipeStage, out: Path, told: Mapping[str, tuple[int, float]]) -> Took:
    """The figures of a finished stage. told: tokens and seconds of work by stage."""
    tokens, work = told.get(stage.name, (None, None))
    if isinstance(stage.config, TrainConfig):
        result = msgspec.json.decode((Path(stage.config.out) / "training" / "result.json").read_bytes())
        tokens, work = result["tokens"], result["seconds"]
    rate = None if tokens is None or not work else round(tokens / work)
    return Took(
        name=stage.name,
        seconds=seconds_of(stage, out) or 0.0,
        tokens=tokens,
        work_s=None if work is None else round(work, 2),
        tokens_per_s=rate,
    )


def accepted(path: Path, drafter: str) -> list[Accepted]:
    """The saved results of an evaluation, by k and mode."""
    data = msgspec.json.decode(path.read_bytes())
    facts = {key: data[key] for key in Evaluation.__struct_fields__ if key in data}
    measured = msgspec.convert(facts, Evaluation).measured
    found: list[Accepted] = []
    for k, mode in sorted({(one.k, one.mode) for one in measured}):
        here = [one for one in measured if (one.k, one.mode) == (k, mode) and one.rounds]
        by_domain = {one.domain: round(one.length, 4) for one in here}
        mean = sum(by_domain.values()) / max(1, len(by_domain))
        rounds = sum(one.rounds for one in here)
        found.append(Accepted(drafter=drafter, k=k, mode=mode, rounds=rounds, mean=round(mean, 4), by_domain=by_domain))
    return found


def main() -> int:
    """Runs as given on the command line; 0, or the status of the stage that ended the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", help="the folder of all files (default: the recipe's)")
    parser.add_argument("--device", help="cpu or cuda (default: the GPU, if there is one)")
    parser.add_argument("--beside", type=Path, help="another drafter's folder, measured on the same prompts")
    parser.add_argument("--save", type=output)
    given = parser.parse_args()
    console, origin = Console(), provenance("torch", "accelerate")
    told: dict[str, tuple[int, float]] = {}

    def tell(stage: str, tokens: int, seconds: float) -> None:
        told[stage] = tokens, seconds

    began = clock.monotonic()
    status = run(RunConfig(recipe=str(given.recipe), out=given.out, device=given.device), console, origin, tell)
    seconds = clock.monotonic() - began
    if status:
        return status
    stages, out = stages_of(given.recipe, given.out and Path(given.out), device=given.device)
    figures = [took(stage, out, told) for stage in stages]
    for one in figures:
        rate = "" if one.tokens_per_s is None else f"  {one.tokens:,} tokens, {one.tokens_per_s:,} tokens/s"
        console.print(f"{one.name:>14} {one.seconds:7.1f} s{rate}", highlight=False, markup=False)
    console.print(f"{'all':>14} {seconds:7.1f} s", highlight=False)
    lengths = [
        measured
        for stage in stages
        if isinstance(stage.config, EvalConfig)
        for measured in compared(stage, out, given.beside if stage.name == "eval" else None, origin)
    ]
    for one in lengths:
        domains = ", ".join(f"{domain} {length:.2f}" for domain, length in one.by_domain.items())
        said = f"{one.drafter}: k = {one.k}, {one.mode}: {one.mean:.3f} tokens a round ({domains})"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    record = {
        **origin,
        "device": device_name(pick_device(given.device)),
        "recipe": given.recipe.name,
        "seconds": round(seconds, 2),
        "stages": figures,
        "accepted": lengths,
    }
    if given.save:
        given.save.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    return 0


def compared(stage: RecipeStage, out: Path, beside: Path | None, origin: Mapping[str, Any]) -> list[Accepted]:
    """The results of an evaluation of the run, then those of another drafter.

    Raises ConfigError, CheckpointError.
    """
    config = stage.config
    assert isinstance(config, EvalConfig), f"{stage.name} is not an evaluation"
    assert config.save is not None, "a recipe's [eval] needs `save`"
    found = accepted(Path(config.save), Path(config.draft).name)
    if beside is not None:
        saved = out / "beside.json"
        other = msgspec.structs.replace(config, draft=str(beside), save=str(saved))
        if evaluate.run(other, Console(), origin):
            raise ConfigError(f"{beside}: the engine and the trainer disagree about its first drafts")
        found += accepted(saved, beside.name)
    return found


if __name__ == "__main__":
    program(main, heard=False)
