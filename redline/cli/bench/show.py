"""Prints the sections of a result in a terminal: tables and text. Plots appear on the HTML page only."""

import re
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from redline.bench.serving.sections import Section, Table, Words
from redline.cli.console import say

_NUMBER = re.compile(r"[-+]?[0-9][0-9.,]*( ?(%|ms|s))?|")


def show(sections: Sequence[Section], console: Console) -> None:
    """Prints tables and text in order; warnings are highlighted."""
    for place, section in enumerate(sections):
        if isinstance(section, Table) or (place and isinstance(sections[place - 1], Table)):
            console.print()
        if isinstance(section, Table):
            console.print(_table(section))
        elif isinstance(section, Words):
            say(console, f"{'! ' if section.warning else ''}{section.text}", "yellow" if section.warning else "")


def _table(table: Table) -> RichTable:
    drawn = RichTable(
        title=table.title,
        title_justify="left",
        title_style="bold",
        caption=table.note or None,
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_header=any(table.columns),
        pad_edge=False,
        show_edge=False,
    )
    for place, name in enumerate(table.columns):
        numbers = place > 0 and all(_NUMBER.fullmatch(row[place]) for row in table.rows)
        drawn.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*row)
    return drawn
