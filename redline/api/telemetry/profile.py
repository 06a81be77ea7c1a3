"""Records a trace for Perfetto: requests and event loop of the API, steps and kernels of the workers.

API and workers use the host's one monotonic clock, so their lanes are aligned. The amount of data is bounded, and the
file reports what was dropped (`otherData`).
"""

import asyncio
import gzip
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from redline import clock
from redline.api.errors import Refusal
from redline.api.gateway.gateway import Gateway
from redline.api.telemetry.request_span import Passages, RequestSpan
from redline.api.telemetry.stages import RequestStage, Stages, one_behind_another, stages_of
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.profile import Profile, Profiled, Span, spans_of
from redline.router.worker_registry import WorkerHandle

MOST_S = 60.0  # seconds of a recording
MOST_SPANS = 200_000  # per worker: some 20 MB of memory, and 30 MB of JSON before compression
MOST_REQUESTS = 20_000  # requests that end during the recording
MOST_TURNS = 50_000  # batches of worker messages
LAST_S = 60.0  # seconds to wait for workers' data: a GPU's kernel times are read after the recording
LATE_S = 0.005  # seconds between two measurements of the event loop's lag

_FIRST_LANE = 10  # first lane for requests; lanes before it belong to the event loop


class ReceivedBatch(NamedTuple):
    """A batch of worker messages, processed and written to streams. Times are seconds of time.perf_counter."""

    worker: str
    messages: int
    tokens: int
    began: float
    ended: float


class Recording:
    """Data of one recording. Everything runs in one event loop."""

    def __init__(self, number: int, waits_for: Iterable[WorkerHandle]) -> None:
        self.number = number
        self.began = clock.perf_counter()
        self.until = 0.0
        self.passages: list[RequestSpan] = []
        self.turns: list[ReceivedBatch] = []
        self.late: list[tuple[float, float]] = []  # time of measurement, and lag
        self.left_out: dict[str, int] = {}
        self.notes: list[str] = []
        self.pieces: dict[str, list[bytes]] = {}  # by worker
        self.waits_for = {link: asyncio.Event() for link in waits_for}

    def ended(self, passage: RequestSpan) -> None:
        """Record an ended request."""
        if len(self.passages) < MOST_REQUESTS:
            self.passages.append(passage)
        else:
            self._leave_out("requests")

    def took(self, worker: WorkerHandle, messages: Sequence[Wire], began: float) -> None:
        """Record a processed batch of worker messages."""
        if self.until or not began:
            return
        if len(self.turns) < MOST_TURNS:
            tokens = sum(len(message.tokens) for message in messages if isinstance(message, Delta))
            self.turns.append(ReceivedBatch(worker.name, len(messages), tokens, began, clock.perf_counter()))
        else:
            self._leave_out("turns")

    def told(self, worker: WorkerHandle, message: Profiled) -> None:
        """Store a worker's spans."""
        if message.number != self.number or worker not in self.waits_for:
            return
        self.pieces.setdefault(worker.name, []).append(message.data)
        if message.last:
            self.notes += [f"{worker.name}: {note}" for note in message.notes]
            if message.left_out:
                self.left_out[f"spans of {worker.name}"] = message.left_out
            self.waits_for[worker].set()

    def _leave_out(self, what: str) -> None:
        self.left_out[what] = self.left_out.get(what, 0) + 1


class Profiler:
    """Records one trace at a time."""

    def __init__(self, gateway: Gateway, passages: Passages) -> None:
        self._gateway, self._passages = gateway, passages
        self._number = 0

    async def take(self, seconds: float) -> bytes:
        """Record a trace of the next `seconds`, as gzipped JSON.

        Raises Refusal: 400 if `seconds` is not from 0.01 to MOST_S, 409 while another trace is being recorded.
        """
        if not 0.01 <= seconds <= MOST_S:  # also rejects NaN
            raise Refusal(400, f"seconds is not a number from 0.01 to {MOST_S:g}", "invalid_seconds")
        gateway = self._gateway
        if gateway.monitor.recorder is not None:
            raise Refusal(409, "another trace is being recorded; retry when it is done", "busy")
        self._number += 1
        links = [link for link in gateway.workers if link.ready is not None]
        seen = Recording(self._number, links)
        gateway.monitor.recorder = seen
        self._passages.watchers.append(seen)
        late = asyncio.create_task(_measure_lateness(seen))
        try:
            for link in links:
                link.outbox.put(Profile(number=self._number, seconds=seconds, most=MOST_SPANS))
            await asyncio.sleep(seconds)
            seen.until = clock.perf_counter()
            late.cancel()
            still = [passage for passage in self._passages.open if passage.began < seen.until]
            self._passages.watchers.remove(seen)
            now = [stages_of(passage) for passage in (*seen.passages, *still)]  # before the requests continue
            until = clock.monotonic() + LAST_S
            for link, told in seen.waits_for.items():
                await _told_or_lost(link, told, until)
                if not told.is_set():
                    seen.notes.append(f"{link.name} has not sent all of its spans")
            return await asyncio.to_thread(_written, seen, now)
        finally:
            late.cancel()
            if seen in self._passages.watchers:
                self._passages.watchers.remove(seen)
            gateway.monitor.recorder = None


async def _told_or_lost(link: WorkerHandle, told: asyncio.Event, until: float) -> None:
    while not told.is_set() and link.lost is None and clock.monotonic() < until:
        try:
            await asyncio.wait_for(told.wait(), 0.1)
        except TimeoutError:
            continue


async def _measure_lateness(seen: Recording) -> None:
    while True:
        due = clock.perf_counter() + LATE_S
        await asyncio.sleep(LATE_S)
        now = clock.perf_counter()
        seen.late.append((now, max(0.0, now - due)))


class _Events:
    """Chrome trace events, in microseconds since `zero` (seconds): one process for the API and one per worker."""

    def __init__(self, zero: float) -> None:
        self._zero = zero
        self.events: list[dict[str, Any]] = []

    def name(self, pid: int, process: str, order: int) -> None:
        self._meta(pid, 0, "process_name", {"name": process})
        self._meta(pid, 0, "process_sort_index", {"sort_index": order})

    def lane(self, pid: int, tid: int, name: str) -> None:
        self._meta(pid, tid, "thread_name", {"name": name})
        self._meta(pid, tid, "thread_sort_index", {"sort_index": tid})

    def _meta(self, pid: int, tid: int, name: str, args: dict[str, Any]) -> None:
        self.events.append({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args})

    def slice(self, pid: int, tid: int, stage: RequestStage, category: str) -> None:
        """A slice that began before the recording is drawn from its actual start."""
        began = round((stage.began - self._zero) * 1e6, 3)
        ended = round((stage.ended - self._zero) * 1e6, 3)
        dur = round(max(0.0, ended - began), 3)
        event = {"ph": "X", "pid": pid, "tid": tid, "name": stage.name, "cat": category, "ts": began, "dur": dur}
        self.events.append({**event, "args": stage.facts})

    def count(self, pid: int, name: str, at: float, value: float) -> None:
        ts = round((at - self._zero) * 1e6, 3)
        self.events.append({"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": ts, "args": {"ms": value}})


def _written(seen: Recording, requests: Sequence[Stages]) -> bytes:
    # Requests under way at the start began before it, and trace viewers do not accept negative times.
    zero = min([seen.began, *(request.whole.began for request in requests)])
    events = _Events(zero)
    events.name(1, "API", 1)
    events.lane(1, 1, "event loop: messages of workers")
    for turn in seen.turns:
        facts = {"messages": turn.messages, "tokens": turn.tokens}
        events.slice(1, 1, RequestStage(f"take in {turn.worker}", turn.began, turn.ended, facts), "loop")
    for at, late in seen.late:
        events.count(1, "event loop is late", at, round(late * 1e3, 3))
    _draw_requests(events, requests)
    for pid, (worker, pieces) in enumerate(sorted(seen.pieces.items()), 2):
        events.name(pid, worker, pid)
        _draw_worker(events, pid, [span for piece in pieces for span in spans_of(piece)])
    body = {
        "traceEvents": events.events,
        "displayTimeUnit": "ms",
        "otherData": {
            "by": "redline",
            "window_begins_ms": round((seen.began - zero) * 1e3, 3),
            "window_ms": round((seen.until - seen.began) * 1e3, 3),
            "requests": len(requests),
            "left_out": seen.left_out,
            "notes": seen.notes,
        },
    }
    return gzip.compress(msgspec.json.encode(body), 6)


def _draw_requests(events: _Events, requests: Sequence[Stages]) -> None:
    """Draw each request in the first lane that is free at its start, so that requests do not overlap."""
    free: list[float] = []  # the time from which each lane is free
    for request in sorted(requests, key=lambda one: one.whole.began):
        rows = [[request.whole, *one_behind_another(request.stages, request.whole)]]
        rows += [one_behind_another(job, request.whole) for job in request.jobs]
        for row in filter(None, rows):
            lane = next((place for place, at in enumerate(free) if at <= row[0].began), len(free))
            if lane == len(free):
                free.append(0.0)
                events.lane(1, _FIRST_LANE + lane, f"requests {lane + 1}")
            free[lane] = max(stage.ended for stage in row)
            for stage in row:
                events.slice(1, _FIRST_LANE + lane, stage, "request")


LANES = ("steps", "planner", "loop", "runner", "kernels")  # of a worker, in drawing order; a GPU's streams follow


def _draw_worker(events: _Events, pid: int, spans: Sequence[Span]) -> None:
    lanes: dict[str, int] = {}
    for span in spans:
        tid = lanes.get(span.lane)
        if tid is None:
            tid = LANES.index(span.lane) + 1 if span.lane in LANES else _FIRST_LANE + len(lanes)
            lanes[span.lane] = tid
            events.lane(pid, tid, span.lane)
        stage = RequestStage(span.name, span.began_ns / 1e9, span.ended_ns / 1e9, span.facts)
        events.slice(pid, tid, stage, span.lane)
