"""Sections of a result of `redline bench serve` or of vLLM's client: tables, remarks and plots."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import numpy as np

from redline.bench.serving import metrics
from redline.bench.serving.metrics import UNFINISHED, failure_of
from redline.bench.serving.records import TimedAnswer
from redline.bench.serving.remarks import remarks
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, Section, Series, Table, Words, floats

ROWS = {
    "ttft": "TTFT, to the first token",
    "answer_ttft": "to the first token of the answer",
    "thinking": "thinking",
    "tpot": "TPOT, per token after the first",
    "itl": "ITL, between events",
    "e2el": "E2EL, to the last token",
    "ttft_from_schedule": "TTFT from the schedule",
    "e2el_from_schedule": "E2EL from the schedule",
    "client_queue_time": "wait in the client",
    "e2el_including_client_queue": "E2EL including that wait",
}
MOST_ROWS = 20  # failures and mismatches listed individually, at most
CDF_POINTS = 400


def serve_sections(result: BenchResult) -> list[Section]:
    """Heading, tables, remarks, plots; for a result of vLLM's client, those that its keys allow."""
    begin = Words(text=heading(result))
    return [begin, *serve_tables(result), *remarks(result), *serve_plots(result)]


def serve_tables(result: BenchResult) -> list[Section]:
    """The tables of a result, as shown in a terminal."""
    figures = result.figures
    found: list[Section] = [_throughput(figures)]
    latencies = _latencies(figures)
    if latencies.rows:
        found.append(latencies)
    if "spec_decode_acceptance_length" in figures:
        found.append(_drafting(figures))
    failed = [answer for answer in result.answers if failure_of(answer) not in (None, *UNFINISHED)]
    if failed:
        found.append(_failures(failed))
    mismatches: list[dict[str, Any]] = result.details.get("mismatches", [])
    if mismatches:
        found.append(_mismatches(mismatches))
    return found


def heading(result: BenchResult) -> str:
    """Model, server, dataset and load in one line."""
    figures = result.figures
    limit = figures.get("max_concurrency")
    parts = [
        f"{figures.get('model_id') or 'a model'} at {result.target.get('base_url', 'a server')}",
        str(figures.get("backend") or ""),
        _dataset(result.dataset),
        f"{figures.get('num_prompts', '?')} requests",
        _pace(figures),
        "" if limit is None else f"at most {limit} concurrent",
    ]
    return ", ".join(part for part in parts if part)


def _pace(figures: dict[str, Any]) -> str:
    if strategy := figures.get("ramp_up_strategy"):
        start, end = figures.get("ramp_up_start_rps"), figures.get("ramp_up_end_rps")
        return f"{start:g} to {end:g} requests/s, {strategy}"
    rate = figures.get("request_rate", "inf")
    return "request rate inf" if rate in ("inf", math.inf) else f"{rate:g} requests/s"


def _dataset(dataset: dict[str, Any]) -> str:
    match dataset.get("dataset_name"):
        case None:
            return ""
        case "random":
            return f"random, {dataset.get('random_input_len')} in, {dataset.get('random_output_len')} out"
        case name:
            return f"{name} {dataset.get('dataset_path') or ''}".strip()


def _throughput(figures: dict[str, Any]) -> Table:
    rows = [("requests completed", f"{figures['completed']:,}"), ("requests failed", f"{figures.get('failed') or 0:,}")]
    if unfinished := sum(figures.get("failures", {}).get(kind, 0) for kind in UNFINISHED):
        rows.append(("requests cut off by the end of the run", f"{unfinished:,}"))

    def add(name: str, key: str, shape: str) -> None:
        if figures.get(key) is not None:
            rows.append((name, format(figures[key], shape)))

    add("seconds", "duration", ",.2f")
    add("requests/s", "request_throughput", ",.2f")
    add("good requests/s (goodput)", "request_goodput", ",.2f")
    add("output tokens/s", "output_throughput", ",.1f")
    add("most output tokens in one second", "max_output_tokens_per_s", ",.0f")
    add("tokens/s, including prompts", "total_token_throughput", ",.1f")
    add("prompt tokens", "total_input_tokens", ",")
    add("of them from the server's cache", "total_cached_tokens", ",")
    add("output tokens", "total_output_tokens", ",")
    if figures.get("total_thinking_tokens"):
        add("of them thinking", "total_thinking_tokens", ",")
    add("most requests at once", "max_concurrent_requests", ",")
    return Table(title="Throughput", columns=("", ""), rows=tuple(rows))


def _latencies(figures: dict[str, Any]) -> Table:
    keys = [re.fullmatch(r"p([0-9.]+)_(?:ttft|tpot|itl|e2el)_ms", key) for key in figures]
    percentiles = sorted({float(key[1]) for key in keys if key is not None} - {50.0})
    columns = ("mean", "median", *(f"p{p:g}" for p in percentiles))
    rows = [
        (text, *(_cell(figures.get(f"{column}_{name}_ms")) for column in columns))
        for name, text in ROWS.items()
        if figures.get(f"mean_{name}_ms") is not None
    ]
    return Table(title="Latency, ms", columns=("", *columns), rows=tuple(rows))


def _cell(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:,.2f}" if ms < 1000 else f"{ms:,.0f}"


def _drafting(figures: dict[str, Any]) -> Table:
    places: list[float] = figures["spec_decode_per_position_acceptance_rates"]
    rows = [
        ("tokens per step (acceptance length)", f"{figures['spec_decode_acceptance_length']:.2f}"),
        ("drafts accepted", f"{figures['spec_decode_acceptance_rate']:.1f} %"),
        ("by position", ", ".join(f"{share:.1%}" for share in places) or "unknown"),
        ("steps with drafts", f"{figures['spec_decode_num_drafts']:,}"),
    ]
    note = "From the server's counters over the run, which include the requests of other clients."
    return Table(title="Speculative decoding", columns=("", ""), rows=tuple(rows), note=note)


def _failures(failed: Sequence[TimedAnswer]) -> Table:
    """A row per kind of failure, with its requests."""
    happened: dict[tuple[str, str], list[TimedAnswer]] = {}
    for answer in failed:
        happened.setdefault((failure_of(answer) or "", metrics.error_of(answer)), []).append(answer)
    rows = [
        (kind, f"{len(those):,}", _indices(those), f"{those[0].end:.3f}", text)
        for (kind, text), those in list(happened.items())[:MOST_ROWS]
    ]
    kinds = _counted(failure_of(answer) or "" for answer in failed)
    columns = ("kind", "how often", "requests", "first at, s", "what happened")
    return Table(title=f"Failures: {kinds}", columns=columns, rows=tuple(rows), note=_rest(happened))


def _indices(answers: Sequence[TimedAnswer]) -> str:
    shown = ", ".join(str(answer.index) for answer in answers[:4])
    return f"{shown}, ..." if len(answers) > 4 else shown


def _mismatches(mismatches: Sequence[dict[str, Any]]) -> Table:
    kinds = _counted(str(one["check"]) for one in mismatches)
    rows = [
        (str(one["check"]), "all" if one["index"] is None else str(one["index"]), str(one["text"]))
        for one in mismatches[:MOST_ROWS]
    ]
    columns = ("check", "request", "what")
    title = f"Inconsistent usage: {kinds}"
    return Table(title=title, columns=columns, rows=tuple(rows), note=_rest(mismatches))


def _counted(kinds: Iterable[str]) -> str:
    return ", ".join(f"{kind} {many:,}" for kind, many in Counter(kinds).most_common())


def _rest(rows: Sized) -> str:
    return f"{len(rows) - MOST_ROWS:,} more are in the saved result." if len(rows) > MOST_ROWS else ""


# --------------------------------------------------------------------------------------------------------------- plots


def serve_plots(result: BenchResult) -> list[Section]:
    """TTFT over time, gaps between events, tokens/s and requests over time, and a timeline of requests.

    Empty without rows.
    """
    good = [answer for answer in result.answers if failure_of(answer) is None]
    if not good:
        return []
    began = min(answer.sent for answer in good if answer.sent is not None)
    return [_first_tokens(good), *_gaps(good), _rate(good, began), _running(result.answers), _timeline(result.answers)]


def _first_tokens(good: Sequence[TimedAnswer]) -> Plot:
    def series(name: str, of: str) -> Series:
        points = [(one, metrics.MEASURES[of](one)) for one in good]
        known = [(one, seconds) for one, seconds in points if seconds is not None]
        return Series(
            name=name,
            x=tuple(one.sent or 0.0 for one, _ in known),
            y=tuple(seconds * 1000 for _, seconds in known),
            labels=tuple(f"request {one.index}, {metrics.input_tokens(one):,} prompt tokens" for one, _ in known),
            style="points",
        )

    found = [series("first token", "ttft")]
    if any(chunk.kind == "thinking" for answer in good for chunk in answer.chunks):
        found.append(series("first token of the answer", "answer_ttft"))
    return Plot(title="Time to first token", x_label="sent at, s", y_label="ms", series=tuple(found))


def _gaps(good: Sequence[TimedAnswer]) -> list[Plot]:
    gaps = np.asarray(metrics.values(good, "itl"))
    gaps = gaps[gaps > 0] * 1000
    if not len(gaps):
        return []
    shares = np.linspace(0, 1, min(CDF_POINTS, len(gaps)))
    edges = np.quantile(gaps, shares)
    cdf = Series(name="share of gaps below", x=floats(edges), y=floats(shares * 100))
    note = "Zero gaps, between events of one read, are left out."
    logs = np.log10(gaps)
    counts, bounds = np.histogram(logs, bins=60, range=(float(logs.min()) - 0.02, float(logs.max()) + 0.02))
    bars = Series(name="gaps", x=floats(10 ** ((bounds[:-1] + bounds[1:]) / 2)), y=floats(counts), style="steps")

    def plot(title: str, y_label: str, series: Series) -> Plot:
        return Plot(title=title, x_label="ms", y_label=y_label, series=(series,), log_x=True, note=note)

    return [
        plot("Gaps between events (ITL), cumulative", "% of gaps", cdf),
        plot("Gaps between events (ITL), histogram", "gaps", bars),
    ]


def _rate(good: Sequence[TimedAnswer], began: float) -> Plot:
    rates = metrics.tokens_by_second(good)
    rates = rates[:-1] if len(rates) > 2 else rates  # the last second is incomplete
    seconds = tuple(began + second + 0.5 for second in range(len(rates)))
    line = Series(name="output tokens", x=seconds, y=tuple(rates))
    return Plot(title="Output tokens per second", x_label="s", y_label="tokens/s", series=(line,))


def _running(answers: Sequence[TimedAnswer]) -> Plot:
    levels = metrics.concurrency(answers)
    steps = Series(
        name="requests", x=tuple(at for at, _ in levels), y=tuple(float(many) for _, many in levels), style="steps"
    )
    return Plot(title="Concurrent requests", x_label="s", y_label="requests", series=(steps,))


def _timeline(answers: Sequence[TimedAnswer]) -> Plot:
    sent = [answer for answer in answers if answer.sent is not None]
    good = [answer for answer in sent if failure_of(answer) is None]
    failed = [answer for answer in sent if failure_of(answer) is not None]

    def series(name: str, of: Sequence[TimedAnswer]) -> Series:
        firsts = [one.chunks[0].at if one.chunks else one.end for one in of]
        return Series(
            name=name,
            x=tuple(float(one.index) for one in of),
            y=tuple(firsts),
            low=tuple(one.sent or 0.0 for one in of),
            high=tuple(one.end for one in of),
            labels=tuple(_label(one) for one in of),
            style="points",
        )

    found = [series("first token, from sent to the end", good)] + ([series("failed", failed)] if failed else [])
    return Plot(title="Requests over time", x_label="request", y_label="s", series=tuple(found))


def _label(answer: TimedAnswer) -> str:
    if failure_of(answer) is not None:
        return f"request {answer.index}: {metrics.error_of(answer)}"
    tokens = metrics.output_tokens(answer).count
    return f"request {answer.index}: {metrics.input_tokens(answer):,} in, {tokens:,} out"
