"""Wraps streamed text between words as it arrives."""

import re

from rich.cells import cell_len
from rich.console import Console

from redline.cli.terminal import visible

# A line end, blanks, a character after which a line may break (two columns wide, as in Chinese), a part of a word.
_WIDE = r"\u1100-\u115f\u2e80-\u303e\u3041-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff01-\uff60"
_PARTS = re.compile(rf"\n|[^\S\n]+|[{_WIDE}]|[^\s{_WIDE}]+")
_FENCE = re.compile(r"\s*(`{3,}(?=[^`]*$)|~{3,})")  # opens lines of code in Markdown
LINE_CHARS = 200  # characters of a line that are examined for a fence


class Flow:
    """Prints one text on a console. On a terminal, lines are broken between words, so the newest word is held back
    until it ends, or is longer than a line; lines of code, between Markdown fences, are never broken.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._style: str | None = None
        self._out: list[str] = []  # to be printed together
        self._column = 0
        self._held = ""  # the newest word, and the blanks before it if they do not fit on the line
        self._long = False  # inside a word that is longer than a line
        self._line = ""  # the beginning of the current line
        self._fence = ""  # the fence that opened the current lines of code

    def add(self, text: str, style: str | None, *, whole: bool = False) -> None:
        """Append text. style: one of rich's. whole: do not break its lines."""
        if style != self._style or whole:
            self.flush()
        self._style = style
        if whole or not self._console.is_terminal:
            self._put(text)
        else:
            for part in _PARTS.findall(text):
                self._add(part)
        self._print()

    def flush(self) -> None:
        """Print the word that is held back."""
        self._release()
        self._print()

    def end(self) -> None:
        """Print the text that is held back, and end the line."""
        self._release()
        if self._column:
            self._put("\n")
        self._print()

    def _add(self, part: str) -> None:
        if part == "\n":
            self._release()
            self._end_line()
            return
        self._line = (self._line + part)[:LINE_CHARS]
        blank, wide = part.isspace(), cell_len(part[0]) == 2
        if blank or wide:
            self._release()
            self._long = False
        if self._fence or self._long or (blank and self._column + cell_len(visible(part)) < self._console.width):
            self._put(part)
        else:  # also for blanks that leave no room for a following word: a line end may follow
            self._held += part
            if wide or cell_len(self._held) > self._console.width:
                self._long = not wide
                self._release()

    def _release(self) -> None:
        held, self._held = self._held, ""
        if held and self._column and self._column + cell_len(visible(held)) > self._console.width:
            held = held.strip()
            if held:
                self._put("\n")
        self._put(held)

    def _end_line(self) -> None:
        line, self._line, self._long = self._line, "", False
        if self._fence:
            if line.strip().startswith(self._fence) and not line.strip().strip(self._fence[0]):
                self._fence = ""
        elif (found := _FENCE.match(line)) is not None:
            self._fence = found[1]
        self._put("\n")

    def _put(self, text: str) -> None:
        self._out.append(text)
        _, ended, last = text.rpartition("\n")
        self._column = (0 if ended else self._column) + cell_len(visible(last))

    def _print(self) -> None:
        if text := "".join(self._out):
            self._console.print(text, end="", style=self._style, highlight=False, soft_wrap=True)
        self._out.clear()
