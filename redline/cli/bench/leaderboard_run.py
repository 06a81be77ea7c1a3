"""Runs `redline bench leaderboard`: sends the prompts, prints and saves the result."""

from pathlib import Path
from typing import Any

from rich.console import Console

from redline import clock
from redline.bench.serving import leaderboard, ready
from redline.bench.serving.datasets import COMPLETIONS
from redline.bench.serving.leaderboard import Outcome, Workload
from redline.bench.serving.records import Answer
from redline.bench.serving.target import Pace, Target
from redline.bench.serving.vocabulary import o200k, open_vocabulary
from redline.cli.bench import kept
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, say, until_interrupted
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.progress import Working


class LeaderboardConfig(Record, frozen=True):
    """Configuration of `redline bench leaderboard`. input_len, output_len: override the preset, if given."""

    target: Target
    workload: tuple[str, ...] = ()
    input_len: int | None = None
    output_len: int | None = None
    parallel: tuple[int, ...] = (1,)
    runs: int = 8
    warmups: int = 1
    ignore_eos: bool = False
    temperature: float | None = None
    tokenizer: str | None = None
    o200k: str | None = None
    seed: int | None = None
    ready_s: float | None = None
    quiet: bool = False
    save: str | None = None
    html: str | None = None


def run(config: LeaderboardConfig, console: Console) -> int:
    """Measures, prints, saves. Returns the exit code: 0, 1 if every request failed, 130 after Ctrl-C.

    Raises ConfigError.
    """
    workloads = asked_for(config)
    kept.check_files(config.save, config.html)
    return until_interrupted(lambda: _run(config, workloads, console), console)


def asked_for(config: LeaderboardConfig) -> list[Workload]:
    """The workloads of a config. Raises ConfigError."""
    if (config.input_len or config.output_len) and len(config.workload) > 1:
        raise ConfigError("--input-len and --output-len override one --workload, but several were given")
    found = leaderboard.workloads(config.workload or (leaderboard.DEFAULT,), sorted(set(config.parallel)))
    return [
        Workload(
            input_len=config.input_len or one.input_len,
            output_len=config.output_len or one.output_len,
            parallel=one.parallel,
        )
        for one in found
    ]


def _run(config: LeaderboardConfig, workloads: list[Workload], console: Console) -> int:
    other = o200k(None if config.o200k is None else Path(config.o200k))
    target = kept.reached(config.target, config.ready_s, console)
    room = ready.max_model_len(target)
    for workload in workloads:
        leaderboard.check_fits(workload, room)
    counts = None if config.tokenizer is None else open_vocabulary(Path(config.tokenizer))
    seed = kept.seed_of(config.seed)
    began, outcomes, answers = clock.now(), list[Outcome](), list[Answer]()
    total = sum(config.runs * workload.parallel for workload in workloads)
    with Working("requests", shown=not config.quiet) as working:
        asked = [
            leaderboard.prompts(
                workload,
                config.runs * workload.parallel + (0 if place else config.warmups),
                seed + place,
                counts,
                bare=target.backend in COMPLETIONS,
                extra=body(config),
                made=lambda many: working.show(note=f"{many} prompts written"),
            )
            for place, workload in enumerate(workloads)
        ]
        if config.warmups:  # prompts of its own: the measured prompts must not be in the prefix cache
            warm = kept.watched(working, lambda: 0, total, "warm-up: ")
            if warm(target, asked[0][: config.warmups], Pace()).stopped:
                raise KeyboardInterrupt
            asked[0] = asked[0][config.warmups :]
        for workload, asks in zip(workloads, asked, strict=True):
            outcomes.append(
                leaderboard.measure(
                    workload,
                    asks,
                    target,
                    kept.watched(working, lambda: len(answers), total, f"{workload.name}: "),
                    counts=counts,
                    o200k=other,
                    kept=lambda answer: answers.append(kept.numbered(answer, len(answers))),
                )
            )
            if outcomes[-1].stopped:
                break
    stopped = outcomes[-1].stopped
    differs = leaderboard.differs(target, outcomes, config.runs, o200k=other is not None, tokenizer=counts is not None)
    found = kept.result(
        "leaderboard",
        leaderboard.figures(outcomes),
        target,
        dataset={"name": "natural", "seed": seed, "workloads": [workload.name for workload in workloads]},
        details={"outcomes": outcomes, "differs": differs, "runs": config.runs},
        began=began,
        stopped=stopped,
        answers=answers,
    )
    kept.keep(found, config.save, config.html, console)
    show(leaderboard.leaderboard_sections(found), console)
    if stopped:
        say(console, "stopped: the figures cover the answers received so far")
        return INTERRUPTED
    return 0 if any(outcome.good for outcome in outcomes) else 1


def body(config: LeaderboardConfig) -> dict[str, Any]:
    """The fields that the flags add to the body of every request."""
    found: dict[str, Any] = {}
    if config.ignore_eos:
        found["ignore_eos"] = True
    if config.temperature is not None:
        found["temperature"] = config.temperature
    return found
