"""Runs `redline bench leaderboard`: sends the prompts, prints and saves the result."""

from pathlib import Path
from typing import Any

from rich.console import Console

from redline import clock
from redline.bench.serving import leaderboard, ready
from redline.bench.serving.datasets import COMPLETIONS
from redline.bench.serving.leaderboard import Workload, WorkloadOutcome
from redline.bench.serving.records import TimedAnswer
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.bench.serving.vocabulary import o200k, open_vocabulary
from redline.cli.bench import kept
from redline.cli.bench.leaderboard import LeaderboardFlags
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, say, until_interrupted
from redline.errors import ConfigError
from redline.progress import Working


def run(flags: LeaderboardFlags, console: Console) -> int:
    """Measures, prints, saves. Returns the exit code: 0, 1 if every request failed, 130 after Ctrl-C.

    Raises ConfigError.
    """
    workloads = asked_for(flags)
    target = flags.server.target(flags.base_url, flags.waiting.patience)
    kept.check_files(flags.save, flags.html)
    return until_interrupted(lambda: _run(flags, target, workloads, console), console)


def asked_for(flags: LeaderboardFlags) -> list[Workload]:
    """The workloads of a flags. Raises ConfigError."""
    if (flags.input_len or flags.output_len) and len(flags.workload) > 1:
        raise ConfigError("--input-len and --output-len override one --workload, but several were given")
    found = leaderboard.workloads(flags.workload or (leaderboard.DEFAULT,), sorted(set(flags.parallel)))
    return [
        Workload(
            input_len=flags.input_len or one.input_len,
            output_len=flags.output_len or one.output_len,
            parallel=one.parallel,
        )
        for one in found
    ]


def _run(flags: LeaderboardFlags, target: ServerTarget, workloads: list[Workload], console: Console) -> int:
    other = o200k(flags.o200k)
    target = kept.reached(target, flags.waiting.ready_check_timeout_sec, console)
    room = ready.max_model_len(target)
    for workload in workloads:
        leaderboard.check_fits(workload, room)
    tokenizer = flags.server.vocabulary
    counts = None if tokenizer is None else open_vocabulary(Path(tokenizer))
    seed = kept.seed_of(flags.seed)
    began, outcomes, answers = clock.now(), list[WorkloadOutcome](), list[TimedAnswer]()
    total = sum(flags.runs * workload.parallel for workload in workloads)
    with (
        Working("requests", shown=not flags.disable_tqdm) as working,
        kept.prompt_tokenizer(counts, target) as tokenizer,
    ):
        asked = [
            leaderboard.prompts(
                workload,
                flags.runs * workload.parallel + (0 if place else flags.num_warmups),
                seed + place,
                tokenizer,
                bare=target.backend in COMPLETIONS,
                extra=body(flags),
                made=lambda many: working.show(note=f"{many} prompts written"),
            )
            for place, workload in enumerate(workloads)
        ]
        if flags.num_warmups:  # prompts of its own: the measured prompts must not be in the prefix cache
            warm = kept.watched(working, lambda: 0, total, "warm-up: ")
            if warm(target, asked[0][: flags.num_warmups], LoadPace()).stopped:
                raise KeyboardInterrupt
            asked[0] = asked[0][flags.num_warmups :]
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
    differs = leaderboard.differs(target, outcomes, flags.runs, o200k=other is not None, tokenizer=counts is not None)
    found = kept.result(
        "leaderboard",
        leaderboard.figures(outcomes),
        target,
        dataset={"name": "natural", "seed": seed, "workloads": [workload.name for workload in workloads]},
        details={"outcomes": outcomes, "differs": differs, "runs": flags.runs},
        began=began,
        stopped=stopped,
        answers=answers,
    )
    kept.keep(found, flags.save, flags.html, console)
    show(leaderboard.leaderboard_sections(found), console)
    if stopped:
        say(console, "stopped: the figures cover the answers received so far")
        return INTERRUPTED
    return 0 if any(outcome.good for outcome in outcomes) else 1


def body(flags: LeaderboardFlags) -> dict[str, Any]:
    """The fields that the flags add to the body of every request."""
    found: dict[str, Any] = {}
    if flags.ignore_eos:
        found["ignore_eos"] = True
    if flags.temperature is not None:
        found["temperature"] = flags.temperature
    return found
