"""The command `redline`: what must hold before anything else is imported.

Ctrl-C before a verb begins, or while the interpreter goes down, ends the process without a word.
"""

import signal
import sys


def main() -> None:
    """Run the command line and end the process with its exit code, by SystemExit."""
    catches = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where Ctrl-C is ignored, as by nohup
    if catches:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from redline.cli import main as run

    try:
        if catches:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # before the verb has begun, or behind its end: the verb answers for what is between
        sys.exit(128 + signal.SIGINT)
    finally:
        if catches and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a server that has ended ignores it
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
