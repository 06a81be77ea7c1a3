"""Clocks that only a test moves."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import redline.clock


class FakeClock:
    """Seconds that pass when the test advances them: `clock()` reads them, `clock.sleep(s)` and `clock.advance(s)` add.

    Pass it to code that takes a clock as a parameter; `installed()` replaces all clocks of `redline.clock` by it.
    """

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def ns(self) -> int:
        """The time in nanoseconds."""
        return round(self.now * 1e9)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        assert seconds >= 0, "time must not go backwards"
        self.now += seconds

    sleep = advance

    @contextmanager
    def installed(self) -> Iterator["FakeClock"]:
        """Within this context, `redline.clock` reads this clock, and its sleeps move it.

        A default argument (`clock=clock.monotonic`) was bound when its module was imported: pass this clock there.
        """
        read = ("monotonic", "perf_counter", "process_time", "thread_time", "now")
        clocks = dict.fromkeys(read, self) | {f"{name}_ns": self.ns for name in ("monotonic", "perf_counter", "now")}
        with mock.patch.multiple(redline.clock, sleep=self.sleep, **clocks):
            yield self

    @contextmanager
    def drives(self, loop: asyncio.AbstractEventLoop) -> Iterator["FakeClock"]:
        """Within this context, timers of `loop` (asyncio's own, not uvloop's) run when this clock has reached them.

        `advance` is for coroutines of that loop; its timers then run in the next iterations (`tests.waiting.turns`).
        Timers set earlier use the real clock: enter this context first.
        """
        with mock.patch.object(loop, "time", self):
            yield self

    @contextmanager
    def jumps(self, loop: asyncio.AbstractEventLoop, idle_s: float = 0.0) -> Iterator["FakeClock"]:
        """As `drives`; and if nothing else is left to do, this clock advances to the loop's next timer at once.

        idle_s: seconds without an event after which the loop counts as idle, if the loop has sockets: the system needs
        a moment to deliver data between sockets of this process.
        """
        selector = loop._selector  # type: ignore[attr-defined]
        select = selector.select

        def soon(timeout: float | None = None) -> Any:
            self.advance(1e-9)  # an iteration takes some time, so that a wait for a rounding remainder ends
            events = select(timeout if timeout is None else min(timeout, idle_s))
            if timeout and timeout > 0 and not events:
                self.advance(timeout)
            return events

        with self.drives(loop), mock.patch.object(selector, "select", soon):
            yield self


class Timers:
    """An event loop, also uvloop's, for code that takes one as a parameter: its timers run in `advance` and at no other
    time.

    Everything else is passed to the real loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._now = 0.0
        self._timers: list[asyncio.TimerHandle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._now

    def call_later(self, seconds: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(self._now + seconds, callback, args, self)  # type: ignore[arg-type]
        self._timers.append(timer)
        return timer

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        self._timers = [each for each in self._timers if each is not timer]

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass: the timers that are due run now, in their order."""
        until = self._now + seconds
        while due := [timer for timer in self._timers if timer.when() <= until]:
            first = min(due, key=asyncio.TimerHandle.when)
            self._timer_handle_cancelled(first)
            self._now = first.when()
            first._run()
        self._now = until
