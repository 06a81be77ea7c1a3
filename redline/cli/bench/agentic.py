"""`redline bench agentic`: the flags, and the replay from them, or a trace made up."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop
from rich.console import Console

from redline.bench.serving import agentic, traces
from redline.bench.serving.agentic import Mode, Plan, Replay
from redline.bench.serving.datasets import COMPLETIONS
from redline.bench.serving.sections import Plot
from redline.bench.serving.target import Patience, Target
from redline.bench.serving.traces import Session, Shape
from redline.bench.serving.vocabulary import open_vocabulary
from redline.cli.bench import kept, options
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, plain_console, say, until_interrupted
from redline.disk import check_output
from redline.disk import save as save_bytes
from redline.errors import ConfigError
from redline.progress import Working
from redline.wire.base import Record

MADE = "A trace made up"
SHAPE = Shape()


class AgenticConfig(Record, frozen=True):
    """What `redline bench agentic` is told. sessions: of the trace, at most; None: all."""

    target: Target
    trace: str
    plan: Plan
    sessions: int | None = None
    ready_s: float | None = None
    quiet: bool = False
    save: str | None = None
    html: str | None = None


def bench_agentic(
    trace: Annotated[Path | None, typer.Argument(help="A trace, JSONL; see docs/bench_agentic.md.")] = None,
    base_url: options.BaseUrl = None,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    endpoint: options.Endpoint = None,
    backend: options.Backend = None,
    model: options.Model = None,
    served_model_name: options.ServedModelName = None,
    tokenizer: options.Tokenizer = None,
    header: options.Header = None,
    extra_body: options.ExtraBody = None,
    insecure: options.Insecure = False,
    history: Annotated[
        str,
        typer.Option(
            metavar="recorded|live",
            help="Whose answers the next turn sees: the trace's, so that all get the same texts, or the model's.",
        ),
    ] = "recorded",
    users: Annotated[int | None, typer.Option(min=1, help="Sessions at once. Absent: 1.")] = None,
    session_rate: Annotated[
        float | None, typer.Option(min=0.0001, help="Sessions/s that begin, in the place of users.")
    ] = None,
    time_scale: Annotated[
        float, typer.Option(min=0.0, help="Of the waits between turns: 0.1 makes them a tenth, 0 leaves them out.")
    ] = 1.0,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Of the trace, at most; of a made-up one, how many. Absent: all, or 8.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Ends the replay; turns that run then are not counted.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Every answer has the trace's output_tokens.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(min=0, help="Absent: the server's own.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, and of a made-up trace.")] = 0,
    save: kept.Save = None,
    html: kept.Html = None,
    disable_tqdm: options.Quiet = False,
    synthesize: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a made-up trace of a coding agent, and end.", rich_help_panel=MADE),
    ] = None,
    context_tokens: Annotated[
        int, typer.Option(min=64, help="A session's history grows to this.", rich_help_panel=MADE)
    ] = SHAPE.context_tokens,
    output_tokens: Annotated[
        int, typer.Option(min=2, help="Of a median answer.", rich_help_panel=MADE)
    ] = SHAPE.output_tokens,
    result_tokens: Annotated[
        int, typer.Option(min=2, help="Of a median piece of a file that a tool gives.", rich_help_panel=MADE)
    ] = SHAPE.result_tokens,
    tool_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds of a median run of tests.", rich_help_panel=MADE)
    ] = SHAPE.tool_s,
    think_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds of a user between two tasks, at the median.", rich_help_panel=MADE)
    ] = SHAPE.think_s,
    ready_check_timeout_sec: options.ReadyTimeout = None,
    connect_timeout_sec: options.ConnectTimeout = 10.0,
    first_token_timeout_sec: options.FirstTokenTimeout = 600.0,
    silence_timeout_sec: options.SilenceTimeout = 60.0,
    request_timeout_sec: options.RequestTimeout = 6 * 3600.0,
) -> None:
    """Multi-turn sessions of an agent, with tools and the time they take: TTFT by turn, cache hits, time of a session.

    Give a trace, or make one up with --synthesize.
    """
    console = plain_console()
    if (trace is None) == (synthesize is None):
        raise ConfigError("give a trace to replay, or --synthesize FILE to make one up; one of the two")
    if history not in ("recorded", "live"):
        raise ConfigError(f"--history {history!r}: expected recorded or live")
    if synthesize is not None:
        shape = Shape(
            sessions=sessions or SHAPE.sessions,
            context_tokens=context_tokens,
            output_tokens=output_tokens,
            result_tokens=result_tokens,
            tool_s=tool_s,
            think_s=think_s,
            seed=seed,
        )
        raise typer.Exit(make(shape, synthesize, tokenizer, console))
    if users is not None and session_rate is not None:
        raise ConfigError("--users and --session-rate: sessions come from users or at a rate, one of the two")
    target = options.target_of(
        base_url=base_url,
        host=host,
        port=port,
        endpoint=endpoint,
        backend=backend,
        model=model,
        served_model_name=served_model_name,
        header=header,
        extra_body=extra_body,
        insecure=insecure,
        body={} if temperature is None else {"temperature": temperature},
        patience=Patience(
            connect=connect_timeout_sec,
            first=first_token_timeout_sec,
            silence=silence_timeout_sec,
            whole=request_timeout_sec,
        ),
    )
    if target.backend in COMPLETIONS:
        raise ConfigError(f"--backend {target.backend}: sessions are messages; give --backend openai-chat")
    config = AgenticConfig(
        target=target,
        trace=str(trace),
        plan=Plan(
            mode=msgspec.convert(history, Mode),
            users=None if session_rate is not None else users or 1,
            rate=session_rate,
            time_scale=time_scale,
            deadline=max_seconds,
            seed=seed,
            extra={"ignore_eos": True} if ignore_eos else {},
        ),
        sessions=sessions,
        ready_s=ready_check_timeout_sec,
        quiet=disable_tqdm,
        save=None if save is None else str(save),
        html=None if html is None else str(html),
    )
    raise typer.Exit(run(config, console))


def make(shape: Shape, path: Path, tokenizer: str | None, console: Console) -> int:
    """Writes a made-up trace; the exit code is 0. Raises ConfigError."""
    check_output(path)
    vocabulary = None if tokenizer is None else open_vocabulary(Path(tokenizer))

    def count(text: str) -> int:
        return traces.by_length(text) if vocabulary is None else len(vocabulary.encode(text))

    found = traces.synthesize(shape, count)
    save_bytes(path, traces.encode(found))
    turns = sum(len(one.turns) for one in found)
    waits = sum(turn.wait_s for one in found for turn in one.turns)
    counted = "counted by --tokenizer" if vocabulary else "by their length; --tokenizer FOLDER counts"
    say(console, f"written to {path}: {len(found)} sessions, {turns} turns, {waits:,.0f} s of waits; tokens {counted}")
    return 0


def run(config: AgenticConfig, console: Console) -> int:
    """Replays, prints, saves; the exit code: 0, 1 where every turn failed, 130 after Ctrl-C. Raises ConfigError."""
    for path in (config.save, config.html):
        if path is not None:
            check_output(Path(path))
    return until_interrupted(lambda: _run(config, console), console)


def _run(config: AgenticConfig, console: Console) -> int:
    sessions = traces.read(Path(config.trace))[: config.sessions]
    if config.plan.mode == "recorded":
        _check_recorded(sessions, config.trace)
    target = kept.reached(config.target, config.ready_s, console)
    total = sum(len(session.turns) for session in sessions)
    began = time.time()
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
    show([section for section in sections if not isinstance(section, Plot)], console)
    kept.keep(result, sections, f"redline bench agentic: {target.model}", config.save, config.html, console)
    if found.stopped:
        say(console, f"stopped: {len(found.turns)} of {total} turns had been answered")
        return INTERRUPTED
    return 0 if result.figures["completed"] else 1


async def _replay(target: Target, sessions: Sequence[Session], plan: Plan, watch: agentic.Watch) -> Replay:
    from redline.bench.serving.client import Client

    async with Client(target) as client:
        return await agentic.replay(client, sessions, plan, watch)


def _check_recorded(sessions: Sequence[Session], trace: str) -> None:
    for session in sessions:
        for number, turn in enumerate(session.turns[:-1], 1):
            if turn.answer is None:
                raise ConfigError(
                    f"{trace}: session {session.session}, turn {number} has no `answer`, which --history recorded "
                    "needs; --history live keeps the model's own"
                )
