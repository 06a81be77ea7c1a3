"""Printing for people, where text is only ever shown as text.

Names, paths, answers and errors are others' words. None of them is markup here, and none of their control characters
reaches the terminal, where it could move the cursor, recolour what follows or set the clipboard.
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

    Styles go beside the text, as `style=` or as a rich Text. A table that is too wide becomes several, and no number is
    broken. On a terminal a long line (`soft_wrap`) is broken between words alone: paths and addresses stay whole.
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
        """As rich's, but for tables and long lines."""
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
        """The table, or tables of some of its columns, the first one in each: as few as this width takes."""
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
        part.title = part.caption = None  # which wrap
        return Measurement.get(self, self.options.update(width=1 << 16), part).minimum

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything that is printed passes here, cells of tables too."""
        for segment in super().render(renderable, options):
            if segment.control is None and _CONTROLS.search(segment.text):
                yield Segment(visible(segment.text), segment.style)
            else:
                yield segment  # rich's own cursor movements are marked as control


def _columns(table: Table, places: list[int]) -> Table:
    """A table of some of the columns, whose cells are not copied."""
    part = copy.copy(table)
    part.columns = [table.columns[place] for place in places]
    return part


def visible(text: str) -> str:
    """The text with control characters, except newline and tab, spelled out as \\x1b and the like."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def one_line(text: str, most: int = 500) -> str:
    """The beginning of a text by others, for a message: `most` characters, every run of white space as one space."""
    short = " ".join(text[: 4 * most].split())
    return short if len(short) <= most else f"{short[:most]}..."
