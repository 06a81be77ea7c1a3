"""`redline bench agentic`: its flags."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from redline.bench.serving.traces import TraceShape
from redline.cli.bench.options import BaseUrl, Html, NotNegative, Quiet, Save, ServerFlags, Temperature, WaitingFlags
from redline.cli.console import plain_console
from redline.cli.flags import Argument, AtLeast1, Flag
from redline.messages.base import Record

MADE = Flag(panel="Synthetic trace")
AtLeast2 = Annotated[int, Meta(ge=2)]
SHAPE = TraceShape()


class AgenticFlags(Record, frozen=True):
    """The flags of `redline bench agentic`."""

    trace: Annotated[Path | None, Meta(description="A trace, JSONL; see docs/bench.md."), Argument()] = None
    base_url: BaseUrl = None
    server: ServerFlags = ServerFlags()
    history: Annotated[
        str,
        Meta(
            description="Answers in the next turn's history: the trace's, so that all servers get the same, or the "
            "model's."
        ),
        Flag(metavar="recorded|live"),
    ] = "recorded"
    users: Annotated[AtLeast1 | None, Meta(description="Concurrent sessions. Default: 1.")] = None
    session_rate: Annotated[
        Annotated[float, Meta(ge=0.0001)] | None,
        Meta(description="Sessions started per second, instead of --users."),
    ] = None
    time_scale: Annotated[
        NotNegative,
        Meta(description="Factor for the waits between turns: 0.1 divides them by ten, 0 removes them."),
    ] = 1.0
    sessions: Annotated[
        AtLeast1 | None,
        Meta(description="At most this many sessions of the trace; size of a synthetic one. Default: all, or 8."),
    ] = None
    max_seconds: Annotated[
        Annotated[float, Meta(ge=0.1)] | None,
        Meta(description="End the replay after this many seconds; unfinished turns are not counted."),
    ] = None
    ignore_eos: Annotated[bool, Meta(description="Generate the trace's output_tokens for every answer.")] = False
    temperature: Temperature = None
    seed: Annotated[int, Meta(ge=0, description="Seed of arrivals, and of a synthetic trace.")] = 0
    save: Save = None
    html: Html = None
    disable_tqdm: Quiet = False
    synthesize: Annotated[
        Path | None,
        Meta(description="Write a synthetic trace of a coding agent, and exit."),
        Flag(metavar="FILE", panel="Synthetic trace"),
    ] = None
    context_tokens: Annotated[int, Meta(ge=64, description="Tokens to which the history of a session grows."), MADE] = (
        SHAPE.context_tokens
    )
    output_tokens: Annotated[AtLeast2, Meta(description="Tokens of the median answer."), MADE] = SHAPE.output_tokens
    result_tokens: Annotated[
        AtLeast2, Meta(description="Tokens of the median file excerpt that a tool returns."), MADE
    ] = SHAPE.result_tokens
    tool_s: Annotated[NotNegative, Meta(description="Seconds of the median test run."), MADE] = SHAPE.tool_s
    think_s: Annotated[NotNegative, Meta(description="Median seconds between two tasks of a user."), MADE] = (
        SHAPE.think_s
    )
    waiting: WaitingFlags = WaitingFlags()


def bench_agentic(flags: AgenticFlags) -> int:
    """Multi-turn agent sessions with tool calls and their waits: TTFT by turn, prefix cache hits, session time.

    Replays a trace; --synthesize writes one.
    """
    from redline.cli.bench.agentic_run import run

    return run(flags, plain_console())
