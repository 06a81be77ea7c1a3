"""Sections of saved results: of one result, or of several together with their comparison."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from pkgutil import resolve_name

import msgspec
import numpy as np

from redline.bench.serving import metrics
from redline.bench.serving.page import render
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Heading, Plot, Section, Series, Table, floats
from redline.bench.serving.serve_page import heading
from redline.errors import ConfigError

# Result kind -> the function that returns the sections of a result. Each command has an entry.
SECTIONS = {
    "serve": "redline.bench.serving.serve_page:serve_sections",
    "vllm": "redline.bench.serving.serve_page:serve_sections",
    "leaderboard": "redline.bench.serving.leaderboard:leaderboard_sections",
    "sweep": "redline.bench.serving.sweep:sweep_sections",
    "accept": "redline.bench.serving.accept:accept_sections",
    "agentic": "redline.bench.serving.agentic:agentic_sections",
    "compare": "redline.bench.serving.compare:compare_sections",
}
LOADS = ("serve", "vllm")  # kinds with one load, under vLLM's keys
MERGED = ("sweep", "accept")  # kinds in which the plots of all results have the same axes
CDF_POINTS = 300


def sections_of(result: BenchResult) -> list[Section]:
    """The sections of one result. Raises ConfigError if its kind is unknown or its content incomplete."""
    if result.kind not in SECTIONS:
        raise ConfigError(f"a result of kind {result.kind!r}: expected one of {', '.join(SECTIONS)}")
    make: Callable[[BenchResult], list[Section]] = resolve_name(SECTIONS[result.kind])
    try:
        return make(result)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"a result of kind {result.kind} is incomplete: {error}") from error


def page_of(results: Sequence[tuple[str, BenchResult]], title: str = "") -> str:
    """The page of results, each with the name of its file. title: default: describes the results.

    Raises the errors of `sections_of`.
    """
    if len(results) > 1:
        title = title or f"redline bench report: {len(results)} results"
        return render(title, sections_together(results))
    result = results[0][1]
    subtitle = "" if result.kind in LOADS else _where(result)  # the sections of these kinds start with it
    title = title or f"redline bench {result.kind}: {_model(result) or results[0][0]}"
    return render(title, sections_of(result), subtitle=subtitle, provenance=provenance_of(result))


def sections_together(results: Sequence[tuple[str, BenchResult]]) -> list[Section]:
    """The comparison, then the sections of each result under its name, then the provenance of each."""
    names = names_of(results)
    named = list(zip(names, (result for _, result in results), strict=True))
    parts = [(name, sections_of(result)) for name, result in named]
    kinds = {result.kind for _, result in named}
    found = _compared(named, parts, kinds)
    if found:
        found.insert(0, Heading(text="Comparison"))
    for name, sections in parts:
        found += [Heading(text=name), *sections]
    return [*found, Heading(text="Where the numbers come from"), _origins(named)]


def compared(results: Sequence[tuple[str, BenchResult]]) -> list[Section]:
    """A table and plots over all results; empty if the kinds differ or there is only one result."""
    named = list(zip(names_of(results), (result for _, result in results), strict=True))
    kinds = {result.kind for _, result in named}
    parts = [(name, sections_of(result)) for name, result in named] if kinds <= set(MERGED) else []
    return _compared(named, parts, kinds)


def names_of(results: Sequence[tuple[str, BenchResult]]) -> list[str]:
    """A unique name per result: label, model or server, whichever distinguishes all; else the file name."""
    for choices in (
        [str(result.figures.get("label") or "") for _, result in results],
        [_model(result) for _, result in results],
        [_server(result) for _, result in results],
        [_where(result) for _, result in results],
        [name for name, _ in results],
    ):
        if all(choices) and len(set(choices)) == len(choices):
            return choices
    return [f"{name} ({place})" for place, (name, _) in enumerate(results, 1)]


def provenance_of(result: BenchResult) -> list[tuple[str, str]]:
    """Names and values for a page's foot: command, server, machine, versions, commit, date."""
    found = [("command", shlex.join(result.command)), ("server", _where(result))]
    for name, value in result.provenance.items():
        text = ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, dict) else str(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        found.append((name, text))
    if result.kind == "vllm":
        found.append(("measured by", "vLLM's own client; its file contains figures only"))
    return [(name, text) for name, text in found if text]


def _compared(
    named: Sequence[tuple[str, BenchResult]], parts: Sequence[tuple[str, Sequence[Section]]], kinds: set[str]
) -> list[Section]:
    if len(named) < 2:
        return []
    if kinds <= set(LOADS):
        return [_loads(named), *_trade(named), *_distributions(named), *_rates(named)]
    return list(merged(parts)) if len(kinds) == 1 and kinds <= set(MERGED) else []


# ---------------------------------------------------------------------------------------------------- loads, by figure

COLUMNS = {
    "failed": ("failed", ",.0f"),
    "request_throughput": ("requests/s", ",.2f"),
    "output_throughput": ("output tokens/s", ",.1f"),
    "median_ttft_ms": ("TTFT median, ms", ",.1f"),
    "p99_ttft_ms": ("TTFT p99, ms", ",.1f"),
    "median_answer_ttft_ms": ("to the answer median, ms", ",.1f"),
    "median_tpot_ms": ("TPOT median, ms", ",.2f"),
    "p99_tpot_ms": ("TPOT p99, ms", ",.2f"),
    "median_itl_ms": ("ITL median, ms", ",.2f"),
    "median_e2el_ms": ("E2EL median, ms", ",.0f"),
    "request_goodput": ("good requests/s", ",.2f"),
    "spec_decode_acceptance_length": ("tokens per step", ".2f"),
}


def _loads(named: Sequence[tuple[str, BenchResult]]) -> Table:
    keys = [key for key in COLUMNS if any(_figure(result, key) is not None for _, result in named)]
    rows = [
        (name, *("" if (value := _figure(result, key)) is None else format(value, COLUMNS[key][1]) for key in keys))
        for name, result in named
    ]
    return Table(title="All of them", columns=("", *(COLUMNS[key][0] for key in keys)), rows=tuple(rows))


def _trade(named: Sequence[tuple[str, BenchResult]]) -> list[Plot]:
    """Total throughput against interactivity of one user."""
    known = [
        (name, 1000 / tpot, throughput, result)
        for name, result in named
        if (tpot := _figure(result, "median_tpot_ms")) and (throughput := _figure(result, "output_throughput"))
    ]
    if len(known) < 2:
        return []
    series = [
        Series(name=name, x=(speed,), y=(throughput,), labels=(heading(result),), style="points")
        for name, speed, throughput, result in known
    ]
    return [
        Plot(
            title="Throughput and interactivity",
            x_label="interactivity (1 / median TPOT), tokens/s per user",
            y_label="output tokens/s",
            series=tuple(series),
            note="Up and to the right is better.",
        )
    ]


def _distributions(named: Sequence[tuple[str, BenchResult]]) -> list[Plot]:
    found: list[Plot] = []
    for measure, title in (
        ("ttft", "Time to first token (TTFT)"),
        ("tpot", "Time per output token (TPOT)"),
        ("itl", "Gaps between events (ITL)"),
        ("e2el", "End to end (E2EL)"),
    ):
        series = [_cdf(name, metrics.values(result.answers, measure)) for name, result in named if result.answers]
        series = [one for one in series if one.x]
        if len(series) > 1:
            found.append(
                Plot(title=title, x_label="ms", y_label="% below", series=tuple(series), log_x=measure == "itl")
            )
    return found


def _cdf(name: str, seconds: Sequence[float]) -> Series:
    if not seconds:
        return Series(name=name, x=(), y=())
    shares = np.linspace(0, 1, max(2, min(CDF_POINTS, len(seconds))))
    return Series(name=name, x=floats(np.quantile(seconds, shares) * 1000), y=floats(shares * 100))


def _rates(named: Sequence[tuple[str, BenchResult]]) -> list[Plot]:
    series: list[Series] = []
    for name, result in named:
        good = [answer for answer in result.answers if metrics.failure_of(answer) is None]
        rates = metrics.tokens_by_second(good) if good else []
        if rates:
            seconds = tuple(second + 0.5 for second in range(len(rates)))
            series.append(Series(name=name, x=seconds, y=tuple(rates)))
    if len(series) < 2:
        return []
    label = "since the first request, s"
    return [Plot(title="Output tokens per second", x_label=label, y_label="tokens/s", series=tuple(series))]


def _figure(result: BenchResult, key: str) -> float | None:
    value = result.figures.get(key)
    return float(value) if isinstance(value, int | float) else None


# ------------------------------------------------------------------------------------------------- merged plots


def merged(parts: Sequence[tuple[str, Sequence[Section]]]) -> Iterable[Plot]:
    """Plots that all results have, matched by title and axes, with the series of all."""

    def key(plot: Plot) -> tuple[str, str, str]:
        return plot.title, plot.x_label, plot.y_label

    by_name = [(name, {key(one): one for one in sections if isinstance(one, Plot)}) for name, sections in parts]
    for wanted, first in by_name[0][1].items():
        if not all(wanted in plots for _, plots in by_name):
            continue
        series = [
            msgspec.structs.replace(one, name=name if len(plots[wanted].series) == 1 else f"{name}: {one.name}")
            for name, plots in by_name
            for one in plots[wanted].series
        ]
        marks = [
            mark if mark.x is None or mark.y is None else msgspec.structs.replace(mark, text=f"{name}: {mark.text}")
            for name, plots in by_name
            for mark in plots[wanted].marks
        ]
        yield msgspec.structs.replace(first, series=tuple(series), marks=tuple(dict.fromkeys(marks)))


# -------------------------------------------------------------------------------------------------- provenance


def _origins(named: Sequence[tuple[str, BenchResult]]) -> Table:
    origins = [dict(provenance_of(result)) for _, result in named]
    keys = list(dict.fromkeys(key for origin in origins for key in origin))
    rows = [(name, *(origin.get(key, "") for key in keys)) for (name, _), origin in zip(named, origins, strict=True)]
    return Table(title="Provenance", columns=("", *keys), rows=tuple(rows))


def _model(result: BenchResult) -> str:
    return str(result.figures.get("model_id") or result.target.get("model") or "")


def _server(result: BenchResult) -> str:
    return str(result.target.get("base_url") or "")


def _where(result: BenchResult) -> str:
    return " at ".join(part for part in (_model(result), _server(result)) if part)
