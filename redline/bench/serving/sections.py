"""The sections of a page of results. Each command returns them for its results; `page.py` renders them."""

from collections.abc import Iterable
from typing import Literal

from redline.messages.base import Record


class Series(Record, frozen=True):
    """Points of one plot under one name. low, high: an interval around each y. labels: shown in tooltips."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    style: Literal["line", "points", "line and points", "steps", "bars"] = "line"


class PlotMark(Record, frozen=True):
    """A labelled line across a plot (x or y alone) or a labelled point (both)."""

    text: str
    x: float | None = None
    y: float | None = None


class Plot(Record, frozen=True, tag=True):
    """Series over one pair of axes. Axis labels contain the unit. note: a remark for readers."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    marks: tuple[PlotMark, ...] = ()
    log_x: bool = False
    log_y: bool = False
    note: str = ""


class Table(Record, frozen=True, tag=True):
    """Cells as text, with rounded numbers and units in the column names. rows: one cell per column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class Words(Record, frozen=True, tag=True):
    """A paragraph, or a warning."""

    text: str
    warning: bool = False


class Heading(Record, frozen=True, tag=True):
    """The heading of a part of a page, such as one of several results; listed in the page's contents."""

    text: str


Section = Plot | Table | Words | Heading


def cell(value: float | None) -> str:
    """A number of a table, with three digits at least."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def floats(values: Iterable[float]) -> tuple[float, ...]:
    """Coordinates of a plot, such as those of a numpy array."""
    return tuple(map(float, values))
