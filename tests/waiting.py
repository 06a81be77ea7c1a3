"""Waiting for an event: how a test waits for what another process, a thread or the event loop does.

A limit is there to end a test that would hang. It is generous, since machines differ, and nothing is asserted about how
long a wait took.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 120.0
POLL_INTERVAL_S = 0.005

T = TypeVar("T")


def until(condition: Callable[[], T], what: str | Callable[[], str] = "", limit_s: float = LIMIT_S) -> T:
    """Poll `condition` until it is true, and return what it gave. Raises AssertionError at the limit.

    what: is said then, or gives what is said.
    """
    deadline = time.monotonic() + limit_s
    while not (given := condition()):
        if time.monotonic() >= deadline:
            said = what() if callable(what) else what
            raise AssertionError(f"not within {limit_s:.0f} s: {said or condition}")
        time.sleep(POLL_INTERVAL_S)
    return given


async def eventually(condition: Callable[[], T], what: str = "", limit_s: float = LIMIT_S) -> T:
    """As `until`, while the event loop runs on. It may be used on a loop whose clock is a `tests.clocks.FakeClock`."""
    deadline = time.monotonic() + limit_s
    while not (given := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what or condition}"
        await turns()
        time.sleep(0.0002)  # for other threads and processes, which a loop that never blocks would keep from a core
    return given


async def turns(number: int = 1) -> None:
    """Let the event loop run `number` iterations."""
    for _ in range(number):
        await asyncio.sleep(0)
