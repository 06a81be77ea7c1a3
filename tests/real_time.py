"""Tests read no real clock and do not sleep: `time.sleep`, `time.monotonic` and `time.perf_counter` raise for them.

Inject a clock (`tests.clocks.FakeClock`), wait for an event (`tests.waiting`), or assert an order.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).parent
CLOCKS = "sleep", "monotonic", "perf_counter"
# Files of tests that may: they start real processes, or are how others wait for them.
ALLOWED = frozenset(["waiting.py"])


def refusals() -> Any:
    """A context in which the clocks of `time` raise AssertionError for a caller in a file of tests, unless ALLOWED."""
    return mock.patch.multiple(time, **{name: _refusing(name, getattr(time, name)) for name in CLOCKS})


def _refusing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    folder = f"{TESTS}/"

    def clock(*args: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(folder) and caller[len(folder) :] not in ALLOWED:
            raise AssertionError(f"{caller} calls time.{name}: see tests/real_time.py")
        return real(*args)

    return clock
