"""One request's passage through this process: when it came, what was done with it until it was sent, how it ended.

Marks are set where a request passes, a few for each and none for a token, so they are always set. Who wants to know
(a profile, spans for a collector) is told once, when the request has ended. No text of a prompt or an answer is held.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from redline import clock
from redline.api.stories import Story
from redline.wire.job import Sampling


class Part(NamedTuple):
    """Something that was done for a request. Times are seconds, as time.perf_counter tells."""

    name: str
    began: float
    ended: float


class Passage:
    """One request. `jobs`, `model` and `sampling` are those of what it asks to be generated, once that has begun, and
    `ended` is None until it has ended. Times are seconds, as time.perf_counter tells."""

    __slots__ = ("began", "ended", "id", "jobs", "method", "model", "parts", "path", "sampling", "status", "trace")

    def __init__(self, id: str, method: str, path: str, trace: tuple[str, str] = ("", "")) -> None:
        """trace: the headers traceparent and tracestate."""
        self.id = id
        self.method = method
        self.path = path
        self.trace = trace
        self.began = clock.perf_counter()
        self.parts: list[Part] = []
        self.jobs: Sequence[Story] = ()
        self.model = ""
        self.sampling: Sampling | None = None
        self.status = 0  # 0: none was sent
        self.ended: float | None = None

    def did(self, name: str, began: float) -> None:
        """A part of it ends now. Any thread may say so."""
        self.parts.append(Part(name, began, clock.perf_counter()))


class Watcher(Protocol):
    """Who wants to know of requests."""

    def ended(self, passage: Passage) -> None:
        """One has ended. It must neither block nor raise: the client's connection waits."""
        ...


class Passages:
    """The requests that this process is at, and who is told when one ends. Everything runs in one event loop."""

    def __init__(self) -> None:
        self.open: set[Passage] = set()
        self.watchers: list[Watcher] = []

    def begin(self, passage: Passage) -> None:
        """A request has come."""
        self.open.add(passage)

    def end(self, passage: Passage, status: int) -> None:
        """It has ended. status: 0 where none was sent."""
        passage.status, passage.ended = status, clock.perf_counter()
        self.open.discard(passage)
        for watcher in self.watchers:
            watcher.ended(passage)
