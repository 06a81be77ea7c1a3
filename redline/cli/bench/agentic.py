"""`redline bench agentic`: the flags, and the config that is built from them."""

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

MADE = "Synthetic trace"
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
            help="Answers in the next turn's history: the trace's, so that all servers get the same, or the model's.",
        ),
    ] = "recorded",
    users: Annotated[int | None, typer.Option(min=1, help="Concurrent sessions. Default: 1.")] = None,
    session_rate: Annotated[
        float | None, typer.Option(min=0.0001, help="Sessions started per second, instead of --users.")
    ] = None,
    time_scale: Annotated[
        float,
        typer.Option(min=0.0, help="Factor for the waits between turns: 0.1 divides them by ten, 0 removes them."),
    ] = 1.0,
    sessions: Annotated[
        int | None,
        typer.Option(
            min=1, help="At most this many sessions of the trace; size of a synthetic one. Default: all, or 8."
        ),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="End the replay after this many seconds; unfinished turns are not counted."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate the trace's output_tokens for every answer.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(min=0, help="Default: the server's own.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals, and of a synthetic trace.")] = 0,
    save: Save = None,
    html: Html = None,
    disable_tqdm: Quiet = False,
    synthesize: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a synthetic trace of a coding agent, and exit.", rich_help_panel=MADE),
    ] = None,
    context_tokens: Annotated[
        int, typer.Option(min=64, help="Tokens to which the history of a session grows.", rich_help_panel=MADE)
    ] = SHAPE.context_tokens,
    output_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of the median answer.", rich_help_panel=MADE)
    ] = SHAPE.output_tokens,
    result_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of the median file excerpt that a tool returns.", rich_help_panel=MADE)
    ] = SHAPE.result_tokens,
    tool_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds of the median test run.", rich_help_panel=MADE)
    ] = SHAPE.tool_s,
    think_s: Annotated[
        float, typer.Option(min=0.0, help="Median seconds between two tasks of a user.", rich_help_panel=MADE)
    ] = SHAPE.think_s,
    waiting: WaitingFlags,
) -> None:
    """Multi-turn agent sessions with tool calls and their waits: TTFT by turn, prefix cache hits, session time.

    Replays a trace; --synthesize writes one.
    """
    from redline.bench.serving.agentic import Mode, Plan
    from redline.bench.serving.datasets import COMPLETIONS
    from redline.cli.bench.agentic_run import AgenticConfig, make, run

    console = plain_console()
    if (trace is None) == (synthesize is None):
        raise ConfigError("give either a trace to replay, or --synthesize FILE to write one")
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
        raise ConfigError("--users and --session-rate exclude each other")
    target = server.target(
        base_url,
        waiting.patience,
        body={} if temperature is None else {"temperature": temperature},
    )
    if target.backend in COMPLETIONS:
        raise ConfigError(f"--backend {target.backend}: sessions consist of chat messages; use --backend openai-chat")
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
