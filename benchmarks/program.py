"""What the programs of this folder share: they are heard of while they work, and say in one line what can be mended."""

import sys
from collections.abc import Callable
from pathlib import Path

from redline.disk import check_output
from redline.errors import RedlineError
from redline.progress import Working


def program(main: Callable[[], None]) -> None:
    """Runs it, with a line on stderr every ten seconds: no bar, which would draw beside what is timed.

    Status 1 and one line for what somebody can mend, 130 after Ctrl-C.
    """
    name = Path(sys.argv[0]).stem
    try:
        with Working(name, bar=False):
            main()
    except RedlineError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"stopped: {name} has saved nothing", file=sys.stderr)
        sys.exit(130)


def output(text: str) -> Path:
    """An argparse type: a file that can be written, seen before the work. Its folder is made where it is missing."""
    path = Path(text)
    check_output(path)
    return path
