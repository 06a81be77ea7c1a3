"""What the long verbs say, and what they leave: text that is text, results that are whole."""

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
    """A terminal as wide as it is; in a file no line is broken and no table cut."""
    console = Terminal()
    return console if console.is_terminal else Terminal(width=160)


def say(console: Console, text: str, style: str = "") -> None:
    """A line that is broken nowhere: what is in it may be copied."""
    console.print(text, style=style, highlight=False, soft_wrap=True)


def save_result(path: Path, result: Any, console: Console) -> None:
    """As JSON. Raises ConfigError where the file cannot be written; one that was there is then as it was."""
    save(path, msgspec.json.format(msgspec.json.encode(result), indent=1))
    say(console, f"written to {path}", "dim")


def until_interrupted(work: Callable[[], int], console: Console, kept: str = "nothing was saved") -> int:
    """The work's status, or, after a Ctrl-C, 130 and one line. Raises ConfigError where a disk fails in its midst."""
    try:
        return work()
    except KeyboardInterrupt:
        say(console, f"stopped: {kept}")
        return INTERRUPTED
    except OSError as error:  # a disk that is gone, a share that is stale, a file system that has become read-only
        named = error.filename or "a file"
        raise ConfigError(f"{named}: cannot be read or written ({error.strerror or error}): {kept}") from error
