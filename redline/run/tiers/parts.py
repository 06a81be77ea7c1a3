"""Time that the KV offload tiers spend, by part of the work; recorded only while a profile is being taken.

A part is one kind of work of one thread, such as launching the copies of saved pages, or waiting for them. All threads
append their spans to one list, and the reader sorts them by time.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from redline import clock


class PartSpan(NamedTuple):
    """One part of the work, with its start and end in seconds of `time.perf_counter`."""

    part: str
    began: float
    ended: float


class Parts:
    """Spans of one engine's tiers. `kept`: the recorded spans; None disables recording."""

    def __init__(self, clock: Callable[[], float] = clock.perf_counter) -> None:
        self.kept: list[PartSpan] | None = None
        self.clock = clock

    @contextmanager
    def of(self, part: str) -> Generator[None]:
        """Context manager: records its body as a span of this part. Any thread."""
        if (kept := self.kept) is None:
            yield
            return
        began = self.clock()
        try:
            yield
        finally:
            kept.append(PartSpan(part, began, self.clock()))

    def took(self, part: str, seconds: float) -> None:
        """Records a span of `seconds` seconds that ends now. Any thread."""
        if (kept := self.kept) is not None:
            now = self.clock()
            kept.append(PartSpan(part, now - seconds, now))


def told(spans: Sequence[PartSpan], began: float, ended: float) -> dict[str, dict[str, float]]:
    """For each part: the number of spans that overlap [began, ended], and their milliseconds within it."""
    found: dict[str, dict[str, float]] = {}
    for span in sorted(spans):
        inside = min(span.ended, ended) - max(span.began, began)
        if inside > 0:
            one = found.setdefault(span.part, {"count": 0, "ms": 0.0})
            one["count"] += 1
            one["ms"] += 1e3 * inside
    return {part: {"count": one["count"], "ms": round(one["ms"], 3)} for part, one in found.items()}
