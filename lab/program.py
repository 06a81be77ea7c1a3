"""What the programs of lab/ share: a sign of life while they work, and one line for what somebody can mend."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from redline.bench.record import told_commit
from redline.disk import check_output
from redline.errors import RedlineError
from redline.progress import Working


def program(main: Callable[[], int | None], *, heard: bool = True) -> None:
    """Runs `main`, with a line on stderr every ten seconds: no bar, which would draw beside what is timed.

    Exits with what `main` returns where that is not 0; with 1 and one line for a RedlineError, which somebody can mend;
    with 130 after Ctrl-C. A commit in the environment that is none is refused before anything is measured. heard: False
    where the program says itself how far it is.
    """
    name = Path(sys.argv[0]).stem
    try:
        told_commit()  # what cannot be stored is refused before it is measured
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
    """An argparse type: a file that can be written, tried before the work. Its folder is made where it is missing.

    Raises ConfigError where it cannot be written.
    """
    path = Path(text)
    check_output(path)
    return path


def count(text: str) -> int:
    """An argparse type: a number from 1 on. Raises ArgumentTypeError for any other text."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 on")
    return int(text)
