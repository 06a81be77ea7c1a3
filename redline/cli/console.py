"""How the verbs that work for long print, save their results and end after Ctrl-C."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from redline.cli.terminal import Terminal
from redline.disk import save
from redline.errors import ConfigError

INTERRUPTED = 130  # what a shell expects after Ctrl-C


def plain_console() -> Terminal:
    """A console for tables: as wide as the terminal; 160 columns where the output is a file."""
    console = Terminal()
    return console if console.is_terminal else Terminal(width=160)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line without breaking it, so that what is in it can be copied. style: one of rich's."""
    console.print(text, style=style, highlight=False, soft_wrap=True)


def rate(tokens: float, ms: float, floor_ms: float, digits: int = 0) -> str:
    """Tokens/s for a table. Nothing is faster than its floor, so such a rate is not printed: one of the two times is
    wrong, as where the limits were measured in a busy moment."""
    return f"{1e3 * tokens / ms:,.{digits}f}" if ms >= floor_ms else "none: floor above time"


def save_result(path: Path, result: Any, console: Console) -> None:
    """Write a result as JSON. Raises ConfigError where the file cannot be written; an older one stays as it was."""
    save(path, msgspec.json.format(msgspec.json.encode(result), indent=1))
    say(console, f"written to {path}", "dim")


def until_interrupted(work: Callable[[], int], console: Console, kept: str = "nothing was saved") -> int:
    """The exit code of `work`, or, after Ctrl-C, 130 and a line. Raises ConfigError for an OSError of the work.

    kept: what the line and the error say of what has been done so far.
    """
    try:
        return work()
    except KeyboardInterrupt:
        say(console, f"stopped: {kept}")
        return INTERRUPTED
    except OSError as error:  # a disk that is gone, a share that is stale, a file system that has become read-only
        named = error.filename or "a file"
        raise ConfigError(f"{named}: cannot be read or written ({error.strerror or error}): {kept}") from error
