"""The command `redline`: what must hold before anything else is imported.

Ctrl-C before a verb begins, or while the interpreter goes down, ends the process without a word.
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
    catches = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where Ctrl-C is ignored, as by nohup
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
        sys.exit("error: no memory is left: ulimit -v, or a container's limit, may bound it")

    try:
        if catches:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # before the verb has begun, or behind its end: the verb answers for what is between
        sys.exit(128 + signal.SIGINT)
    finally:
        if catches and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a server that has ended ignores it
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _fill_standard_streams() -> None:
    """Open /dev/null where a standard stream is closed: else a socket gets its number, and what libraries print."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


if __name__ == "__main__":
    main()
