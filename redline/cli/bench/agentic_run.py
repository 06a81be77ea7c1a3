"""Runs `redline bench agentic`: replays or synthesizes a trace, prints and saves the result."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from redline import clock
from redline.bench.serving import agentic, traces
from redline.bench.serving.agentic import Plan, Replay
from redline.bench.serving.client import Client
from redline.bench.serving.sections import Plot
from redline.bench.serving.target import Target
from redline.bench.serving.traces import Session, Shape
from redline.bench.serving.vocabulary import open_vocabulary
from redline.cli.bench import kept
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, say, until_interrupted
from redline.disk import check_output
from redline.disk import save as save_bytes
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.progress import Working


class AgenticConfig(Record, frozen=True):
    """Configuration of `redline bench agentic`. sessions: at most this many of the trace; None: all."""

    target: Target
    trace: str
    plan: Plan
    sessions: int | None = None
    ready_s: float | None = None
    quiet: bool = False
    save: str | None = None
    html: str | None = None


def make(shape: Shape, path: Path, tokenizer: str | None, console: Console) -> int:
    """Writes a synthetic trace. Returns the exit code 0. Raises ConfigError."""
    check_output(path)
    vocabulary = None if tokenizer is None else open_vocabulary(Path(tokenizer))

    def count(text: str) -> int:
        return traces.by_length(text) if vocabulary is None else len(vocabulary.encode(text))

    found = traces.synthesize(shape, count)
    save_bytes(path, traces.encode(found))
    turns = sum(len(one.turns) for one in found)
    waits = sum(turn.wait_s for one in found for turn in one.turns)
    counted = "counted by --tokenizer" if vocabulary else "estimated from text length (--tokenizer FOLDER counts them)"
    say(console, f"written to {path}: {len(found)} sessions, {turns} turns, {waits:,.0f} s of waits; tokens {counted}")
    return 0


def run(config: AgenticConfig, console: Console) -> int:
    """Replays, prints, saves. Returns the exit code: 0, 1 if every turn failed, 130 after Ctrl-C.

    Raises ConfigError.
    """
    kept.check_files(config.save, config.html)
    return until_interrupted(lambda: _run(config, console), console)


def _run(config: AgenticConfig, console: Console) -> int:
    sessions = traces.read(Path(config.trace))[: config.sessions]
    if config.plan.mode == "recorded":
        _check_recorded(sessions, config.trace)
    target = kept.reached(config.target, config.ready_s, console)
    total = sum(len(session.turns) for session in sessions)
    began = clock.now()
    with Working("turns", shown=not config.quiet) as working:

        def watch(done: int, running: int, failed: int) -> None:
            more = f", {failed:,} failed" if failed else ""
            working.show(done, total, note=f"{running:,} sessions running{more}")

        watch(0, 0, 0)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(_replay(target, sessions, config.plan, watch))
    result = kept.result(
        "agentic",
        agentic.figures(found),
        target,
        dataset={"trace": Path(config.trace).name, "sessions": len(sessions), "turns": total},
        details={**agentic.details_of(found), "plan": config.plan},
        began=began,
        stopped=found.stopped,
        answers=[msgspec.structs.replace(one.answer, index=at) for at, one in enumerate(found.turns)],
    )
    result = msgspec.structs.replace(result, generator=found.generator)
    sections = agentic.agentic_sections(result)
    kept.keep(result, config.save, config.html, console)
    show([section for section in sections if not isinstance(section, Plot)], console)
    if found.stopped:
        say(console, f"stopped after {len(found.turns)} of {total} turns")
        return INTERRUPTED
    return 0 if result.figures["completed"] else 1


async def _replay(target: Target, sessions: Sequence[Session], plan: Plan, watch: agentic.Watch) -> Replay:
    async with Client(target) as client:
        return await agentic.replay(client, sessions, plan, watch)


def _check_recorded(sessions: Sequence[Session], trace: str) -> None:
    for session in sessions:
        for number, turn in enumerate(session.turns[:-1], 1):
            if turn.answer is None:
                raise ConfigError(
                    f"{trace}: session {session.session}, turn {number} has no `answer`, which --history recorded "
                    "needs; --history live uses the model's answers"
                )
