"""What the load generator of `redline bench` costs and how far off its times are, against a server with known delays.

    python -m redline.bench.runs.load_generator [--rounds 5] [--tokens 200000] [--paced-tokens 200] [--save FILE]

The scripted server (`redline/bench/serving/scripted.py`) is a process of its own. It logs when it handed each event to
the socket, on the clock that the client reads too, so what is compared is what was sent, not what was planned.

A push's best round counts, since others' work only slows; of paced cases all rounds count, and the quietest is beside
them, since others' work holds up both processes.

full push: events as fast as both can; tokens/s per core divide by the client's own processor time, so other users of
the machine matter little. With one event in a write the client is woken often, with 64 seldom.
paced: one event in 10 ms on every stream. A figure's error is the client's less the log's. TTFT and E2EL count from the
request, sent here and received there. Streams begin apart (each has its own phase) or move in step, as those of an
engine do: all 64 events come at once then, and the last to be read waits for the others.
"""

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import msgspec

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.serving.load import run_load
from redline.bench.serving.records import Answer, Ask, Run
from redline.bench.serving.remarks import generator_remark
from redline.bench.serving.script import Logged, Script
from redline.bench.serving.scripted import Scripted
from redline.bench.serving.target import Pace, Target
from redline.errors import RedlineError

PUSHES = ((1, 1), (1, 64), (64, 1), (64, 64))  # streams at once, events of one write
PACED = ((1, False), (8, False), (64, False), (64, True), (512, True))  # streams at once, in step
ITL_S, FIRST_S = 0.010, 0.050
APART_S = 0.0013  # between the beginnings of two streams; ITL_S is no multiple of it
GOALS = {"tokens_per_s_per_core": 50_000, "itl_share": 0.01, "error_ms": 0.5}


class Errors(NamedTuple):
    """The client's figures less the log's, seconds: one of each stream, or of each pair of events. itls: the log's."""

    ttft: list[float]
    itl: list[float]
    e2el: list[float]
    itls: list[float]


def asks(streams: int, script: Script, tokens: int) -> list[Ask]:
    """One request for each stream, with a script whose name is the stream's number."""
    fields = msgspec.to_builtins(script)
    messages = ({"role": "user", "content": "hello"},)
    named = [fields | {"name": str(number)} for number in range(streams)]
    return [Ask(max_tokens=tokens, messages=messages, extra={"script": script}) for script in named]


def ask_all(server: Scripted, requests: list[Ask], pace: Pace) -> tuple[Run, float]:
    """The run, and the processor seconds of this process that it took. Raises RedlineError where an answer is wrong."""
    server.forget()
    cpu = clock.process_time()
    run = run_load(Target(base_url=server.url, model="scripted"), requests, pace)
    cpu = clock.process_time() - cpu
    for answer in run.answers:
        if answer.error or len(answer.chunks) != answer.ask.max_tokens:
            raise RedlineError(f"{len(answer.chunks)} of {answer.ask.max_tokens} tokens came: {answer.error}")
    return run, cpu


def push(server: Scripted, streams: int, events_at_once: int, tokens: int) -> dict[str, Any]:
    """Tokens as fast as both sides can, `tokens` in all; the processor's seconds are those of this process."""
    each = max(1, tokens // streams)
    script = Script(events_at_once=events_at_once, logged=False)
    before = server.log()
    run, cpu = ask_all(server, asks(streams, script, each), Pace(max_concurrency=streams))
    after = server.log()
    return {
        "tokens_per_s_per_core": each * streams / cpu,
        "tokens_per_s": each * streams / run.seconds,
        "tokens_per_read": each * streams / reads(run.answers),
        "server_tokens_per_s_per_core": (after.events - before.events) / (after.cpu_s - before.cpu_s),
        **kept_up(run),
    }


def paced(server: Scripted, streams: int, in_step: bool, tokens: int) -> tuple[Errors, dict[str, Any]]:
    """One event in ITL_S on every stream; what the client's figures are off, and what it cost."""
    script = Script(first_s=FIRST_S, gaps_s=(ITL_S,), in_step=in_step)
    pace = Pace(rate=1 / APART_S, burstiness=float("inf"))
    run, cpu = ask_all(server, asks(streams, script, tokens), pace)
    errors = errors_of(run.answers, server.named())
    seen = {
        "tokens_per_s_per_core": streams * tokens / cpu,
        "tokens_per_read": streams * tokens / reads(run.answers),
        **kept_up(run),
    }
    return errors, seen


def kept_up(run: Run) -> dict[str, Any]:
    """How busy the load generator says that it was, and whether it calls itself a limit of what was measured."""
    remark = generator_remark(run.generator, run.answers)
    return {"generator": msgspec.to_builtins(run.generator), "calls_itself_the_limit": remark.warning}


def reads(answers: Sequence[Answer]) -> int:
    """How often the client was woken for a chunk, as far as its times tell."""
    return sum(len({chunk.at for chunk in answer.chunks}) for answer in answers)


def errors_of(answers: Sequence[Answer], log: dict[str, Logged]) -> Errors:
    """What answers say, less what the log says, of TTFT, every ITL, and E2EL (to the response's last byte).

    log: its rows by name, which is what the answers' scripts are called. Every answer has ended in order.
    """
    errors = Errors([], [], [], [])
    for answer in answers:
        row = log[answer.ask.extra["script"]["name"]]
        assert answer.sent is not None
        assert row.end is not None
        times = [chunk.at for chunk in answer.chunks]
        errors.ttft.append(times[0] - answer.sent - (row.events[0] - row.received))
        errors.e2el.append(answer.end - answer.sent - (row.end - row.received))
        for here, there in zip(pairwise(times), pairwise(row.events), strict=True):
            errors.itl.append(here[1] - here[0] - (there[1] - there[0]))
            errors.itls.append(there[1] - there[0])
    return errors


def spread_ms(errors: Sequence[float]) -> dict[str, float]:
    """Median (with its sign), and of the absolute errors median and 99th percentile, in milliseconds."""
    sizes = sorted(abs(error) for error in errors)
    p99 = sizes[min(len(sizes) - 1, int(len(sizes) * 0.99))]
    return {
        "median": _short(statistics.median(errors) * 1e3),
        "size_median": _short(statistics.median(sizes) * 1e3),
        "size_p99": _short(p99 * 1e3),
    }


def figures_of(errors: Errors) -> dict[str, Any]:
    """The figures of a paced case. itl_share: the mean ITL's error over the mean ITL, as a share; 0.01 is 1 %."""
    mean = statistics.fmean(errors.itls)
    return {
        "logged_itl_ms": _short(mean * 1e3),
        "itl_share": _short(statistics.fmean(errors.itl) / mean),
        "itl_share_size_median": _short(statistics.median(abs(error) for error in errors.itl) / mean),
        **{f"{name}_error_ms": spread_ms(getattr(errors, name)) for name in ("ttft", "itl", "e2el")},
    }


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    rounded: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            rounded[name] = _rounded(value)
        else:
            rounded[name] = float(f"{value:.4g}") if isinstance(value, float) else value
    return rounded


def _busy(row: dict[str, Any]) -> str:
    return f"busy {row['generator']['cpu_share']:.0%}{', the limit' if row['calls_itself_the_limit'] else ''}"


def push_row(case: tuple[int, int], tries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The best round of a full push, with the slowest beside it."""
    best = _rounded(max(tries, key=lambda one: one["tokens_per_s_per_core"]))
    slowest = min(one["tokens_per_s_per_core"] for one in tries)
    return {"streams": case[0], "events_at_once": case[1], **best, "slowest_round": round(slowest)}


def paced_row(case: tuple[int, bool], tries: Sequence[tuple[Errors, dict[str, Any]]]) -> dict[str, Any]:
    """The quietest round of a paced case, by its ITLs' p99, all rounds together, and the cheapest round's cost."""
    every = Errors(*(list(chain.from_iterable(parts)) for parts in zip(*(errors for errors, _ in tries), strict=True)))
    best = min((figures_of(errors) for errors, _ in tries), key=lambda one: one["itl_error_ms"]["size_p99"])
    cost = _rounded(max((cost for _, cost in tries), key=lambda one: one["tokens_per_s_per_core"]))
    return {"streams": case[0], "in_step": case[1], "quietest_round": best, "all_rounds": figures_of(every), **cost}


def said(full_push: Sequence[dict[str, Any]], at_pace: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each case, and one that explains the second half."""
    for row in full_push:
        yield (
            f"{row['streams']:3d} streams, {row['events_at_once']:2d} events in a write   "
            f"{row['tokens_per_s_per_core']:9,.0f} tokens/s per core (slowest round {row['slowest_round']:9,})   "
            f"{row['tokens_per_read']:5.1f} tokens in a read   {_busy(row)}"
        )
    yield f"one event in {ITL_S * 1e3:g} ms; errors in ms: median of all rounds (p99 of the quietest, p99 of all)"
    for row in at_pace:
        figures, quietest = row["all_rounds"], row["quietest_round"]
        shown = "   ".join(
            f"{name.upper()} {figures[key]['size_median']:.2f} ({quietest[key]['size_p99']:.2f}, "
            f"{figures[key]['size_p99']:.2f})"
            for name, key in ((name, f"{name}_error_ms") for name in ("ttft", "itl", "e2el"))
        )
        yield (
            f"{row['streams']:3d} streams, {'in step' if row['in_step'] else 'apart'}   "
            f"share of ITL {figures['itl_share']:+.3%}, of a single one {figures['itl_share_size_median']:.2%}   "
            f"{shown}   {row['tokens_per_s_per_core']:7,.0f} tokens/s per core   "
            f"{_busy(row)}"
        )


def main() -> None:
    """Measures every case, prints each, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=5, help="of each case, in turn")
    parser.add_argument("--tokens", type=count, default=200_000, help="of a full push, over all streams")
    parser.add_argument("--paced-tokens", type=count, default=200, help="of each paced stream")
    parser.add_argument("--save", type=output, default="runs/load-generator-cpu.json")
    given = parser.parse_args()
    if given.paced_tokens < 2:
        parser.error("--paced-tokens: an ITL needs two tokens")
    rounds: int = given.rounds
    began = os.getloadavg()[0]
    pushes: dict[tuple[int, int], list[dict[str, Any]]] = {case: [] for case in PUSHES}
    walks: dict[tuple[int, bool], list[tuple[Errors, dict[str, Any]]]] = {case: [] for case in PACED}
    with Scripted() as server:
        for _ in range(rounds):
            for streams, at_once in PUSHES:
                pushes[streams, at_once].append(push(server, streams, at_once, given.tokens))
            for streams, in_step in PACED:
                walks[streams, in_step].append(paced(server, streams, in_step, given.paced_tokens))
    full_push = [push_row(case, tries) for case, tries in pushes.items()]
    at_pace = [paced_row(case, tries) for case, tries in walks.items()]
    for line in said(full_push, at_pace):
        print(line)
    result = {
        "what": "the load generator of redline bench against the scripted server, over loopback; chat streams",
        **provenance("uvloop", "httptools", "msgspec"),
        "rounds": rounds,
        "load_average": [round(began, 1), round(os.getloadavg()[0], 1)],
        "goals": GOALS,
        "full_push": full_push,
        "paced": {
            "itl_ms": ITL_S * 1e3,
            "first_ms": FIRST_S * 1e3,
            "tokens_each": given.paced_tokens,
            "cases": at_pace,
        },
    }
    given.save.parent.mkdir(parents=True, exist_ok=True)
    given.save.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    program(main)
