"""Shared by long-running commands: printing, saving results, and the end after Ctrl-C."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from redline.cli.terminal import Terminal
from redline.disk import save
from redline.errors import ConfigError

INTERRUPTED = 130  # the shell's exit code for Ctrl-C


def plain_console() -> Terminal:
    """A console for tables: as wide as the terminal, or 160 columns if the output is a file."""
    console = Terminal()
    return console if console.is_terminal else Terminal(width=160)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line without breaking it, so that paths and commands in it can be copied. style: one of rich's."""
    console.print(text, style=style, highlight=False, soft_wrap=True)


def rate(tokens: float, ms: float, floor_ms: float, digits: int = 0) -> str:
    """Tokens/s for a table. A time below its floor gives no rate: one of the two is wrong, for example because the
    machine was busy while its limits were measured."""
    return f"{1e3 * tokens / ms:,.{digits}f}" if ms >= floor_ms else "none: floor above time"


def save_result(path: Path, result: Any, console: Console) -> None:
    """Write a result as JSON. Raises ConfigError if the file cannot be written; an older file then stays unchanged."""
    save(path, msgspec.json.format(msgspec.json.encode(result), indent=1))
    say(console, f"written to {path}", "dim")


def until_interrupted(work: Callable[[], int], console: Console, kept: str = "nothing was saved") -> int:
    """The exit code of `work`, or, after Ctrl-C, 130 and a message. Raises ConfigError for an OSError of the work.

    kept: the part of the message about work done so far.
    """
    try:
        return work()
    except KeyboardInterrupt:
        say(console, f"stopped: {kept}")
        return INTERRUPTED
    except OSError as error:  # a disk that failed, a stale share, a file system that has become read-only
        named = error.filename or "a file"
        raise ConfigError(f"{named}: cannot be read or written ({error.strerror or error}): {kept}") from error
