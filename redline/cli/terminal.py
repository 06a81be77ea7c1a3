"""Printing for people, with all text shown literally.

Names, paths, answers and errors come from outside. They are never interpreted as markup, and their control characters
do not reach the terminal: they could move the cursor, change colours or set the clipboard.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0, DEL and C1, but not newline and tab


class Terminal(Console):
    """A rich Console without markup and emoji codes, which shows control characters as \\x1b and the like.

    Styles are passed separately, as `style=` or in a rich Text. A table that is too wide is split into several without
    breaking a number. On a terminal, a long line (`soft_wrap`) is broken between words only: paths and URLs stay whole.
    """

    def __init__(
        self,
        *,
        file: IO[str] | None = None,
        stderr: bool = False,
        width: int | None = None,
        force_terminal: bool | None = None,
    ) -> None:
        super().__init__(
            file=file, stderr=stderr, width=width, force_terminal=force_terminal, markup=False, emoji=False
        )

    def print(self, *objects: Any, end: str = "\n", soft_wrap: bool | None = None, **how: Any) -> None:
        """Like rich's, except for tables and long lines."""
        parts = [part for one in objects for part in (self._fitting(one) if isinstance(one, Table) else [one])]
        if any(isinstance(one, Table) for one in objects):
            for part in parts:
                super().print(part, end=end, soft_wrap=soft_wrap, **how)
        elif soft_wrap and end == "\n" and self.is_terminal:
            between_words: dict[str, Any] = {"no_wrap": False, "overflow": "ignore", "crop": False}
            super().print(*parts, end=end, **between_words | how)
        else:
            super().print(*parts, end=end, soft_wrap=soft_wrap, **how)

    def _fitting(self, table: Table) -> Iterator[Table]:
        """The table, or, if it is too wide, the fewest tables with some of its columns and the first one in each."""
        for column in table.columns:
            column.no_wrap = column.no_wrap or column.justify == "right"
        first, *rest = range(len(table.columns)) if table.columns else [0]
        taken, parts = list[int](), list[list[int]]()
        for place in rest:
            if taken and self._needs(table, [first, *taken, place]) > self.width:
                parts.append(taken)
                taken = []
            taken.append(place)
        parts.append(taken)
        for number, places in enumerate(parts):
            part = _columns(table, [first, *places]) if table.columns else table
            part.title = table.title if number == 0 else None
            part.caption = table.caption if number == len(parts) - 1 else None
            yield part

    def _needs(self, table: Table, places: list[int]) -> int:
        part = _columns(table, places)
        part.title = part.caption = None  # these wrap, so they need no width
        return Measurement.get(self, self.options.update(width=1 << 16), part).minimum

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape control characters. All printed text passes through here, including cells of tables."""
        for segment in super().render(renderable, options):
            if segment.control is None and _CONTROLS.search(segment.text):
                yield Segment(visible(segment.text), segment.style)
            else:
                yield segment  # rich's own cursor movements are marked as control


def _columns(table: Table, places: list[int]) -> Table:
    """A table with some of the columns; the cells are shared, not copied."""
    part = copy.copy(table)
    part.columns = [table.columns[place] for place in places]
    return part


def visible(text: str) -> str:
    """The text with control characters, except newline and tab, spelled out as \\x1b and the like."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def one_line(text: str, most: int = 500) -> str:
    """The beginning of an external text, for a message: `most` characters, each run of white space as one space."""
    short = " ".join(text[: 4 * most].split())
    return short if len(short) <= most else f"{short[:most]}..."
