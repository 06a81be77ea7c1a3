"""Results of mining and evaluation, as terminal tables and plots. Plots need matplotlib (the `draft` extra)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from redline.draft.extra import install
from redline.draft.mine.buckets import DIMENSIONS, DifficultyBucket

_COLOURS: dict[str, str] = dict(zip(DIMENSIONS, ("#1f4e79", "#5b8c5a", "#9db7d1", "#c97b3d", "#8d6a9f"), strict=True))
_LINES = ("#1f4e79", "#c97b3d", "#5b8c5a", "#8d6a9f", "#b03a48", "#6b6b6b", "#2a9d8f", "#d4a017")


def bucket_table(found: Sequence[DifficultyBucket], rows: int) -> Table:
    """The `rows` buckets with the highest cost, as a terminal table."""
    table = narrow(
        "where acceptance length is lost", "cost: share x (ceiling - length), tokens lost by the average round"
    )
    for name in ("bucket", ""):
        table.add_column(name, no_wrap=True)
    for name in ("positions", "share", "accepted", "gap", "length", "ceiling", "cost"):
        table.add_column(name, justify="right")
    for bucket in found[:rows]:
        table.add_row(
            bucket.dimension,
            bucket.name,
            f"{bucket.positions:,}",
            f"{bucket.share:.1%}",
            f"{bucket.acceptance:.1%}",
            f"{bucket.gap:.1%}",
            f"{bucket.length:.2f}",
            f"{bucket.longest:.2f}",
            f"{bucket.cost:.3f}",
        )
    return table


def narrow(title: str, caption: str) -> Table:
    """An empty table that fits into a terminal of 80 columns."""
    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def bucket_plot(path: Path, found: Sequence[DifficultyBucket], rows: int = 24) -> None:
    """Writes a bar plot of the cost of the first `rows` buckets to `path`.

    Raises ModuleNotFoundError if matplotlib is not installed, and OSError if the file cannot be written.
    """
    pyplot = _pyplot()
    shown = list(reversed(found[:rows]))
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.27 * max(4, len(shown))), layout="constrained")
    axes.barh(
        [f"{bucket.dimension}: {bucket.name}" for bucket in shown],
        [bucket.cost for bucket in shown],
        color=[_COLOURS[bucket.dimension] for bucket in shown],
    )
    for place, bucket in enumerate(shown):
        axes.text(bucket.cost, place, f" {bucket.acceptance:.0%}, gap {bucket.gap:.0%}", va="center", fontsize=7)
    axes.margins(x=0.2)
    axes.set(xlabel="acceptance length lost x share of positions, tokens per round")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def length_plot(path: Path, lengths: Mapping[str, Mapping[int, tuple[float, float, float]]], title: str) -> None:
    """Writes a plot of acceptance length over k to `path`: a line for each domain, with its 95 % interval.

    lengths: {domain: {k: (mean, low, high)}}, in tokens per round. Raises as `bucket_plot` does.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for place, (domain, by_k) in enumerate(sorted(lengths.items())):
        ks, colour = sorted(by_k), _LINES[place % len(_LINES)]
        axes.plot(ks, [by_k[k][0] for k in ks], label=domain, color=colour, marker="o", markersize=3)
        axes.fill_between(ks, [by_k[k][1] for k in ks], [by_k[k][2] for k in ks], alpha=0.15, color=colour)
    axes.set(xlabel="drafts per round, k", ylabel="tokens per round", title=title)
    axes.set_xticks(sorted({k for by_k in lengths.values() for k in by_k}))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def tell_skipped(skipped: Sequence[str], console: Console, most: int = 5) -> None:
    """Prints the first `most` messages about lines that were not examples, and the total if there are more."""
    for line in skipped[:most]:
        console.print(f"skipped: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if len(skipped) > most:
        console.print(f"skipped {len(skipped):,} lines in all", style="yellow")


def drawn(path: Path, console: Console, plot: Any, *arguments: Any) -> None:
    """Calls plot(path, *arguments), and prints the path of the plot, or why there is none.

    Does not raise if matplotlib is missing or the disk is full: a plot is not worth losing the results.
    """
    try:
        plot(path, *arguments)
    except ModuleNotFoundError as error:
        said = f"no {path.name}: {error.name} is not installed: {install()}"
    except OSError as error:
        said = f"no {path.name}: cannot be written ({error.strerror or error})"
    else:
        said = f"written to {path}"
    console.print(said, style="dim", markup=False, highlight=False, soft_wrap=True)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
