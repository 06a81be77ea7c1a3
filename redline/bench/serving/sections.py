"""What a page of results is made of. Each verb says its results in these; `page.py` draws them."""

from typing import Literal

from redline.wire.base import Record


class Series(Record, frozen=True):
    """Points of one plot under one name. low, high: an interval around each y. labels: said where one points."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    style: Literal["line", "points", "line and points", "steps", "bars"] = "line"


class Mark(Record, frozen=True):
    """A line across a plot (x or y alone) or a spot (both), with a few words."""

    text: str
    x: float | None = None
    y: float | None = None


class Plot(Record, frozen=True, tag=True):
    """Series over one pair of axes. Labels of axes carry their unit. note: what a reader has to know to read it."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    log_x: bool = False
    log_y: bool = False
    note: str = ""


class Table(Record, frozen=True, tag=True):
    """Cells as text, numbers already rounded and with units in the columns' names. rows: as long as columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class Words(Record, frozen=True, tag=True):
    """A paragraph, or a warning that a reader must not miss."""

    text: str
    warning: bool = False


class Heading(Record, frozen=True, tag=True):
    """Where a part of a page begins, such as one of several results; the page's contents name it."""

    text: str


Section = Plot | Table | Words | Heading
