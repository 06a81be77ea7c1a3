"""Timing record of one request in this process: arrival, the work until it was sent, and how it ended.

A few timestamps per request and none per token, so they are always taken. Watchers (a profile, spans for a collector)
are called once, when the request has ended. No text of a prompt or an answer is stored.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from redline import clock
from redline.api.telemetry.request_traces import RequestTrace
from redline.messages.job import Sampling


class SpanPart(NamedTuple):
    """A piece of work for a request. Times are seconds of time.perf_counter."""

    name: str
    began: float
    ended: float


class RequestSpan:
    """One request. `jobs`, `model` and `sampling` are set once generation has begun, and `ended` is None until the
    request has ended. Times are seconds of time.perf_counter."""

    __slots__ = ("began", "ended", "id", "jobs", "method", "model", "parts", "path", "sampling", "status", "trace")

    def __init__(self, id: str, method: str, path: str, trace: tuple[str, str] = ("", "")) -> None:
        """trace: the headers traceparent and tracestate."""
        self.id = id
        self.method = method
        self.path = path
        self.trace = trace
        self.began = clock.perf_counter()
        self.parts: list[SpanPart] = []
        self.jobs: Sequence[RequestTrace] = ()
        self.model = ""
        self.sampling: Sampling | None = None
        self.status = 0  # 0: no status was sent
        self.ended: float | None = None

    def did(self, name: str, began: float) -> None:
        """Record a piece of work that began at `began` and ends now; thread-safe."""
        self.parts.append(SpanPart(name, began, clock.perf_counter()))


class Watcher(Protocol):
    """Is notified of ended requests."""

    def ended(self, passage: RequestSpan) -> None:
        """A request has ended. Must neither block nor raise: the client's connection waits."""
        ...


class Passages:
    """Requests in progress in this process, and the watchers of their ends. Everything runs in one event loop."""

    def __init__(self) -> None:
        self.open: set[RequestSpan] = set()
        self.watchers: list[Watcher] = []

    def begin(self, passage: RequestSpan) -> None:
        """A request has arrived."""
        self.open.add(passage)

    def end(self, passage: RequestSpan, status: int) -> None:
        """A request has ended. status: 0 if no status was sent."""
        passage.status, passage.ended = status, clock.perf_counter()
        self.open.discard(passage)
        for watcher in self.watchers:
            watcher.ended(passage)
