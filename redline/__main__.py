"""Entry point of the command `redline`: checks and signal handling that precede all other imports.

Ctrl-C before a command begins, or while the interpreter shuts down, ends the process without a message or a traceback.
"""

import os
import signal
import sys

PYTHONS = (3, 11), (3, 12), (3, 13)


def main() -> None:
    """Run the command line and end the process with its exit code, by SystemExit."""
    _fill_standard_streams()
    if sys.version_info[:2] not in PYTHONS:
        here = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"error: Redline needs Python 3.11, 3.12 or 3.13, and {sys.executable} is {here}")
    catches = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # false if nohup or the like ignores Ctrl-C
    if catches:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from redline.errors import unimportable

    try:
        from redline.cli import main as run
    except ImportError as error:
        if (why := unimportable(error)) is None:
            raise
        sys.exit(f"error: {why}")
    except MemoryError:
        sys.exit("error: no memory is left: check ulimit -v and the container's memory limit")

    try:
        if catches:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # before the command began or after it ended; in between, the command handles it
        sys.exit(128 + signal.SIGINT)
    finally:
        if catches and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a server that has shut down ignores it
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _fill_standard_streams() -> None:
    """Open /dev/null for closed standard streams; otherwise a socket would get the number, and receive prints."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open() takes the lowest free number


if __name__ == "__main__":
    main()
