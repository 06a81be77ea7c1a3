"""Clocks that only a test moves."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import redline.clock


class FakeClock:
    """Seconds that pass when the test has them pass: `clock()` reads them, `clock.sleep(s)` and `clock.advance(s)` add.

    Give it to what takes a clock as a parameter; `installed()` puts it in the place of all clocks of `redline.clock`.
    """

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def ns(self) -> int:
        """The same in nanoseconds."""
        return round(self.now * 1e9)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        assert seconds >= 0, "time goes forward"
        self.now += seconds

    sleep = advance

    @contextmanager
    def installed(self) -> Iterator["FakeClock"]:
        """In here, what the package reads through `redline.clock` is this clock, and its sleeps move it.

        A default argument (`clock=clock.monotonic`) was read when its module was imported: pass this clock there.
        """
        read = ("monotonic", "perf_counter", "process_time", "thread_time", "now")
        clocks = dict.fromkeys(read, self) | {f"{name}_ns": self.ns for name in ("monotonic", "perf_counter", "now")}
        with mock.patch.multiple(redline.clock, sleep=self.sleep, **clocks):
            yield self

    @contextmanager
    def drives(self, loop: asyncio.AbstractEventLoop) -> Iterator["FakeClock"]:
        """In here, timers of `loop` (asyncio's own, not uvloop's) run when this clock has reached them.

        `advance` is for coroutines of that loop; its timers then run in the next iterations (`tests.waiting.turns`).
        Timers that were set before are meant by the real clock: enter this first.
        """
        with mock.patch.object(loop, "time", self):
            yield self

    @contextmanager
    def jumps(self, loop: asyncio.AbstractEventLoop, idle_s: float = 0.0) -> Iterator["FakeClock"]:
        """As `drives`; and where nothing else is left to do, this clock goes on to the loop's next timer at once.

        idle_s: seconds without an event in which nothing is left to do, where the loop has sockets: what is sent to
        another of its own takes the system a moment.
        """
        selector = loop._selector  # type: ignore[attr-defined]
        select = selector.select

        def soon(timeout: float | None = None) -> Any:
            self.advance(1e-9)  # a turn takes some time, so whoever waits for what rounding left over gets there
            events = select(timeout if timeout is None else min(timeout, idle_s))
            if timeout and timeout > 0 and not events:
                self.advance(timeout)
            return events

        with self.drives(loop), mock.patch.object(selector, "select", soon):
            yield self


class Timers:
    """An event loop, uvloop's too, for what takes one as a parameter: its timers run in `advance` and at no other time.

    Everything else is the real loop's.
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
