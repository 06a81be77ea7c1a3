"""What tiers spend their time on, part by part, for whoever wants to know; else nothing is kept.

A part is a piece of one thread's work, such as to launch the copies of what is saved, or to wait for them. Threads add
theirs beside one another, and whoever asks sorts them by time.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from redline import clock


class Span(NamedTuple):
    """One part of the work, from and until when, in seconds of `time.perf_counter`."""

    part: str
    began: float
    ended: float


class Parts:
    """Spans of one engine's tiers. `kept`: None: nobody wants to know."""

    def __init__(self, clock: Callable[[], float] = clock.perf_counter) -> None:
        self.kept: list[Span] | None = None
        self.clock = clock

    @contextmanager
    def of(self, part: str) -> Generator[None]:
        """What is done inside is this part. Any thread."""
        if (kept := self.kept) is None:
            yield
            return
        began = self.clock()
        try:
            yield
        finally:
            kept.append(Span(part, began, self.clock()))

    def took(self, part: str, seconds: float) -> None:
        """A part has ended just now, and took so long. Any thread."""
        if (kept := self.kept) is not None:
            now = self.clock()
            kept.append(Span(part, now - seconds, now))


def told(spans: Sequence[Span], began: float, ended: float) -> dict[str, dict[str, float]]:
    """Of each part: how many spans touch this time, and the milliseconds of them that lie in it."""
    found: dict[str, dict[str, float]] = {}
    for span in sorted(spans):
        inside = min(span.ended, ended) - max(span.began, began)
        if inside > 0:
            one = found.setdefault(span.part, {"count": 0, "ms": 0.0})
            one["count"] += 1
            one["ms"] += 1e3 * inside
    return {part: {"count": one["count"], "ms": round(one["ms"], 3)} for part, one in found.items()}
