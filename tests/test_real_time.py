"""No test reads a real clock or sleeps, through any module."""

import time
from types import ModuleType

import pytest

from redline import clock
from tests.clocks import FakeClock
from tests.real_time import CLOCKS


@pytest.mark.parametrize("module", [time, clock])
@pytest.mark.parametrize("name", CLOCKS)
def test_a_real_clock_is_refused(module: ModuleType, name: str):
    with pytest.raises(AssertionError, match=rf"test_real_time\.py calls {name}"):
        getattr(module, name)(*[0] * (name == "sleep"))


def test_a_clock_of_the_tests_own_takes_its_place():
    with FakeClock(5.0).installed():
        clock.sleep(1)
        assert (clock.monotonic(), clock.perf_counter_ns()) == (6.0, 6_000_000_000)
    with pytest.raises(AssertionError, match="calls monotonic"):
        clock.monotonic()
