"""Printing for people, where text is only ever shown as text.

Names, paths, answers and errors are others' words. None of them is markup here, and none of their control characters
reaches the terminal, where it could move the cursor, recolour what follows or set the clipboard.
"""

import re
from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0, DEL and C1, but not newline and tab


class Terminal(Console):
    """A rich Console without markup and emoji codes, which shows control characters as \\x1b and the like.

    Styles go beside the text, as `style=` or as a rich Text.
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

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything that is printed passes here, cells of tables too."""
        for segment in super().render(renderable, options):
            if segment.control is None and _CONTROLS.search(segment.text):
                yield Segment(visible(segment.text), segment.style)
            else:
                yield segment  # rich's own cursor movements are marked as control


def visible(text: str) -> str:
    """The text with control characters, except newline and tab, spelled out as \\x1b and the like."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def one_line(text: str, most: int = 500) -> str:
    """The beginning of a text by others, for a message: `most` characters, every run of white space as one space."""
    short = " ".join(text[: 4 * most].split())
    return short if len(short) <= most else f"{short[:most]}..."
