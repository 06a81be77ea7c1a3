"""Formats the figures of simulated fleets as table cells and as sections of a page."""

from collections.abc import Callable, Sequence

from redline.bench.serving.sections import Plot, Section, Series, Table, Words
from redline.simulate.figures import Change, Figures, FleetInterval

COLUMNS = (
    "roles",
    "requests",
    "good/s",
    "good",
    "TTFT p50, s",
    "p99",
    "ITL p50, ms",
    "p99",
    "cached",
    "computed apart",
    "in use",
    "cost",
    "cost of 1,000 good",
    "cost of 1M tokens",
)  # fmt: skip


def cells(each: Figures) -> tuple[str, ...]:
    """The cells of a run, in the order of COLUMNS."""

    def number(value: float | None, form: str) -> str:
        return "never" if value is None else format(value, form)

    return (
        each.name,
        f"{each.requests:,}",
        f"{each.goodput:,.2f}",
        f"{each.attainment:.1%}",
        number(each.ttft_s_p50, ",.2f"),
        number(each.ttft_s_p99, ",.2f"),
        number(each.itl_ms_p50, ",.1f"),
        number(each.itl_ms_p99, ",.1f"),
        f"{each.cached_tokens / max(1, each.prompt_tokens):.0%}",
        f"{each.remote:.0%}",
        f"{each.use:.0%}",
        f"{each.cost:,.1f}",
        number(each.cost_of_1000_good, ",.3f"),
        number(each.cost_of_a_million_tokens, ",.3f"),
    )


def roles_of(each: FleetInterval | Change) -> str:
    """The number of prefill and decode workers, or of workers with both roles."""
    return f"{each.both} both" if each.both else f"{each.prefill} : {each.decode}"


def _over_time(name: str, run: Figures, value: Callable[[FleetInterval], float]) -> Series:
    """A figure of a run over time."""
    pieces = run.over_time
    return Series(name=name, x=tuple(one.at_s for one in pieces), y=tuple(map(value, pieces)), style="steps")


def sections(runs: Sequence[Figures], priced: bool) -> list[Section]:
    """A page's sections. priced: costs are in money; else in GPU-hours."""
    names = COLUMNS if priced else tuple(name.replace("cost", "GPU-h") for name in COLUMNS)
    found: list[Section] = [
        Words(
            text="A simulation: routing and roles are chosen by the server's own code, step times come from a model, "
            "and nothing was measured here."
        ),
        Table(title="All of them", columns=names, rows=tuple(map(cells, runs))),
        Plot(
            title="Requests, and those within their SLO targets",
            x_label="time of the trace, s",
            y_label="a second",
            series=(
                _over_time("came", runs[0], lambda one: one.requests_s),
                *(_over_time(f"good, {each.name}", each, lambda one: one.good_s) for each in runs),
            ),
            note="A request is counted at its arrival.",
        ),
        Plot(
            title="Prefill workers",
            x_label="time of the trace, s",
            y_label="% of all workers",
            series=tuple(
                _over_time(each.name, each, lambda one, all_=each.workers: 100 * one.prefill / all_) for each in runs
            ),
            note="0: every worker runs prefill and decode.",
        ),
        Plot(
            title="Running workers",
            x_label="time of the trace, s",
            y_label="workers",
            series=tuple(_over_time(each.name, each, lambda one: one.running) for each in runs),
            note="Mean of each interval. A worker that is starting or draining counts as running, and is paid for.",
        ),
    ]
    for each in runs:
        if len(each.changes) > 1:
            rows = tuple((f"{one.at_s:,.0f}", roles_of(one), f"{one.running}", one.why) for one in each.changes[1:])
            columns = "at, s", "prompts : answers", "run", "why"
            found.append(Table(title=f"Changes of {each.name}", columns=columns, rows=rows))
    return found
