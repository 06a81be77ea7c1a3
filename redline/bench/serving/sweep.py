"""Throughput against latency: one server at rising loads, the frontier, and the highest load within the SLO targets.

A load is a number of concurrent streams (each sends its next request as soon as the last is answered), or a rate of
requests that arrive as a Poisson process. Loads rise until throughput stops rising and latency has grown: beyond that,
every point is worse in both. With SLO targets, the limit is between the highest load that meets them and the lowest
that does not; a search bisects this gap.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from redline.bench.serving.metrics import (
    TextEncoder,
    Tokens,
    e2el,
    e2el_from_schedule,
    error_of,
    failure_of,
    input_tokens,
    keeps,
    output_tokens,
    percentile,
    tpot,
    ttft,
    ttft_from_schedule,
)
from redline.bench.serving.records import LoadRun, TimedAnswer
from redline.bench.serving.remarks import MOST_CPU, uncounted, uncounted_remarks
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, PlotMark, Section, Series, Table, Words, cell
from redline.messages.base import Record

By = Literal["streams", "requests/s"]
GAIN = 1.02  # times the best throughput so far: less than this is no gain
SLOWER = 1.5  # times the latency at the best throughput: more than this without a gain is over-saturation
FALLEN = 0.8  # times the best throughput: one point below this is enough to stop
CLOSE = 1.05  # a search ends when the lowest bad load is at most this times the highest good one
MOST_HALVINGS = 6
LOWEST = 8  # if no load meets the SLO targets, loads down to the lowest given one / LOWEST are tried


class PointRow(Record, frozen=True, array_like=True):
    """One request of a point. Times are in seconds; sent: since the start of the point; None if it failed before."""

    sent: float | None
    ttft: float | None
    e2el: float | None
    input_tokens: int
    output_tokens: int
    error: str = ""


class Point(Record, frozen=True):
    """The figures of one load. Times are in seconds, throughput in tokens/s; None: no request has the figure.

    interactivity: 1 / median TPOT, tokens/s of one user. interactivity_e2e_p90: 1 / the 90th percentile of E2EL per
    output token, as InferenceX plots it. kept: share of all requests that met every SLO target; None: no targets.
    goodput: requests/s that met them. cpu_share, lag_p99: of the load generator. uncounted: requests in which each
    event was counted as one token.
    """

    load: float
    by: By
    seconds: float
    completed: int
    failed: int
    output_throughput: float
    input_throughput: float
    request_throughput: float
    interactivity: float | None
    interactivity_e2e_p90: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    e2el_p50: float | None
    e2el_p99: float | None
    kept: float | None
    goodput: float | None
    cpu_share: float
    lag_p99: float
    rows: tuple[PointRow, ...] = ()
    uncounted: int = 0

    @property
    def name(self) -> str:
        """A name such as `8 streams` or `2.5 requests/s`."""
        return f"{self.load:g} {self.by if self.load != 1 or self.by != 'streams' else 'stream'}"


def point(load: float, by: By, run: LoadRun, slos: Mapping[str, float], counts: TextEncoder | None = None) -> Point:
    """The figures of one load. slos: milliseconds by name, as in `--goodput`. counts: counts tokens if needed.

    With a rate, TTFT and E2EL count from the scheduled time, so that a slow client does not improve the figures.
    Streams have no schedule: TTFT and E2EL count from the request's first byte.
    """
    since_first = ttft if by == "streams" else ttft_from_schedule
    since_last = e2el if by == "streams" else e2el_from_schedule
    good = [answer for answer in run.answers if failure_of(answer) is None]
    seconds = max(run.seconds, 1e-9)
    tokens = {answer.index: output_tokens(answer, counts) for answer in good}
    firsts, lasts = [*map(since_first, good)], [*map(since_last, good)]
    each = [tpot(answer, counts) for answer in good]
    whole = [last / tokens[a.index].count for a in good if (last := e2el(a)) is not None and tokens[a.index].count]
    kept = sum(keeps(answer, slos, counts) for answer in good)
    total = max(1, len(run.answers))
    return Point(
        load=load,
        by=by,
        seconds=run.seconds,
        completed=len(good),
        failed=len(run.answers) - len(good),
        output_throughput=sum(one.count for one in tokens.values()) / seconds,
        input_throughput=sum(map(input_tokens, good)) / seconds,
        request_throughput=len(good) / seconds,
        interactivity=_inverse(percentile(each, 50)),
        interactivity_e2e_p90=_inverse(percentile(whole, 90)),
        ttft_p50=percentile(firsts, 50),
        ttft_p99=percentile(firsts, 99),
        tpot_p50=percentile(each, 50),
        tpot_p99=percentile(each, 99),
        e2el_p50=percentile(lasts, 50),
        e2el_p99=percentile(lasts, 99),
        kept=kept / total if slos else None,
        goodput=kept / seconds if slos else None,
        cpu_share=run.generator.cpu_share,
        lag_p99=run.generator.lag_p99,
        rows=tuple(_row(answer, tokens) for answer in run.answers),
        uncounted=uncounted(good, counts),
    )


def _row(answer: TimedAnswer, tokens: Mapping[int, Tokens]) -> PointRow:
    many = tokens[answer.index].count if answer.index in tokens else 0

    def rounded(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds, 6)

    return PointRow(
        sent=rounded(answer.sent),
        ttft=rounded(ttft(answer)),
        e2el=rounded(e2el(answer)),
        input_tokens=input_tokens(answer),
        output_tokens=many,
        error=error_of(answer),
    )


# ------------------------------------------------------------------------------------------------------- the sweep


class SweepPlan(Record, frozen=True):
    """The sweep. loads: rising. slos: targets in ms by name. attainment: share of requests that must meet them.

    search: bisect the gap around the limit of the SLO targets. to_the_end: measure every load, saturated or not.
    """

    by: By
    loads: tuple[float, ...]
    slos: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    attainment: float = 0.99
    search: bool = False
    to_the_end: bool = False


def next_load(plan: SweepPlan, points: Sequence[Point]) -> float | None:
    """The next load to measure, given the points so far; None: the sweep is complete. Keeps no state."""
    done = {one.load for one in points}
    rising = sorted((one for one in points if one.load in plan.loads), key=lambda one: one.load)
    if plan.to_the_end or not saturated(rising):
        for load in plan.loads:
            if load not in done:
                return load
    return _halving(plan, points, done) if plan.search else None


def _halving(plan: SweepPlan, points: Sequence[Point], done: set[float]) -> float | None:
    good, bad = around_slo(points, plan.attainment)
    searched = sum(one.load not in plan.loads for one in points)
    if bad is None or searched >= MOST_HALVINGS:
        return None
    low, high = 0.0 if good is None else good.load, bad.load
    if good is None and high <= plan.loads[0] / LOWEST:
        return None
    if plan.by == "streams":
        between = float((int(low) + int(high)) // 2)
        return None if between in done or not low < between < high or high <= low * CLOSE else between
    between = float(f"{math.sqrt(low * high) if low else high / 2:.3g}")
    return None if high <= low * CLOSE or between in done else between


def saturated(points: Sequence[Point]) -> bool:
    """Whether the server is saturated: two points without a gain and with high latency, or one far below the best.

    points: with rising loads. A point without completed requests counts as far below the best.
    """
    best: Point | None = None
    in_vain = 0
    for one in points:
        if best is None or one.output_throughput > best.output_throughput * GAIN:
            best, in_vain = one, 0
            continue
        slower = one.e2el_p50 is None or (best.e2el_p50 is not None and one.e2el_p50 > best.e2el_p50 * SLOWER)
        in_vain += slower
        if slower and (one.output_throughput < best.output_throughput * FALLEN or in_vain > 1):
            return True
    return False


def sweep(
    plan: SweepPlan, points: list[Point], measure: Callable[[float], Point | None], save: Callable[[], object]
) -> bool:
    """Measures the missing points and appends them to `points`; returns False if it was stopped.

    measure: runs a load and returns its point, or None if Ctrl-C ended it. save: called after every point.
    """
    while (load := next_load(plan, points)) is not None:
        found = measure(load)
        if found is None:
            return False
        points.append(found)
        save()
    return True


# --------------------------------------------------------------------------------------------------------- report


def frontier(points: Sequence[Point]) -> list[Point]:
    """The Pareto frontier of throughput and interactivity, from the highest interactivity down."""
    best, found = -math.inf, list[Point]()
    known = [one for one in points if one.interactivity is not None]
    for one in sorted(known, key=lambda one: (-(one.interactivity or 0.0), -one.output_throughput)):
        if one.output_throughput > best:
            best = one.output_throughput
            found.append(one)
    return found


def around_slo(points: Sequence[Point], attainment: float) -> tuple[Point | None, Point | None]:
    """The highest load that meets the SLO targets, and the lowest that does not; None if there is none."""
    good: Point | None = None
    for one in sorted(points, key=lambda one: one.load):
        if one.kept is None:
            continue
        if one.kept < attainment:
            return good, one
        good = one
    return good, None


def crossing(good: Point, bad: Point, attainment: float) -> float:
    """The load at which linear interpolation between two points reaches the attainment."""
    assert good.kept is not None
    assert bad.kept is not None
    return good.load + (bad.load - good.load) * (good.kept - attainment) / (good.kept - bad.kept)


def verdict(plan: SweepPlan, points: Sequence[Point], gpus: int | None = None) -> list[str]:
    """The sweep in a few sentences: highest throughput, limit of the SLO targets, and warnings."""
    if not points:
        return ["Nothing was measured."]
    best = max(points, key=lambda one: one.output_throughput)
    each = f" ({cell(best.output_throughput / gpus)} per GPU)" if gpus else ""
    said = [f"Highest throughput: {cell(best.output_throughput)} output tokens/s{each} at {best.name}."]
    if plan.slos:
        said.append(_slo_sentence(plan, points))
    rising = sorted((one for one in points if one.load in plan.loads), key=lambda one: one.load)
    left = [load for load in plan.loads if load not in {one.load for one in points}]
    if left and saturated(rising):
        said.append(
            f"Stopped at {rising[-1].name}: latency rose without a gain in throughput. Not measured: "
            f"{', '.join(f'{load:g}' for load in left)}."
        )
    said += [words.text for words in uncounted_remarks(sum(one.uncounted for one in points))]
    if busy := [one for one in points if one.cpu_share >= MOST_CPU]:
        said.append(
            f"The load generator was the limit at {', '.join(one.name for one in busy)}: it used "
            f"{max(one.cpu_share for one in busy):.0%} of a core. These points are lower bounds."
        )
    return said


def _slo_sentence(plan: SweepPlan, points: Sequence[Point]) -> str:
    slos = ", ".join(f"{name} {bound:g} ms" for name, bound in plan.slos.items())
    of = f"{slos} for {plan.attainment:.0%} of the requests"
    good, bad = around_slo(points, plan.attainment)
    if good is None:
        worst = "" if bad is None else f": at {bad.name} {bad.kept:.1%} met them"
        return f"SLOs ({of}): no measured load meets them{worst}."
    held = (
        f"SLOs ({of}): met up to {good.name}, {cell(good.output_throughput)} output tokens/s and "
        f"{good.goodput:.3g} good requests/s"
    )
    if bad is None:
        return f"{held}; no measured load violates them."
    about = crossing(good, bad, plan.attainment)
    return f"{held}; {bad.name} violates them ({bad.kept:.1%} met them). Interpolated limit: {about:.3g}."


def points_table(plan: SweepPlan, points: Sequence[Point], gpus: int | None = None) -> Table:
    """A table of the points by load; those on the frontier are marked."""
    best = {one.load for one in frontier(points)}
    columns = ["", plan.by, "output tokens/s"]
    if gpus:
        columns.append("per GPU")
    columns += [
        "tokens/s per user",
        "e2e p90",
        "TTFT p50, ms",
        "TTFT p99, ms",
        "TPOT p50, ms",
        "TPOT p99, ms",
        "failed",
    ]
    if plan.slos:
        columns += ["kept", "good requests/s"]
    rows: list[tuple[str, ...]] = []
    for one in sorted(points, key=lambda one: one.load):
        cells = ["*" if one.load in best else "", f"{one.load:g}", cell(one.output_throughput)]
        if gpus:
            cells.append(cell(one.output_throughput / gpus))
        cells += [cell(one.interactivity), cell(one.interactivity_e2e_p90)]
        cells += [cell(ms(value)) for value in (one.ttft_p50, one.ttft_p99, one.tpot_p50, one.tpot_p99)]
        cells.append(f"{one.failed} of {one.failed + one.completed}" if one.failed else "")
        if plan.slos:
            cells += ["-" if one.kept is None else f"{one.kept:.1%}", cell(one.goodput)]
        rows.append(tuple(cells))
    since = "the request's first byte" if plan.by == "streams" else "the request's scheduled time"
    return Table(
        title="Throughput against latency",
        columns=tuple(columns),
        rows=tuple(rows),
        note=f"* on the frontier. tokens/s per user: 1 / median TPOT; e2e p90: 1 / 90th percentile of E2EL "
        f"per output token. TTFT counts from {since}.",
    )


def sweep_sections(result: BenchResult) -> list[Section]:
    """A page's sections, from the result's details: plan, points, gpus."""
    plan = msgspec.convert(result.details["plan"], SweepPlan)
    points = msgspec.convert(result.details["points"], list[Point])
    gpus: int | None = result.details.get("gpus")
    sections: list[Section] = [Words(text=text) for text in (*verdict(plan, points, gpus), *result.notes)]
    if any(one.interactivity is not None for one in points):
        sections.append(_frontier_plot(plan, points, gpus))
        sections.append(_latency_plot(plan, points))
    sections.append(points_table(plan, points, gpus))
    return sections


def _frontier_plot(plan: SweepPlan, points: Sequence[Point], gpus: int | None) -> Plot:
    def series(name: str, of: Sequence[Point], style: Literal["line and points", "points"]) -> Series:
        return Series(
            name=name,
            x=tuple(one.interactivity or 0.0 for one in of),
            y=tuple(one.output_throughput / (gpus or 1) for one in of),
            labels=tuple(one.name for one in of),
            style=style,
        )

    best = frontier(points)
    loads = {one.load for one in best}
    beaten = [one for one in points if one.load not in loads and one.interactivity is not None]
    marks: list[PlotMark] = []
    good, _ = around_slo(points, plan.attainment) if plan.slos else (None, None)
    if good is not None:
        marks.append(
            PlotMark(
                text=f"SLOs met up to {good.name}", x=good.interactivity or 0.0, y=good.output_throughput / (gpus or 1)
            )
        )
    return Plot(
        title="The frontier",
        x_label="interactivity, tokens/s per user",
        y_label="output tokens/s" + (" per GPU" if gpus else ""),
        series=(series("frontier", best, "line and points"), *([series("beaten", beaten, "points")] if beaten else [])),
        marks=tuple(marks),
        note="Up and to the right is better. A beaten point has less throughput at equal interactivity.",
    )


def _latency_plot(plan: SweepPlan, points: Sequence[Point]) -> Plot:
    known = sorted((one for one in points if one.ttft_p50 is not None), key=lambda one: one.load)

    def series(name: str, values: Sequence[float | None]) -> Series:
        return Series(
            name=name,
            x=tuple(one.load for one in known),
            y=tuple(ms(value) or 0.0 for value in values),
            style="line and points",
        )

    marks = [PlotMark(text=f"SLO {name}", y=bound) for name, bound in plan.slos.items() if name == "ttft"]
    return Plot(
        title="Time to first token by load",
        x_label=plan.by,
        y_label="TTFT, ms",
        series=(
            series("p50", [one.ttft_p50 for one in known]),
            series("p99", [one.ttft_p99 for one in known]),
        ),
        marks=tuple(marks),
        log_x=plan.by == "streams",
        log_y=True,
    )


def text_plot(plan: SweepPlan, points: Sequence[Point], width: int = 60) -> list[str]:
    """One line per load: its throughput as a bar, and its interactivity."""
    most = max((one.output_throughput for one in points), default=0.0) or 1.0
    good, _ = around_slo(points, plan.attainment) if plan.slos else (None, None)
    return [
        f"{one.load:>8g} {'█' * max(1, round(one.output_throughput / most * width)):<{width}} "
        f"{cell(one.interactivity)} tokens/s per user{'  <- SLOs' if good is one else ''}"
        for one in sorted(points, key=lambda one: one.load)
    ]


def doubling(most: int) -> list[float]:
    """1, 2, 4 ... up to `most`, which is always the last."""
    loads = [float(1 << power) for power in range(most.bit_length()) if 1 << power <= most]
    return loads if loads[-1] == most else [*loads, float(most)]


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _inverse(seconds: float | None) -> float | None:
    return 1 / seconds if seconds else None
