"""Runs `redline bench agentic`: replays or synthesizes a trace, prints and saves the result."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from redline import clock
from redline.bench.serving import agentic, traces
from redline.bench.serving.agentic import Mode, Replay, ReplayPlan
from redline.bench.serving.client import LoadClient
from redline.bench.serving.datasets import COMPLETIONS
from redline.bench.serving.sections import Plot
from redline.bench.serving.target import ServerTarget
from redline.bench.serving.traces import Session, TraceShape
from redline.bench.serving.vocabulary import open_vocabulary
from redline.cli.bench import kept
from redline.cli.bench.agentic import SHAPE, AgenticFlags
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, say, until_interrupted
from redline.disk import check_output
from redline.disk import save as save_bytes
from redline.errors import ConfigError
from redline.progress import Working


def run(flags: AgenticFlags, console: Console) -> int:
    """Replays, prints, saves. Returns the exit code: 0, 1 if every turn failed, 130 after Ctrl-C.

    Raises ConfigError.
    """
    if flags.history not in ("recorded", "live"):
        raise ConfigError(f"--history {flags.history!r}: expected recorded or live")
    if flags.trace is None and flags.synthesize is not None:
        return make(flags, flags.synthesize, console)
    if flags.trace is None or flags.synthesize is not None:
        raise ConfigError("give either a trace to replay, or --synthesize FILE to write one")
    if flags.users is not None and flags.session_rate is not None:
        raise ConfigError("--users and --session-rate exclude each other")
    sampling = {} if flags.temperature is None else {"temperature": flags.temperature}
    target = flags.server.target(flags.base_url, flags.waiting.patience, body=sampling)
    if target.backend in COMPLETIONS:
        raise ConfigError(f"--backend {target.backend}: sessions consist of chat messages; use --backend openai-chat")
    plan = ReplayPlan(
        mode=msgspec.convert(flags.history, Mode),
        users=None if flags.session_rate is not None else flags.users or 1,
        rate=flags.session_rate,
        time_scale=flags.time_scale,
        deadline=flags.max_seconds,
        seed=flags.seed,
        extra={"ignore_eos": True} if flags.ignore_eos else {},
    )
    kept.check_files(flags.save, flags.html)
    trace = flags.trace
    return until_interrupted(lambda: _run(flags, trace, target, plan, console), console)


def make(flags: AgenticFlags, path: Path, console: Console) -> int:
    """Writes a synthetic trace. Returns the exit code 0. Raises ConfigError."""
    check_output(path)
    vocabulary = None if flags.server.tokenizer is None else open_vocabulary(Path(flags.server.tokenizer))
    shape = TraceShape(
        sessions=flags.sessions or SHAPE.sessions,
        context_tokens=flags.context_tokens,
        output_tokens=flags.output_tokens,
        result_tokens=flags.result_tokens,
        tool_s=flags.tool_s,
        think_s=flags.think_s,
        seed=flags.seed,
    )

    def count(text: str) -> int:
        return traces.by_length(text) if vocabulary is None else len(vocabulary.encode(text))

    found = traces.synthesize(shape, count)
    save_bytes(path, traces.encode(found))
    turns = sum(len(one.turns) for one in found)
    waits = sum(turn.wait_s for one in found for turn in one.turns)
    counted = "counted by --tokenizer" if vocabulary else "estimated from text length (--tokenizer FOLDER counts them)"
    say(console, f"written to {path}: {len(found)} sessions, {turns} turns, {waits:,.0f} s of waits; tokens {counted}")
    return 0


def _run(flags: AgenticFlags, trace: Path, target: ServerTarget, plan: ReplayPlan, console: Console) -> int:
    sessions = traces.read(trace)[: flags.sessions]
    if plan.mode == "recorded":
        _check_recorded(sessions, trace)
    target = kept.reached(target, flags.waiting.ready_check_timeout_sec, console)
    total = sum(len(session.turns) for session in sessions)
    began = clock.now()
    with Working("turns", shown=not flags.disable_tqdm) as working:

        def watch(done: int, running: int, failed: int) -> None:
            more = f", {failed:,} failed" if failed else ""
            working.show(done, total, note=f"{running:,} sessions running{more}")

        watch(0, 0, 0)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(_replay(target, sessions, plan, watch))
    result = kept.result(
        "agentic",
        agentic.figures(found),
        target,
        dataset={"trace": trace.name, "sessions": len(sessions), "turns": total},
        details={**agentic.details_of(found), "plan": plan},
        began=began,
        stopped=found.stopped,
        answers=[msgspec.structs.replace(one.answer, index=at) for at, one in enumerate(found.turns)],
    )
    result = msgspec.structs.replace(result, generator=found.generator)
    sections = agentic.agentic_sections(result)
    kept.keep(result, flags.save, flags.html, console)
    show([section for section in sections if not isinstance(section, Plot)], console)
    if found.stopped:
        say(console, f"stopped after {len(found.turns)} of {total} turns")
        return INTERRUPTED
    return 0 if result.figures["completed"] else 1


async def _replay(target: ServerTarget, sessions: Sequence[Session], plan: ReplayPlan, watch: agentic.Watch) -> Replay:
    async with LoadClient(target) as client:
        return await agentic.replay(client, sessions, plan, watch)


def _check_recorded(sessions: Sequence[Session], trace: Path) -> None:
    for session in sessions:
        for number, turn in enumerate(session.turns[:-1], 1):
            if turn.answer is None:
                raise ConfigError(
                    f"{trace}: session {session.session}, turn {number} has no `answer`, which --history recorded "
                    "needs; --history live uses the model's answers"
                )
