"""Replays agent sessions: turns that build on each other, with waits for tools and users in between.

The next turn of a session is sent when its wait is over, counted from the end of the previous answer, as an agent does.
A slow server therefore gets requests later; comparable between servers are the latency of a turn, and the time of a
session without its waits. The history contains either the model's own answers (live) or the trace's (recorded). With
recorded answers every server gets the same text, and a prefix cache gets the same prefixes.
"""

import asyncio
import json
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from redline import clock
from redline.bench.serving.metrics import (
    e2el,
    error_of,
    failure_of,
    input_tokens,
    output_tokens,
    percentile,
    tpot,
    ttft,
)
from redline.bench.serving.records import GeneratorLoad, LoadRequest, TimedAnswer
from redline.bench.serving.remarks import generator_remark, uncounted, uncounted_remarks
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, Section, Series, Table, Words
from redline.bench.serving.traces import Session
from redline.messages.base import Record

Mode = Literal["recorded", "live"]
Watch = Callable[[int, int, int], None]  # turns ended, sessions running, turns failed


LATE_S = 0.01  # a turn sent more than this many seconds after its wait ended counts as late


class ReplayPlan(Record, frozen=True):
    """How to replay a trace.

    users: concurrent sessions; a user starts the next session after finishing one. rate: instead, sessions/s that start
    at random times, independent of running ones. time_scale: factor for every wait. deadline: seconds after which the
    replay ends. extra: fields for the body of every request.
    """

    mode: Mode = "recorded"
    users: int | None = 1
    rate: float | None = None
    time_scale: float = 1.0
    deadline: float | None = None
    seed: int = 0
    extra: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class Replayed(Record, frozen=True):
    """One turn that was sent: its session, its number counted from 1, its answer, the seconds waited before it."""

    session: str
    turn: int
    waited: float
    answer: TimedAnswer


class EndedSession(Record, frozen=True):
    """One session. seconds: from sending its first turn to its last answer. waited: seconds of waits among them.

    whole: all turns were answered. failed: a turn failed. Neither: the replay ended first.
    """

    session: str
    turns: int
    seconds: float
    waited: float
    whole: bool
    failed: bool = False


class Replay(Record, frozen=True):
    """A replayed trace, possibly incomplete. began: Unix time. cut: turns running or waiting when it was stopped."""

    began: float
    seconds: float
    generator: GeneratorLoad
    turns: tuple[Replayed, ...]
    sessions: tuple[EndedSession, ...]
    stopped: bool = False
    out_of_time: bool = False
    cut: int = 0


class Asks(Protocol):
    """Sends requests to a server, such as a `Client`."""

    def ask(self, ask: LoadRequest, index: int, planned: float) -> Awaitable[TimedAnswer]:
        """Returns the answer; failures are reported in it."""
        ...

    def clock(self) -> float:
        """Seconds since the run began."""
        ...


class _Replaying:
    """The state of one replay, on one event loop."""

    def __init__(self, client: Asks, plan: ReplayPlan, watch: Watch) -> None:
        self.client, self.plan, self._watch = client, plan, watch
        self.turns: list[Replayed] = []
        self.sessions: list[EndedSession] = []
        self.running, self.index, self.failed = 0, 0, 0
        self.lags: list[float] = []

    async def session(self, session: Session) -> None:
        """Replays one session; a failed turn ends it."""
        history: list[dict[str, Any]] = []
        first: float | None = None
        waited, wait, last = 0.0, 0.0, 0.0
        done, bad = 0, False
        self.running += 1
        try:
            for number, turn in enumerate(session.turns, 1):
                planned = self.client.clock() + wait
                if wait > 0:
                    await asyncio.sleep(wait)
                    self.lags.append(max(0.0, self.client.clock() - planned))
                history += fitted(turn.messages, history)
                ask = LoadRequest(
                    max_tokens=turn.output_tokens,
                    messages=tuple(history),
                    tools=session.tools,
                    name=session.session,
                    extra=self.plan.extra,
                )
                index, self.index = self.index, self.index + 1
                answer = await self.client.ask(ask, index=index, planned=planned)
                # Results save only the request's name; keeping messages would store the history once per turn.
                slim = msgspec.structs.replace(ask, messages=None, tools=None, text="")
                self.turns.append(
                    Replayed(
                        session=session.session,
                        turn=number,
                        waited=wait,
                        answer=msgspec.structs.replace(answer, ask=slim),
                    )
                )
                waited += wait
                first = answer.planned if first is None else first
                last = answer.end
                bad = failure_of(answer) is not None
                self.failed += bad
                self._watch(len(self.turns), self.running, self.failed)
                if bad:
                    break
                done = number
                recorded = turn.answer if self.plan.mode == "recorded" else None
                history.append(recorded or said(answer))
                wait = turn.wait_s * self.plan.time_scale
        finally:
            self.running -= 1
            if first is not None:
                whole = done == len(session.turns)
                self.sessions.append(
                    EndedSession(
                        session=session.session,
                        turns=done,
                        seconds=last - first,
                        waited=waited,
                        whole=whole,
                        failed=bad,
                    )
                )

    async def users(self, sessions: Sequence[Session], users: int) -> None:
        """Replays sessions with `users` concurrent users; each takes one session after another."""
        left = deque(sessions)

        async def user() -> None:
            while left:
                await self.session(left.popleft())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(users, len(sessions))):
                group.create_task(user())

    async def arrivals(self, sessions: Sequence[Session], rate: float) -> None:
        """Starts sessions as a Poisson process."""
        draw = random.Random(self.plan.seed)
        at = self.client.clock()
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                await asyncio.sleep(max(0.0, at - self.client.clock()))
                group.create_task(self.session(session))
                at += draw.expovariate(rate)


async def replay(client: Asks, sessions: Sequence[Session], plan: ReplayPlan, watch: Watch | None = None) -> Replay:
    """Replays the sessions. watch: called after every turn with (turns finished, sessions running, turns failed).

    If cancelled, it returns the answers so far, with `stopped` set.
    """
    work = _Replaying(client, plan, watch or _unwatched)
    began, start, processor = clock.now(), client.clock(), clock.process_time()
    task = work.users(sessions, plan.users or 1) if plan.rate is None else work.arrivals(sessions, plan.rate)
    stopped = late = False
    try:
        async with asyncio.timeout(plan.deadline):
            await task
    except TimeoutError:
        late = True
    except asyncio.CancelledError:
        stopped = True
    asked, seconds = len(work.turns), max(client.clock() - start, 1e-9)
    return Replay(
        began=began,
        seconds=seconds,
        generator=_generator((clock.process_time() - processor) / seconds, work.lags),
        turns=tuple(work.turns),
        sessions=tuple(work.sessions),
        stopped=stopped,
        out_of_time=late,
        cut=work.index - asked,
    )


def _generator(cpu_share: float, lags: Sequence[float]) -> GeneratorLoad:
    """lags: seconds by which each wait between turns ended late."""
    p50, p99 = (percentile(lags, p) or 0.0 for p in (50, 99))
    late = sum(lag > LATE_S for lag in lags)
    return GeneratorLoad(
        cpu_share=cpu_share, lag_p50=p50, lag_p99=p99, lag_most=max(lags, default=0.0), late_sends=late
    )


def _unwatched(done: int, running: int, failed: int) -> None:
    """The default `watch`: does nothing."""


def said(answer: TimedAnswer) -> dict[str, Any]:
    """The answer as the next message of the history.

    A tool call with arguments other than a JSON object is left out: the chat template could fail on it in the next
    turn. Thinking is kept with tool calls, since models that think between calls need it, and dropped from other
    answers.
    """
    calls = [
        {
            "id": str(call.get("id") or f"call_{answer.index}_{at}"),
            "type": "function",
            "function": {"name": call["name"], "arguments": call.get("arguments") or "{}"},
        }
        for at, call in enumerate(answer.calls)
        if call.get("name") and _is_object(call.get("arguments") or "{}")
    ]
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if calls:
        message["tool_calls"] = calls
        if answer.thinking:
            message["reasoning_content"] = answer.thinking
    return message


def fitted(messages: Sequence[dict[str, Any]], history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fits a turn's messages to the last answer: tool results get the ids of its tool calls, in order.

    A live model may make fewer calls than the trace; further results are sent as user messages. A call without a result
    gets an empty one, since servers reject a history with unanswered calls.
    """
    calls: list[dict[str, Any]] = list(history[-1].get("tool_calls") or ()) if history else []
    open_ids = [str(call["id"]) for call in calls]
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            found += [_empty(one) for one in open_ids]
            open_ids = []
            found.append(message)
        elif message.get("tool_call_id") in open_ids:
            open_ids.remove(str(message["tool_call_id"]))
            found.append(message)
        elif open_ids:
            found.append({**message, "tool_call_id": open_ids.pop(0)})
        else:
            found.append({"role": "user", "content": f"Result of a tool:\n{message.get('content') or ''}"})
    return [*found, *(_empty(one) for one in open_ids)]


def _empty(call: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": ""}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


# ------------------------------------------------------------------------------------------------------------- figures


def figures(replay: Replay) -> dict[str, Any]:
    """The figures of a replay. Times are in ms or s, by the key's suffix; None if no turn has the figure.

    interactivity_e2e_p90: 1 / the 90th percentile of E2EL / output tokens over all turns: tokens/s of one user,
    including prefill, as defined by InferenceX AgentX. cache_hit_share: cached prompt tokens / all prompt tokens, over
    answers with both counts in their usage. uncounted: answers in which each event was counted as one token.
    """
    answers = [one.answer for one in replay.turns]
    good = [answer for answer in answers if failure_of(answer) is None]
    tokens = sum(output_tokens(answer).count for answer in good)
    seconds = max(replay.seconds, 1e-9)
    whole = [one for one in replay.sessions if one.whole]
    found: dict[str, Any] = {
        "duration": replay.seconds,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "cut": replay.cut,
        "sessions_completed": len(whole),
        "sessions_failed": sum(one.failed for one in replay.sessions),
        "total_input_tokens": sum(map(input_tokens, good)),
        "total_output_tokens": tokens,
        "uncounted": uncounted(good),
        "output_throughput": tokens / seconds,
        "request_throughput": len(good) / seconds,
        "interactivity_e2e_p90": interactivity(good),
        "cache_hit_share": hit_share(good),
    }
    for name, measure in (("ttft", ttft), ("tpot", tpot), ("e2el", e2el)):
        for p in (50, 90, 99):
            seconds = percentile(map(measure, good), p)
            found[f"p{p}_{name}_ms"] = None if seconds is None else seconds * 1000
    net = [one.seconds - one.waited for one in whole]
    for p in (50, 90):
        found[f"p{p}_session_s"] = percentile([one.seconds for one in whole], p)
        found[f"p{p}_session_less_waits_s"] = percentile(net, p)
    return found


def interactivity(answers: Sequence[TimedAnswer]) -> float | None:
    """1 / the 90th percentile of E2EL / output tokens, tokens/s."""
    ratios: list[float] = []
    for answer in answers:
        seconds, tokens = e2el(answer), output_tokens(answer).count
        if seconds is not None and tokens:
            ratios.append(seconds / tokens)
    p90 = percentile(ratios, 90)
    return 1 / p90 if p90 else None


def hit_share(answers: Sequence[TimedAnswer]) -> float | None:
    """Cached prompt tokens / prompt tokens, over answers with both counts in their usage; None if there are none."""
    cached = prompts = 0
    for answer in answers:
        usage = answer.usage
        if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens:
            cached += usage.cached_tokens
            prompts += usage.prompt_tokens
    return cached / prompts if prompts else None


# ------------------------------------------------------------------------------------------------------- report


class TurnRow(Record, frozen=True):
    """One turn without its answer, which has the same index among the result's answers."""

    session: str
    turn: int
    waited: float


def details_of(replay: Replay) -> dict[str, Any]:
    """The details that a result saves in addition to its answers."""
    return {
        "turns": [TurnRow(session=one.session, turn=one.turn, waited=one.waited) for one in replay.turns],
        "sessions": replay.sessions,
        "out_of_time": replay.out_of_time,
    }


def agentic_sections(result: BenchResult) -> list[Section]:
    """Totals, TTFT and cache hits by turn and by context, sessions, failures, and plots."""
    rows = msgspec.convert(result.details["turns"], list[TurnRow])
    sessions = msgspec.convert(result.details["sessions"], list[EndedSession])
    pairs = [(row, one) for row, one in zip(rows, result.answers, strict=True) if failure_of(one) is None]
    found: list[Section] = [Words(text=note) for note in result.notes]
    if result.stopped or result.details.get("out_of_time"):
        why = "The run was stopped" if result.stopped else "The deadline was reached"
        text = f"{why}: {result.figures['cut']} unfinished turns are not counted."
        found.append(Words(text=text, warning=result.stopped))
    if result.generator is not None:
        found.append(generator_remark(result.generator, result.answers))
    found += uncounted_remarks(result.figures.get("uncounted", 0))
    found.append(_totals(result.figures))
    if pairs:
        turns = [(f"{low}" if low == high else f"{low} to {high}", low, high) for low, high in _groups(pairs)]
        by_turn = [(name, [one for row, one in pairs if low <= row.turn <= high]) for name, low, high in turns]
        found.append(_by("By turn of a session", "turn", by_turn))
        found.append(_by("By length of the prompt", "tokens", by_context([one for _, one in pairs])))
    failed = [one for one in result.answers if failure_of(one) is not None]
    if failed:
        lines = tuple((one.ask.name, str(one.index), failure_of(one) or "", error_of(one)) for one in failed[:20])
        note = f"{len(failed)} in total; a failed turn ends its session."
        columns = ("session", "request", "kind", "what happened")
        found.append(Table(title="Failures", columns=columns, rows=lines, note=note))
    return found + _plots(pairs, sessions)


def _groups(pairs: Sequence[tuple[TurnRow, TimedAnswer]]) -> list[tuple[int, int]]:
    """Turns 1, 2, 3, 4, then groups that double: 5 to 8, 9 to 16 and so on, up to the last turn."""
    most = max(row.turn for row, _ in pairs)
    groups = [(turn, turn) for turn in range(1, min(4, most) + 1)]
    low = 5
    while low <= most:
        high = 2 * (low - 1)
        groups.append((low, min(high, most)))
        low = high + 1
    return groups


def by_context(answers: Sequence[TimedAnswer]) -> list[tuple[str, list[TimedAnswer]]]:
    """Groups answers by prompt tokens, rounded up to a power of two; each group has its range as a name."""
    groups: dict[int, list[TimedAnswer]] = {}
    for answer in answers:
        groups.setdefault(max(0, math.ceil(math.log2(max(1, input_tokens(answer))))), []).append(answer)
    return [(f"{(1 << power - 1) + 1 if power else 1:,} to {1 << power:,}", groups[power]) for power in sorted(groups)]


def _totals(found: dict[str, Any]) -> Table:
    shown = (
        ("turns answered", "completed", ",.0f"),
        ("turns failed", "failed", ",.0f"),
        ("sessions completed", "sessions_completed", ",.0f"),
        ("sessions ended by a failed turn", "sessions_failed", ",.0f"),
        ("seconds", "duration", ",.1f"),
        ("output tokens/s", "output_throughput", ",.1f"),
        ("prompt tokens", "total_input_tokens", ",.0f"),
        ("of them from the server's cache", "cache_hit_share", ".1%"),
        ("output tokens", "total_output_tokens", ",.0f"),
        ("E2E-normalised interactivity (P90), tokens/s per user", "interactivity_e2e_p90", ",.2f"),
        ("TTFT p50, ms", "p50_ttft_ms", ",.1f"),
        ("TTFT p90, ms", "p90_ttft_ms", ",.1f"),
        ("TPOT p50, ms", "p50_tpot_ms", ",.2f"),
        ("E2EL of a turn p50, ms", "p50_e2el_ms", ",.0f"),
        ("session p50, s", "p50_session_s", ",.1f"),
        ("session without waits p50, s", "p50_session_less_waits_s", ",.1f"),
        ("session without waits p90, s", "p90_session_less_waits_s", ",.1f"),
    )
    rows = tuple((words, format(found[key], shape)) for words, key, shape in shown if found.get(key) is not None)
    note = "Interactivity: 1 / the 90th percentile of a turn's E2EL per output token, as InferenceX AgentX plots it."
    if found.get("cache_hit_share") is None:
        note += " The server does not report cached tokens."
    return Table(title="Sessions replayed", columns=("", "value"), rows=rows, note=note)


def _by(title: str, what: str, groups: Sequence[tuple[str, Sequence[TimedAnswer]]]) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, answers in groups:
        if not answers:
            continue
        share, user = hit_share(answers), interactivity(answers)
        median = percentile(map(input_tokens, answers), 50)
        rows.append(
            (
                name,
                f"{len(answers):,}",
                f"{median:,.0f}",
                "-" if share is None else f"{share:.1%}",
                *(f"{1000 * (percentile(map(ttft, answers), p) or 0.0):,.1f}" for p in (50, 90)),
                "-" if user is None else f"{user:,.2f}",
            )
        )
    columns = (what, "turns", "prompt tokens", "from cache", "TTFT p50, ms", "TTFT p90, ms", "tokens/s per user, P90")
    return Table(title=title, columns=columns, rows=tuple(rows))


def _plots(pairs: Sequence[tuple[TurnRow, TimedAnswer]], sessions: Sequence[EndedSession]) -> list[Section]:
    found: list[Section] = []
    points = [(row, one, first * 1000) for row, one in pairs if (first := ttft(one)) is not None]
    if points:
        labels = tuple(f"{row.session}, turn {row.turn}" for row, _, _ in points)
        y = tuple(first for _, _, first in points)
        for title, label, x in (
            ("TTFT by length of the prompt", "prompt tokens", [float(input_tokens(one)) for _, one, _ in points]),
            ("TTFT by turn", "turn of its session", [float(row.turn) for row, _, _ in points]),
        ):
            series = Series(name="turns", x=tuple(x), y=y, labels=labels, style="points")
            found.append(Plot(title=title, x_label=label, y_label="TTFT, ms", series=(series,), log_y=True))
    times = sorted(one.seconds - one.waited for one in sessions if one.whole)
    if len(times) > 1:
        share = tuple((at + 1) / len(times) for at in range(len(times)))
        series = Series(name="sessions", x=tuple(times), y=share, style="steps")
        found.append(
            Plot(
                title="Session time without waits",
                x_label="seconds",
                y_label="share of sessions that took at most this time",
                series=(series,),
            )
        )
    return found
