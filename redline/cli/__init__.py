"""The command line: `main` runs it, `verbs` declares the commands."""

import os
import sys
import tempfile
import traceback
from contextlib import suppress
from typing import TextIO

from redline.cli.terminal import Terminal, one_line
from redline.cli.verbs import app
from redline.disk import drop_held
from redline.errors import RedlineError, unimportable

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line and end the process with its exit code, by SystemExit.

    An error prints one line, exit code 1; a usage error prints typer's own message, code 2. REDLINE_DEBUG=1 prints the
    traceback as well.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        _accept_any_text(stream)
    try:
        try:
            app()
        finally:
            _flush_page()
    except RedlineError as error:
        code = _report(str(error))
    except OSError as error:
        code = _report(": ".join(filter(None, [error.filename and str(error.filename), error.strerror or str(error)])))
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 turns Ctrl-C during __set_name__ into this
            raise error.__cause__ from None
        if isinstance(error, ImportError) and (why := unimportable(error)) is not None:
            sys.exit(_report(why))
        if isinstance(error, MemoryError):
            sys.exit(_report("no memory is left: check ulimit -v and the container's memory limit"))
        code = _report(f"{type(error).__name__}: {one_line(str(error))}; this is a bug in Redline{_kept_traceback()}")
    else:
        code = 0
    finally:
        _flush()
    sys.exit(code)


def _accept_any_text(stream: TextIO | None) -> None:
    """Make a stream write characters that its encoding lacks, and lone surrogates, as escapes instead of raising."""
    reconfigure = getattr(stream, "reconfigure", None)  # None if the stream is closed
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _report(message: str) -> int:
    if os.environ.get("REDLINE_DEBUG"):
        traceback.print_exc()
    with suppress(OSError):
        from rich.text import Text

        screen = Terminal(stderr=True)
        screen.print(Text.assemble(("error:", "red"), " ", message), highlight=False, soft_wrap=True)
    return 1


def _kept_traceback() -> str:
    """Save the traceback of the current exception to a file; returns the end of a sentence that names the file."""
    if os.environ.get("REDLINE_DEBUG"):
        return ""
    try:
        descriptor, name = tempfile.mkstemp(prefix="redline-", suffix=".traceback")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(traceback.format_exc())
    except OSError:
        return "; REDLINE_DEBUG=1 prints the traceback"
    return f"; the traceback is in {name}"


def _flush_page() -> None:
    """Flush stdout. Raises OSError, except for a broken pipe."""
    if sys.stdout is not None and not sys.stdout.closed:
        with suppress(BrokenPipeError):
            sys.stdout.flush()


def _flush() -> None:
    """Flush stdout and stderr."""
    open_ones: list[TextIO | None] = [sys.stdout, sys.stderr]  # None if closed before the process started
    for stream in filter(None, open_ones):
        drop_held(stream)
