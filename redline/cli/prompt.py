"""The prompt for questions, typed or pasted. A paste of several lines is one question; none of it reaches a shell.

Terminals mark pasted text (bracketed paste) for programs that request it. This program requests it also while an answer
streams, and keeps text typed during that time for the next question. If a terminal marks nothing, or the paste came
before the request, an Enter that is immediately followed by more text is taken for a line end in a paste.
"""

import os
import select
import signal
import sys
import termios
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.utils import is_dumb_terminal

from redline.disk import save
from redline.errors import ConfigError

MOST_HISTORY_BYTES = 1 << 20  # of earlier questions; the older half of a longer file is dropped
FOLLOWS_S = 0.02  # longer than a terminal's pause in a paste, shorter than a person's before the key after Enter


def is_interactive() -> bool:
    """Whether a user is at a terminal: standard input is one, and so is standard output or standard error."""
    typed, *shown = (stream is not None and stream.isatty() for stream in _streams())
    return typed and any(shown)


def _streams() -> tuple[TextIO | None, ...]:
    return sys.stdin, sys.stdout, sys.stderr  # None if closed before the process started


def piped() -> str:
    """All of standard input, as one question. Raises ConfigError if it is blank."""
    stream = _streams()[0]
    text = stream.read() if stream is not None else ""
    if not text.strip():
        raise ConfigError("standard input holds no question; give one as PROMPT, or run `redline chat` in a terminal")
    return text


class Prompt:
    """Reads questions from the terminal; a context manager around a conversation, which restores the terminal.

    history: a file with earlier questions for the arrow keys; the questions of this conversation are added to it.
    """

    def __init__(self, history: Path | None = None) -> None:
        self._input = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._input)
        output = create_output(always_prefer_tty=True)
        if isinstance(output, Vt100_Output):
            output.enable_cpr = False  # the terminal's reply is input, and would reach the shell after an early exit
        self._output = None if is_dumb_terminal() else output
        keys = KeyBindings()
        keys.add("enter")(self._enter)
        keys.add("escape", "enter")(self._new_line)  # Alt-Enter
        self._session = PromptSession[str](
            output=output, key_bindings=keys, enable_suspend=True, history=_history(history)
        )

    def read(self) -> str:
        """The next question, typed or pasted. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        try:
            return self._session.prompt(FormattedText([("bold", "> ")]))
        except _Terminated:
            sys.exit(128 + signal.SIGTERM)
        finally:
            self._bracket_pastes()

    def _enter(self, event: KeyPressEvent) -> None:
        if event.app.key_processor.input_queue or select.select([self._input], [], [], FOLLOWS_S)[0]:
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    def _new_line(self, event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    def _leave(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM handler. The prompt's loop ends by itself: an exception in one of its tasks would be printed."""
        app = self._session.app
        if app.loop is None or not app.is_running:
            sys.exit(128 + number)
        app.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        app = self._session.app
        if app.future is not None and not app.future.done():
            app.exit(exception=_Terminated())

    def _bracket_pastes(self) -> None:
        if self._output is not None:
            self._output.enable_bracketed_paste()
            self._output.flush()

    def __enter__(self) -> Self:
        self._terminate = signal.signal(signal.SIGTERM, self._leave)
        mode: list[Any] = termios.tcgetattr(self._input)
        mode[0] &= ~termios.ICRNL  # input modes
        mode[3] &= ~(termios.ICANON | termios.ECHO)  # local modes; Ctrl-C still interrupts,
        mode[3] |= termios.NOFLSH  # and does not discard text typed for the next question
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._input, termios.TCSANOW, mode)
        self._bracket_pastes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(termios.error):  # the terminal is gone
            # Discard unread input, such as the rest of a long paste, so that the shell does not run it.
            for _ in range(100):
                if not select.select([self._input], [], [], FOLLOWS_S)[0]:
                    break
                termios.tcflush(self._input, termios.TCIFLUSH)
            termios.tcsetattr(self._input, termios.TCSAFLUSH, self._before)
        if self._output is not None:
            self._output.disable_bracketed_paste()
            self._output.flush()
        signal.signal(signal.SIGTERM, self._terminate)


def _history(path: Path | None) -> History:
    """History from the file, readable by its owner alone; in memory if there is no file or it cannot be written."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600))
        if path.stat().st_size > MOST_HISTORY_BYTES:
            _, _, kept = path.read_bytes()[-MOST_HISTORY_BYTES // 2 :].partition(b"\n\n")
            save(path, b"\n" + kept, private=True)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


class _Terminated(Exception):
    """Raised when SIGTERM arrives while a question is typed."""
