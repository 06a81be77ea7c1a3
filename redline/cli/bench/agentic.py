"""`redline bench agentic`: the flags, and what becomes of them."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from redline.bench.serving.traces import Shape
from redline.cli.bench.options import (
    BaseUrl,
    Html,
    Quiet,
    Save,
    ServerFlags,
    WaitingFlags,
    grouped,
)
from redline.cli.console import plain_console
from redline.errors import ConfigError

MADE = "A trace made up"
SHAPE = Shape()


@grouped
def bench_agentic(
    *,
    trace: Annotated[Path | None, typer.Argument(help="A trace, JSONL; see docs/bench.md.")] = None,
    base_url: BaseUrl = None,
    server: ServerFlags,
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
    save: Save = None,
    html: Html = None,
    disable_tqdm: Quiet = False,
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
    waiting: WaitingFlags,
) -> None:
    """Multi-turn sessions of an agent, with tools and the time they take: TTFT by turn, cache hits, time of a session.

    Give a trace, or make one up with --synthesize.
    """
    from redline.bench.serving.agentic import Mode, Plan
    from redline.bench.serving.datasets import COMPLETIONS
    from redline.cli.bench.agentic_run import AgenticConfig, make, run

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
        raise typer.Exit(make(shape, synthesize, server.tokenizer, console))
    if users is not None and session_rate is not None:
        raise ConfigError("--users and --session-rate: sessions come from users or at a rate, one of the two")
    target = server.target(
        base_url,
        waiting.patience,
        body={} if temperature is None else {"temperature": temperature},
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
        ready_s=waiting.ready_check_timeout_sec,
        quiet=disable_tqdm,
        save=None if save is None else str(save),
        html=None if html is None else str(html),
    )
    raise typer.Exit(run(config, console))
