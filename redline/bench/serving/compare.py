"""Compares two servers with small alternating loads: which is faster, by how much, with a confidence interval.

A shared machine or network drifts: the second run may find it warmer or busier. The servers are therefore measured in
blocks of four small loads, A B B A or B A A B as drawn from the seed, each while the other server is idle. Within a
block, a steady drift adds equally to both. Both get the same requests: the first two loads of a block share theirs, and
so do the last two. A block gives one ratio B/A per figure, and the ratios of all blocks give the interval.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from redline.bench.serving.intervals import LEAST, Interval, interval
from redline.bench.serving.metrics import (
    TextEncoder,
    answer_ttft,
    e2el,
    error_of,
    failure_of,
    itls,
    output_tokens,
    percentile,
    texts,
    tpot,
    ttft,
)
from redline.bench.serving.records import GeneratorLoad, LoadRequest, LoadRun, TimedAnswer
from redline.bench.serving.remarks import generator_remark, uncounted, uncounted_remarks
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, PlotMark, Section, Series, Table, Words
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.messages.base import Record

Side = Literal["A", "B"]
COUNTS_APART = 0.01  # relative difference in output tokens above which the report contains a warning
EVENTS_APART = 0.05  # relative difference in tokens per event above which ITL is not comparable
SHOWN = 60  # characters shown around the first difference of two answers


class ComparedFigure(Record, frozen=True):
    """One compared figure. scale: from its unit in seconds to the displayed one. more: a higher value is faster."""

    words: str
    more: bool = False
    scale: float = 1000.0


FIGURES: dict[str, ComparedFigure] = {
    "output_throughput": ComparedFigure(words="output tokens/s", more=True, scale=1.0),
    "ttft": ComparedFigure(words="TTFT, ms"),
    "answer_ttft": ComparedFigure(words="TTFT of the answer, ms"),
    "tpot": ComparedFigure(words="TPOT, ms"),
    "itl_p50": ComparedFigure(words="ITL p50, ms"),
    "itl_p99": ComparedFigure(words="ITL p99, ms"),
    "e2el": ComparedFigure(words="E2EL, ms"),
}


class LoadFigures(Record, frozen=True):
    """One small load of a block. figures: by a name of FIGURES, in seconds or tokens/s; only those that exist.

    events: stream events with text. uncounted: answers in which each event was counted as one token.
    """

    side: Side
    figures: dict[str, float]
    completed: int
    failed: int
    output_tokens: int
    events: int
    uncounted: int = 0


class Same(Record, frozen=True):
    """Whether the answers agree. pairs: requests answered by both servers; equal: pairs with the same text.

    equal_counts: pairs with the same number of output tokens. first: a description of the first pair that differs.
    """

    pairs: int = 0
    equal: int = 0
    equal_counts: int = 0
    first: str = ""


class ComparePlan(Record, frozen=True):
    """The length of the measurement. blocks: minimum number of blocks. until: stop once half the width of the interval
    of `figure` is at most this share of it; None: stop after `blocks`. most: maximum number of blocks. scheduled:
    requests have a rate, so latencies count from the planned time, and a slow server cannot hide the wait.
    """

    blocks: int
    until: float | None = None
    most: int = 40
    figure: str = "output_throughput"
    seed: int = 0
    scheduled: bool = False


class Compared(Record, frozen=True):
    """Completed blocks, each of four loads in the order of their runs. stopped: Ctrl-C interrupted the next block.

    generator: the worst values of all loads; lag_p50: their median. None: no load was completed.
    """

    blocks: tuple[tuple[LoadFigures, ...], ...]
    same: Same
    stopped: bool
    answers: tuple[TimedAnswer, ...]
    generator: GeneratorLoad | None


Put = Callable[[Side, Sequence[LoadRequest]], LoadRun]


def compare(
    plan: ComparePlan,
    put: Put,
    asks: Callable[[int], Sequence[LoadRequest]],
    tell: Callable[[int], None],
    counts: TextEncoder | None = None,
) -> Compared:
    """Measures block by block. put: runs a load on one server. asks: the requests of a pair of loads, by its number.

    tell: called after every block with the number of blocks. counts: counts tokens if a server does not report them.
    """
    draw = random.Random(plan.seed)
    blocks: list[tuple[LoadFigures, ...]] = []
    answers: list[TimedAnswer] = []
    same = Same()
    generators: list[GeneratorLoad] = []
    stopped = False
    while not stopped and not enough(plan, blocks):
        found = _block(plan, put, asks, draw, len(blocks), same, counts)
        stopped = found is None
        if found is not None:
            blocks.append(found.loads)
            same = found.same
            answers += [msgspec.structs.replace(one, index=len(answers) + at) for at, one in enumerate(found.answers)]
            generators += found.generators
            tell(len(blocks))
    return Compared(
        blocks=tuple(blocks), same=same, stopped=stopped, answers=tuple(answers), generator=_worst(generators)
    )


class _Block(NamedTuple):
    loads: tuple[LoadFigures, ...]
    same: Same
    answers: list[TimedAnswer]
    generators: list[GeneratorLoad]


def _block(
    plan: ComparePlan,
    put: Put,
    asks: Callable[[int], Sequence[LoadRequest]],
    draw: random.Random,
    before: int,
    same: Same,
    counts: TextEncoder | None,
) -> _Block | None:
    """Measures the next block; None if it was stopped. before: completed blocks. same: agreement of answers so far."""
    loads: list[LoadFigures] = []
    answers: list[TimedAnswer] = []
    generators: list[GeneratorLoad] = []
    for half, order in enumerate(_orders(draw)):
        requests = asks(2 * before + half)
        runs: dict[Side, LoadRun] = {}
        for side in order:
            run = put(side, requests)
            if run.stopped:
                return None
            runs[side] = run
            generators.append(run.generator)
            loads.append(measured(side, run, counts, scheduled=plan.scheduled))
            answers += _named(run.answers, f"{side} block {before + 1} load {len(loads)}")
        same = also(same, runs["A"].answers, runs["B"].answers, counts)
    return _Block(tuple(loads), same, answers, generators)


def _worst(generators: Sequence[GeneratorLoad]) -> GeneratorLoad | None:
    if not generators:
        return None
    return GeneratorLoad(
        cpu_share=max(one.cpu_share for one in generators),
        lag_p50=float(np.median([one.lag_p50 for one in generators])),
        lag_p99=max(one.lag_p99 for one in generators),
        lag_most=max(one.lag_most for one in generators),
        late_sends=sum(one.late_sends for one in generators),
    )


def enough(plan: ComparePlan, blocks: Sequence[Sequence[LoadFigures]]) -> bool:
    """Whether no further block is needed, or allowed. Depends on the width of the interval, not on which side leads."""
    if len(blocks) < plan.blocks or plan.until is None:
        return len(blocks) >= plan.blocks
    return len(blocks) >= plan.most or narrow(plan, blocks)


def narrow(plan: ComparePlan, blocks: Sequence[Sequence[LoadFigures]]) -> bool:
    """Whether the interval of the plan's figure is within `until`."""
    found = interval(log_ratios(blocks, plan.figure), plan.seed)
    return found is not None and math.expm1((found.high - found.low) / 2) <= (plan.until or 0.0)


def _orders(draw: random.Random) -> tuple[tuple[Side, Side], tuple[Side, Side]]:
    forth: tuple[Side, Side] = ("A", "B")
    back: tuple[Side, Side] = ("B", "A")
    return (forth, back) if draw.random() < 0.5 else (back, forth)


def measured(side: Side, run: LoadRun, counts: TextEncoder | None = None, *, scheduled: bool = False) -> LoadFigures:
    """The figures of one load: throughput, medians over requests, percentiles over all inter-token latencies.

    scheduled: latencies count from when requests were planned, not from when they were sent.
    """
    good = [answer for answer in run.answers if failure_of(answer) is None]
    tokens = sum(output_tokens(answer, counts).count for answer in good)
    gaps = [gap for answer in good for gap in itls(answer)]
    late = [max(0.0, one.sent - one.planned) if scheduled and one.sent is not None else 0.0 for one in good]

    def since(measure: Callable[[TimedAnswer], float | None]) -> float | None:
        values = zip(map(measure, good), late, strict=True)
        return percentile((None if value is None else value + wait for value, wait in values), 50)

    found = {
        "output_throughput": tokens / max(run.seconds, 1e-9),
        "ttft": since(ttft),
        "answer_ttft": since(answer_ttft),
        "tpot": percentile((tpot(answer, counts) for answer in good), 50),
        "itl_p50": percentile(gaps, 50),
        "itl_p99": percentile(gaps, 99),
        "e2el": since(e2el),
    }
    return LoadFigures(
        side=side,
        figures={name: value for name, value in found.items() if value},
        completed=len(good),
        failed=len(run.answers) - len(good),
        output_tokens=tokens,
        events=sum(len(answer.chunks) for answer in good),
        uncounted=uncounted(good, counts),
    )


def _named(answers: Sequence[TimedAnswer], name: str) -> list[TimedAnswer]:
    return [msgspec.structs.replace(one, ask=msgspec.structs.replace(one.ask, name=name)) for one in answers]


def also(same: Same, a: Sequence[TimedAnswer], b: Sequence[TimedAnswer], counts: TextEncoder | None = None) -> Same:
    """`same` plus the answers of two loads with the same requests, in the order of the requests."""
    pairs, equal, as_many, first = same.pairs, same.equal, same.equal_counts, same.first
    for one, other in zip(a, b, strict=True):
        if failure_of(one) is not None or failure_of(other) is not None:
            continue
        pairs += 1
        as_many += output_tokens(one, counts).count == output_tokens(other, counts).count
        if texts(one) == texts(other):
            equal += 1
        elif not first:
            first = _difference(pairs, "\n".join(texts(one)), "\n".join(texts(other)))
    return Same(pairs=pairs, equal=equal, equal_counts=as_many, first=first)


def _difference(pair: int, a: str, b: str) -> str:
    place = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, place - SHOWN // 2)
    parts = (text[start : start + SHOWN] for text in (a, b))
    said = [f"{name} has {part!r}" if part else f"{name} has ended" for name, part in zip("AB", parts, strict=True)]
    return f"pair {pair} differs from character {place + 1}: {', '.join(said)}"


# --------------------------------------------------------------------------------------------------- figures


def log_ratios(blocks: Sequence[Sequence[LoadFigures]], name: str) -> list[float]:
    """log(B/A) of a figure per block; blocks in which a side lacks the figure are skipped."""
    found: list[float] = []
    for block in blocks:
        logs = {
            side: [math.log(one.figures[name]) for one in block if one.side == side and name in one.figures]
            for side in ("A", "B")
        }
        if len(logs["A"]) == len(logs["B"]) == 2:
            found.append(sum(logs["B"]) / 2 - sum(logs["A"]) / 2)
    return found


class FigureOutcome(Record, frozen=True):
    """One figure of both servers in seconds or tokens/s (medians over loads), the ratio B/A, and the verdict."""

    name: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    blocks: int
    verdict: str


def outcomes(blocks: Sequence[Sequence[LoadFigures]], seed: int = 0) -> list[FigureOutcome]:
    """Every figure that both sides have in at least one block, in the order of FIGURES."""
    found: list[FigureOutcome] = []
    a_event, b_event = (tokens_per_event(blocks, side) for side in ("A", "B"))
    unlike = a_event is not None and b_event is not None and abs(math.log(b_event / a_event)) > EVENTS_APART
    for name, figure in FIGURES.items():
        logs = log_ratios(blocks, name)
        if not logs:
            continue
        loads = [one for block in blocks for one in block if name in one.figures]
        a, b = ([one.figures[name] for one in loads if one.side == side] for side in ("A", "B"))
        sure = interval(logs, seed)
        found.append(
            FigureOutcome(
                name=name,
                a=float(np.median(a)),
                b=float(np.median(b)),
                ratio=math.exp(sum(logs) / len(logs)),
                low=None if sure is None else math.exp(sure.low),
                high=None if sure is None else math.exp(sure.high),
                blocks=len(logs),
                verdict=f"not comparable: A sends {a_event:.2f} tokens per event, B {b_event:.2f}; see TPOT"
                if unlike and name.startswith("itl")
                else verdict(figure, sure, len(logs)),
            )
        )
    return found


def tokens_per_event(blocks: Sequence[Sequence[LoadFigures]], side: Side) -> float | None:
    """Mean tokens per event in a side's streams; None if it received none."""
    loads = [one for block in blocks for one in block if one.side == side]
    events, tokens = sum(one.events for one in loads), sum(one.output_tokens for one in loads)
    return tokens / events if events and tokens else None


def verdict(figure: ComparedFigure, sure: Interval | None, blocks: int) -> str:
    """Which server is faster in a figure, by how much, and the interval. sure: the interval of log(B/A)."""
    if sure is None:
        return f"too few blocks ({blocks}, at least {LEAST} are needed)"
    if sure.low <= 0 <= sure.high:
        most = max(math.expm1(sure.high), -math.expm1(sure.low))
        return f"no significant difference (±{most:.1%})"
    ahead = "B" if (sure.mean > 0) == figure.more else "A"
    # As a share of the slower server's value: more throughput, or less time.
    sign = 1.0 if ahead == "B" else -1.0
    shares = [abs(math.expm1(sign * value)) for value in (sure.mean, sure.low, sure.high)]
    low, high = sorted(shares[1:])
    return f"{ahead} is faster by {shares[0]:.1%} ({low:.1%} to {high:.1%}, 95 %)"


def figures_of(blocks: Sequence[Sequence[LoadFigures]], same: Same, seed: int) -> dict[str, Any]:
    """The comparison as flat keys: `ttft_ratio` with `_low` and `_high`, `ttft_a` and `ttft_b` in s or tokens/s."""
    found: dict[str, Any] = {"blocks": len(blocks)}
    for one in outcomes(blocks, seed):
        found |= {
            f"{one.name}_a": one.a,
            f"{one.name}_b": one.b,
            f"{one.name}_ratio": one.ratio,
            f"{one.name}_ratio_low": one.low,
            f"{one.name}_ratio_high": one.high,
        }
    for side in ("A", "B"):
        loads = [one for block in blocks for one in block if one.side == side]
        found[f"completed_{side.lower()}"] = sum(one.completed for one in loads)
        found[f"failed_{side.lower()}"] = sum(one.failed for one in loads)
        found[f"output_tokens_{side.lower()}"] = sum(one.output_tokens for one in loads)
    found |= {"answer_pairs": same.pairs, "equal_answers": same.equal, "equal_token_counts": same.equal_counts}
    return found


# --------------------------------------------------------------------------------------------------------- report


def compare_sections(result: BenchResult) -> list[Section]:
    """Tables, warnings and plots of a comparison, from its details: plan, blocks, same, servers."""
    plan = msgspec.convert(result.details["plan"], ComparePlan)
    blocks = msgspec.convert(result.details["blocks"], list[list[LoadFigures]])
    same = msgspec.convert(result.details["same"], Same)
    greedy = bool(result.details.get("greedy"))
    servers: dict[str, str] = result.details["servers"]
    found: list[Section] = [Words(text=f"{side}: {servers[side]}") for side in ("A", "B")]
    if not blocks:
        return [*found, Words(text="No block was completed: there is nothing to compare.", warning=True)]
    rows = outcomes(blocks, plan.seed)
    found.append(_table(rows, blocks, plan))
    found += _warnings(result, blocks, same, greedy)
    if len(blocks) > 1:
        found += [_plot(rows), _over_time(blocks, plan.figure)]
    return found


def _table(rows: Sequence[FigureOutcome], blocks: Sequence[Sequence[LoadFigures]], plan: ComparePlan) -> Table:
    cells: list[tuple[str, ...]] = []
    for one in rows:
        figure = FIGURES[one.name]
        sure = "" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
        shown = (f"{value * figure.scale:,.4g}" for value in (one.a, one.b))
        cells.append((figure.words, *shown, f"{one.ratio:.3f}", sure, one.verdict))
    wanted = ""
    if plan.until is not None:
        reached = narrow(plan, blocks)
        wanted = f" --until ±{plan.until:.1%} of {FIGURES[plan.figure].words}: {'' if reached else 'not '}reached."
    note = (
        f"{len(blocks)} blocks of four loads. A and B are medians over loads, B/A is the mean over blocks with its 95 "
        "% interval. Faster by: more tokens/s, or less time. The intervals are not corrected for multiple "
        "comparisons: of twenty figures without a difference, on average one shows one."
    )
    columns = ("", "A", "B", "B/A", "95 %", "verdict")
    return Table(title="A against B", columns=columns, rows=tuple(cells), note=note + wanted)


def _warnings(result: BenchResult, blocks: Sequence[Sequence[LoadFigures]], same: Same, greedy: bool) -> list[Words]:
    found = [Words(text=note) for note in result.notes]
    if result.stopped:
        found.append(Words(text="Stopped: the unfinished block is not counted.", warning=True))
    figures = figures_of(blocks, same, 0)
    failed = [(side, figures[f"failed_{side.lower()}"]) for side in "AB"]
    if any(many for _, many in failed):
        said = ", ".join(f"{many:,} of {side}" for side, many in failed if many)
        first = next((error_of(one) for one in result.answers if failure_of(one) is not None), "")
        text = f"Requests failed ({said}), so the two servers did not answer the same load: {first}"
        found.append(Words(text=text, warning=True))
    if result.generator is not None:
        found.append(generator_remark(result.generator, result.answers))
    for side in ("A", "B"):
        unsure = sum(one.uncounted for block in blocks for one in block if one.side == side)
        found += uncounted_remarks(unsure, f" of {side}")
    a, b = figures["output_tokens_a"], figures["output_tokens_b"]
    apart = abs(math.log(b / a)) if a and b else 0.0
    counts = (
        f"{same.equal_counts:,} of {same.pairs:,} answers have the same number of tokens on both; B/A of all tokens: "
    )
    counts += f"{b / a:.3f}." if a else "unknown."
    if apart > COUNTS_APART:
        shorter = "B" if b < a else "A"
        counts += f" Answers of {shorter} are shorter, which favours it in E2EL: see TPOT, or use --ignore-eos."
    found.append(Words(text=counts, warning=apart > COUNTS_APART))
    if same.pairs:
        text = f"{same.equal:,} of {same.pairs:,} answers have the same text." + (
            f" {same.first}" if same.first else ""
        )
        sampled = "" if greedy else " They were sampled (--temperature), so they may differ."
        found.append(Words(text=text + sampled, warning=greedy and same.equal < same.pairs))
    return found


def _plot(rows: Sequence[FigureOutcome]) -> Plot:
    known = [(at, one) for at, one in enumerate(rows, 1) if one.low is not None and one.high is not None]
    return Plot(
        title="B/A, with 95 % intervals",
        x_label="figure, in the table's order",
        y_label="B/A",
        series=(
            Series(
                name="B/A",
                x=tuple(float(at) for at, _ in known),
                y=tuple(one.ratio for _, one in known),
                low=tuple(one.low or 0.0 for _, one in known),
                high=tuple(one.high or 0.0 for _, one in known),
                labels=tuple(FIGURES[one.name].words.partition(",")[0] for _, one in known),
                style="points",
            ),
        ),
        marks=(PlotMark(text="no difference", y=1.0),),
        note="For output tokens/s higher is faster, for all others lower.",
    )


def _over_time(blocks: Sequence[Sequence[LoadFigures]], name: str) -> Plot:
    loads = [one for block in blocks for one in block]

    def series(side: Side) -> Series:
        mine = [
            (float(at), one.figures[name])
            for at, one in enumerate(loads, 1)
            if one.side == side and name in one.figures
        ]
        x, y = (tuple(one[place] for one in mine) for place in (0, 1))
        return Series(name=side, x=x, y=tuple(value * FIGURES[name].scale for value in y), style="points")

    return Plot(
        title=f"{FIGURES[name].words.partition(',')[0]}, load by load",
        x_label="load, in the order of the runs",
        y_label=FIGURES[name].words,
        series=(series("A"), series("B")),
        note="Drift affects both sides equally; the blocks cancel it.",
    )


def describe(target: ServerTarget, pace: LoadPace) -> str:
    """A server and its load, in one line."""
    streams = "1 stream" if pace.max_concurrency == 1 else f"{pace.max_concurrency} streams"
    load = f"{pace.rate:g} requests/s" if math.isfinite(pace.rate) else streams
    return f"{target.model or 'its model'} at {target.base_url} ({target.backend}), {load}"
