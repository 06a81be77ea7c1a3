"""The page of an audit: violated bounds, next tokens by domain, errors by layer, and the worst weights and experts."""

import math
from collections.abc import Sequence

from redline.bench.serving.page import render
from redline.bench.serving.sections import Plot, PlotMark, Section, Series, Table, Words
from redline.quant.audit import Audit, ExpertRow, WeightRow

WORST = 20  # rows in the tables of the worst weights and experts
NAMED = 100  # violated bounds that are listed, at most


def audit_page(audit: Audit, a: str, b: str, provenance: Sequence[tuple[str, str]]) -> str:
    """The page's HTML. a, b: the names of the two checkpoints."""
    return render(f"{b} against {a}", sections(audit), subtitle=subtitle(audit), provenance=provenance)


def subtitle(audit: Audit) -> str:
    """One line on the amount of compared data."""
    tokens = audit.domains[-1].tokens if audit.domains else 0
    return (
        f"{len(audit.weights):,} weights differ, {audit.same:,} are bit-identical; "
        f"{tokens:,} next tokens compared in {audit.seconds:,.0f} s"
    )


def sections(audit: Audit) -> list[Section]:
    """All sections, violated bounds first."""
    found: list[Section] = [_verdict(audit)]
    if audit.excess:
        found.append(_excess(audit))
    if audit.domains:
        found += [_domains(audit), _kl(audit)]
    found.append(_by_layer(audit.weights, audit.bounds.weight))
    if audit.experts:
        found += [_outputs(audit.experts, audit.bounds.output), _seen(audit.experts), _worst_experts(audit.experts)]
    found.append(_worst_weights(audit.weights))
    return found


def _verdict(audit: Audit) -> Section:
    b = audit.bounds
    most = f"weight {b.weight:g}, expert output {b.output:g}, KL {b.kl:g} nats, agreement at least {b.agreement:g}"
    if audit.excess:
        return Words(text=f"{len(audit.excess):,} values exceed their bounds ({most}).", warning=True)
    return Words(text=f"All values are within their bounds: {most}.")


def _excess(audit: Audit) -> Section:
    rows = tuple((one.bound, one.of, f"{one.value:.4f}", f"{one.most:g}") for one in audit.excess[:NAMED])
    left = len(audit.excess) - len(rows)
    note = f"{left:,} more are in the JSON." if left else ""
    return Table(title="Beyond a bound", columns=("bound", "of", "is", "may be"), rows=rows, note=note)


def _domains(audit: Audit) -> Section:
    rows = tuple(
        (
            row.domain,
            f"{row.tokens:,}",
            f"{row.kl:.5f}",
            f"{row.kl_99:.4f}",
            f"{100 * row.agreement:.2f}",
            f"{row.perplexity_a:.4f}",
            f"{row.perplexity_b:.4f}",
        )
        for row in audit.domains
    )
    columns = ("domain", "tokens", "KL, nats", "KL, 99th percentile", "same likeliest, %", "perplexity A", "B")
    return Table(title="Next tokens", columns=columns, rows=rows, note="KL(A || B), mean per token.")


def _kl(audit: Audit) -> Section:
    x = tuple(float(place) for place in range(len(audit.domains)))
    series = Series(
        name="KL",
        x=x,
        y=tuple(row.kl for row in audit.domains),
        labels=tuple(row.domain for row in audit.domains),
        style="bars",
    )
    mark = PlotMark(text="bound", y=audit.bounds.kl)
    return Plot(title="KL by domain", x_label="domain", y_label="nats per token", series=(series,), marks=(mark,))


def _by_layer(rows: Sequence[WeightRow], bound: float) -> Section:
    """The root mean square and the worst error of each projection in each layer."""
    series: list[Series] = []
    for projection in sorted({row.name.split(".")[-2] for row in rows}):
        of = [row for row in rows if row.name.split(".")[-2] == projection]
        layers = sorted({row.layer for row in of})
        errors = [[row.error for row in of if row.layer == layer] for layer in layers]
        x = tuple(float(layer) for layer in layers)
        mean = tuple(math.sqrt(sum(e * e for e in errors_) / len(errors_)) for errors_ in errors)
        series.append(Series(name=projection, x=x, y=mean, style="line and points"))
        series.append(Series(name=f"{projection}, worst", x=x, y=tuple(map(max, errors)), style="points"))
    return Plot(
        title="Weight error by layer",
        x_label="layer",
        y_label="error of the weight",
        series=tuple(series),
        marks=(PlotMark(text="bound", y=bound),),
    )


def _outputs(experts: Sequence[ExpertRow], bound: float) -> Section:
    series = Series(
        name="expert",
        x=tuple(float(row.layer) for row in experts),
        y=tuple(row.output for row in experts),
        labels=tuple(f"expert {row.expert}, {row.tokens} tokens" for row in experts),
        style="points",
    )
    return Plot(
        title="Output error of each expert",
        x_label="layer",
        y_label="error of the output",
        series=(series,),
        marks=(PlotMark(text="bound", y=bound),),
        note="Both experts get the input of A's layer.",
    )


def _seen(experts: Sequence[ExpertRow]) -> Section:
    series = Series(
        name="expert",
        x=tuple(float(row.tokens) for row in experts),
        y=tuple(row.output for row in experts),
        labels=tuple(f"layer {row.layer}, expert {row.expert}" for row in experts),
        style="points",
    )
    return Plot(
        title="Output error by tokens of the expert",
        x_label="tokens of the expert (at most 512 are compared)",
        y_label="error of the output",
        series=(series,),
    )


def _worst_experts(experts: Sequence[ExpertRow]) -> Section:
    worst = sorted(experts, key=lambda row: -row.output)[:WORST]
    rows = tuple((f"{row.layer}", f"{row.expert}", f"{row.tokens:,}", f"{row.output:.4f}") for row in worst)
    return Table(title="Worst experts", columns=("layer", "expert", "tokens", "error of the output"), rows=rows)


def _worst_weights(weights: Sequence[WeightRow]) -> Section:
    worst = sorted(weights, key=lambda row: -row.error)[:WORST]
    rows = tuple(
        (row.name, f"{row.error:.4f}", "no token" if row.output is None else f"{row.output:.4f}") for row in worst
    )
    return Table(title="Worst weights", columns=("weight", "error", "error of its output"), rows=rows)
