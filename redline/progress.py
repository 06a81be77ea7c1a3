"""Progress of a long piece of work: a live bar on a terminal; otherwise a line on stderr every ten seconds.

A thread prints the lines, so they also appear while one long step runs or a model loads.
"""

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from redline import clock

EVERY_S = 10.0


class Working:
    """Progress reporter. Use it as a context manager around the work, and call `show` inside; calls are cheap."""

    def __init__(
        self,
        what: str,
        *,
        shown: bool = True,
        bar: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = clock.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """what: names the work. shown: False prints nothing (of several processes, only one should report).
        bar: False prints lines on a terminal too.

        clock, wait: for tests. `wait(seconds)` sleeps, and returns True if the work ended during the sleep.
        """
        self._ended = threading.Event()
        self._stream = stream or sys.stderr
        self._clock, self._wait = clock, wait or self._ended.wait
        self._what, self._note = what, ""
        self._done, self._total = 0.0, 0.0
        self._began = self._moved = clock()
        self._first: float | None = None  # `done` at the first `show`: work done before this run
        self._bar: Progress | None = None
        self._lines: threading.Thread | None = None
        if shown and bar and self._stream.isatty():
            console = Console(file=self._stream)
            # The bar shrinks first, then the texts, so that both times are complete at 80 columns.
            room = max(20, console.width - 22)
            words = [
                TextColumn(text, markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", max_width=most))
                for text, most in (("{task.description}", room * 2 // 5), ("{task.fields[share]}", room * 3 // 5))
            ]
            columns = words[0], BarColumn(), words[1]
            # Do not redirect stdout to the console unless it is a terminal: it may be a file.
            self._bar = Progress(
                *columns,
                *(kind(table_column=Column(no_wrap=True)) for kind in (TimeElapsedColumn, TimeRemainingColumn)),
                console=console,
                transient=True,
                refresh_per_second=2,  # low, since the work itself may be under measurement
                redirect_stdout=sys.stdout.isatty(),
            )
            self._task = self._bar.add_task(what, total=None, share="")
        elif shown:
            self._lines = threading.Thread(target=self._speak, name="progress", daemon=True)

    def show(self, done: float | None = None, total: float | None = None, *, what: str = "", note: str = "") -> None:
        """Report that `done` of `total` is done; shown as counts if both are ints, else as a percentage.

        An omitted value keeps its last one. what: the name of the next part of the work; its count starts at zero
        again. note: additional text, such as a rate.
        """
        if what and what != self._what:
            self._what, self._first, self._done, self._total = what, None, 0.0, 0.0
            self._moved = self._clock()
        self._note = note
        if done is not None:
            if self._first is None:
                self._first, self._moved = done, self._clock()
            self._done = done
        if total is not None:
            self._total = total
        if self._bar is not None:
            share = " ".join(filter(None, (self._share(), note)))
            self._bar.update(
                self._task, description=self._what, completed=self._done, total=self._total or None, share=share
            )

    def line(self) -> str:
        """The line for stderr, such as `answers: 120 of 1,170, 1:02 passed, about 8:51 left; 1,230 tokens/s`.

        Times are minutes and seconds, with hours in front from one hour on.
        """
        now = self._clock()
        said = [part for part in (self._share(), f"{_minutes(now - self._began)} passed") if part]
        made = self._done - (self._first or 0.0)
        if self._total and made > 0 and self._done < self._total:
            said.append(f"about {_minutes((now - self._moved) / made * (self._total - self._done))} left")
        return f"{self._what}: {', '.join(said)}" + (f"; {self._note}" if self._note else "")

    def _share(self) -> str:
        if not self._total:
            return f"{self._done:,}" if self._done and isinstance(self._done, int) else ""
        if isinstance(self._done, int) and isinstance(self._total, int):
            return f"{self._done:,} of {self._total:,}"
        return f"{self._done / self._total:.0%}"

    def _speak(self) -> None:
        try:
            while not self._wait(EVERY_S):
                print(self.line(), file=self._stream, flush=True)
        except (OSError, ValueError):  # the reader has closed the stream
            return

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        if self._lines is not None:
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()
        if self._lines is not None:
            self._lines.join(1.0)  # takes longer only if the reader of stderr is stuck


def _minutes(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
