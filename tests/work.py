"""The amount of work of a call, counted: a bound that holds on any machine, instead of seconds."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines(work: Callable[[], object]) -> int:
    """How many lines of Python `work` executes in this thread, including those of functions that it calls, and without
    those of finalizers, which would run if objects of other tests were collected meanwhile."""
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


class Memory:
    """Python's memory in a `with` block: afterwards, `peak_bytes` is the most memory held at once in addition to the
    memory held before.
    """

    peak_bytes = 0

    def __enter__(self) -> "Memory":
        tracemalloc.start()
        self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = self.restart()
        tracemalloc.stop()

    def restart(self) -> int:
        """Start again from the present amount. Returns the peak until now."""
        now, peak = tracemalloc.get_traced_memory()
        before, self._before = getattr(self, "_before", now), now
        tracemalloc.reset_peak()
        return peak - before


def costs(work: Callable[[Callable[[], object]], object]) -> tuple[int, int]:
    """(lines, bytes) of work done in parts: lines of Python, and the sum of its parts' peaks, which grows with the
    square of their number if each copies all earlier ones. work: calls its argument after each of its parts.
    """
    peaks: list[int] = []
    with Memory() as memory:
        work(lambda: peaks.append(memory.restart()))
    return lines(lambda: work(lambda: None)), sum(peaks)
