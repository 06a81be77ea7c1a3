"""The command `redline`: what must hold before anything else is imported.

Ctrl-C while modules are loaded, or while the interpreter goes down, ends the process without a word.
"""

import signal


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
    finally:
        if catches and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a server that has ended ignores it
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
