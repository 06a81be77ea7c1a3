"""Waiting for an event of another process, a thread or the event loop.

A limit only ends a test that would hang. It is generous, since machines differ, and no test asserts how long a wait
took.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 120.0
POLL_INTERVAL_S = 0.005

T = TypeVar("T")


def until(condition: Callable[[], T], what: str | Callable[[], str] = "", limit_s: float = LIMIT_S) -> T:
    """Poll `condition` until it is true, and return its value. Raises AssertionError at the limit.

    what: the message of the error, or a function that returns it.
    """
    deadline = time.monotonic() + limit_s
    while not (given := condition()):
        if time.monotonic() >= deadline:
            said = what() if callable(what) else what
            raise AssertionError(f"not within {limit_s:.0f} s: {said or condition}")
        time.sleep(POLL_INTERVAL_S)
    return given


async def eventually(condition: Callable[[], T], what: str = "", limit_s: float = LIMIT_S) -> T:
    """As `until`, while the event loop runs. Works on a loop with a `tests.clocks.FakeClock` as its clock, too."""
    deadline = time.monotonic() + limit_s
    while not (given := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what or condition}"
        await turns()
        # gives the core to other threads and processes, since a loop that never blocks would occupy it
        time.sleep(0.0002)
    return given


async def turns(number: int = 1) -> None:
    """Let the event loop run `number` iterations."""
    for _ in range(number):
        await asyncio.sleep(0)
