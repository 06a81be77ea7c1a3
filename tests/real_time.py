"""Tests read no real clock and do not sleep: the CLOCKS of `time` and of `redline.clock` raise for them.

Inject a clock (`tests.clocks.FakeClock`), wait for an event (`tests.waiting`), or assert an order.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import redline.clock

TESTS = Path(__file__).parent
CLOCKS = "sleep", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"
# Test files that may use real clocks: they implement waiting for real processes, or call a library that reads a clock.
ALLOWED = frozenset(["waiting.py", "media/videos.py"])


@contextmanager
def refusals() -> Iterator[None]:
    """A context in which CLOCKS raise AssertionError for a caller in a test file, unless the file is ALLOWED. A
    reference taken earlier, such as a default argument, remains the real clock.
    """
    refusing = {name: _refusing(name, getattr(time, name)) for name in CLOCKS}
    with mock.patch.multiple(time, **refusing), mock.patch.multiple(redline.clock, **refusing):
        yield


def _refusing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    folder = f"{TESTS}/"

    def clock(*args: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(folder) and caller[len(folder) :] not in ALLOWED:
            raise AssertionError(f"{caller} calls {name}: see tests/real_time.py")
        return real(*args)

    return clock
