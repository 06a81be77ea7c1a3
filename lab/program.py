"""Shared by the programs of lab/: progress lines while they work, and one-line messages for errors
that a user can fix.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from redline.bench.record import told_commit
from redline.disk import check_output
from redline.errors import RedlineError
from redline.progress import Working


def program(main: Callable[[], int | None], *, heard: bool = True) -> None:
    """Runs `main`, with a line on stderr every ten seconds: no progress bar, since drawing it would disturb timings.

    Exits with the result of `main` if it is not 0; with 1 and one line for a RedlineError, which a user can fix; with
    130 after Ctrl-C. An invalid commit in the environment is refused before the measurement. heard: False if the
    program reports its progress itself.
    """
    name = Path(sys.argv[0]).stem
    try:
        told_commit()  # an invalid value is refused before the measurement
        with Working(name, shown=heard, bar=False):
            status = main()
    except RedlineError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"stopped: {name} has saved nothing", file=sys.stderr)
        sys.exit(130)
    if status:
        sys.exit(status)


def output(text: str) -> Path:
    """An argparse type: a file that can be written, checked before the work. Its folder is created if missing.

    Raises ConfigError if it cannot be written.
    """
    path = Path(text)
    check_output(path)
    return path


def count(text: str) -> int:
    """An argparse type: a number from 1 on. Raises ArgumentTypeError for any other text."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 on")
    return int(text)
