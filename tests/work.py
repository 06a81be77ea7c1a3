"""How much work a call is, counted: a bound that holds on any machine, in the place of seconds."""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines(work: Callable[[], object]) -> int:
    """How many lines of Python `work` executes in this thread, those of what it calls included."""
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


class Memory:
    """Python's memory in a `with` block: behind it, `peak_bytes` is the most that was held at once beyond what was
    there before."""

    peak_bytes = 0

    def __enter__(self) -> "Memory":
        tracemalloc.start()
        self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = self.restart()
        tracemalloc.stop()

    def restart(self) -> int:
        """Begin anew, with what is there now. Returns the peak until now."""
        now, peak = tracemalloc.get_traced_memory()
        before, self._before = getattr(self, "_before", now), now
        tracemalloc.reset_peak()
        return peak - before


def costs(work: Callable[[Callable[[], object]], object]) -> tuple[int, int]:
    """(lines, bytes) of a work in parts: lines of Python, and the sum of its parts' peaks, which grows with the square
    of their number where each copies what came before it. work: calls what it is given after each of its parts."""
    peaks: list[int] = []
    with Memory() as memory:
        work(lambda: peaks.append(memory.restart()))
    return lines(lambda: work(lambda: None)), sum(peaks)
