"""Traces of recent requests: the worker of each of their jobs, the prediction for it, and the measured times.

Only the newest requests are kept, and none of their text. `redline explain` and /admin/requests/ID show them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from redline import clock
from redline.messages.delta import Brought, Delta, Drafted, Encoded, Finish, Note, Preempted, Resumed
from redline.messages.job import JobId
from redline.router.placement import PredictedPlacement
from redline.router.preemption_forecast import GoesOn
from redline.router.worker_registry import Route

MOST_JOBS = 4096  # jobs with a trace; about 1 KB each
MOST_PAUSES = 16  # newest preemptions kept per job


class Sent(NamedTuple):
    """One routing of a job to a worker."""

    at_s: float
    worker: str
    prompt_computed_by: str
    moved_because: str  # why the previous worker could not continue it; empty: there was none
    expected: PredictedPlacement  # for the worker that computes the prompt
    instead: tuple[PredictedPlacement, ...]  # for the other workers that could have taken it


class Paused(NamedTuple):
    """One preemption of a job. The last three fields are set when it resumes; None until then, or for good if it
    never did or the worker has no clock."""

    at_s: float
    worker: str
    after_tokens: int  # tokens of its answer so far
    by: str | None  # the job that needed the page, by the worker's id; None: the job itself
    running: int  # jobs that kept running
    pages: int  # pages of the worker, all in use
    lost_tokens: int
    short_pages: int
    again_expected_tokens: int
    wait_expected_s: float
    again_expected_s: float  # predicted time from resuming to the next token
    again_tokens: int | None = None
    waited_s: float | None = None
    paused_s: float | None = None  # until its next token


class RequestTrace(msgspec.Struct, gc=False):
    """Trace of one job. Times are seconds since its request's arrival, `began`, which is a time of time.perf_counter.

    It is kept long after its answer, so it holds nothing that the garbage collector has to traverse.
    """

    choice: int
    prompt_tokens: int
    began: float
    sent: tuple[tuple[Any, ...], ...] = ()  # fields of `Sent`, with `PredictedPlacement`s as tuples
    first_token_s: float | None = None
    queued_s: float | None = None
    cached_tokens: int = 0
    tokens: int = 0
    rounds: int = 0  # steps that verified drafts
    drafts: int = 0
    accepted: int = 0
    preemptions: int = 0
    paused: tuple[tuple[Any, ...], ...] = ()  # fields of `Paused`
    brought: tuple[Any, ...] | None = None  # fields of the latest `Brought` of a worker
    encoded: tuple[Any, ...] | None = None  # fields of the latest `Encoded` of a worker
    drafted: tuple[Any, ...] | None = None  # fields of the latest `Drafted`
    finish: Finish | None = None
    ended_s: float | None = None

    def record_sent(self, route: Route, moved_because: str) -> None:
        """The job is sent to a worker. moved_because: as in `Sent`."""
        instead = tuple(tuple(each) for each in route.instead)
        computes = (route.prefill or route.worker).name
        at_s = clock.perf_counter() - self.began
        self.sent += ((at_s, route.worker.name, computes, moved_because, tuple(route.expected), instead),)

    def record_delta(self, delta: Delta, now: float) -> None:
        """A delta of the job has arrived."""
        if delta.proposed:
            self.rounds += 1
            self.drafts += delta.proposed
            self.accepted += delta.accepted
        if delta.tokens and self.first_token_s is None:
            self.first_token_s, self.queued_s = now - self.began, delta.queued_s
            self.cached_tokens = delta.cached_tokens

    def record_note(self, note: Note, id: JobId, expected: GoesOn | None = None, tokens: int = 0) -> None:
        """Apply a note of a worker. id: the worker's id of the job. expected: predicted resume of a preempted job.
        tokens: of its answer so far."""
        match note:
            case Preempted():
                computing = self.first_token_s is None and self.sent
                worker = self.sent[-1][2 if computing else 1] if self.sent else ""
                at_s, expected = clock.perf_counter() - self.began, expected or GoesOn(0.0, 0.0)
                paused = Paused(
                    *(
                        at_s,
                        worker,
                        tokens,
                        None if note.by == id else str(note.by),
                        note.running,
                        note.pages,
                        note.lost_tokens,
                    ),
                    *(note.short_pages, note.again_tokens, expected.wait_s, expected.again_s),
                )
                self.preemptions += 1
                self.paused = (*self.paused[1 - MOST_PAUSES :], tuple(paused))
            case Resumed() if self.paused:
                last = Paused(*self.paused[-1])
                # If the prompt is computed on another worker, both notes arrive with the first token.
                at_s = min(last.at_s, clock.perf_counter() - self.began - (note.paused_s or 0.0))
                last = last._replace(
                    at_s=at_s, again_tokens=note.again_tokens, waited_s=note.waited_s, paused_s=note.paused_s
                )
                self.paused = (*self.paused[:-1], tuple(last))
            case Resumed():
                pass  # the preemption was reported by another worker
            case Brought():
                self.brought = (
                    *(note.host_tokens, note.disk_tokens, note.read_s, note.predicted_s),
                    note.compute_s,
                )
            case Encoded():
                self.encoded = (note.images, note.tokens, note.cached, note.encode_s)
            case Drafted():
                self.drafted = (note.steps, note.seconds, note.predicted_s, note.without_s)

    def record_end(self, finish: Finish, tokens: int, now: float) -> None:
        """The job has ended."""
        self.finish, self.tokens, self.ended_s = finish, tokens, now - self.began

    @property
    def worker(self) -> str | None:
        """Name of its last worker; None: it was never sent."""
        return self.sent[-1][1] if self.sent else None

    @property
    def images(self) -> dict[str, Any] | None:
        """The images of its prompt and the vision encoder's time; None: none was needed."""
        if self.encoded is None:
            return None
        images, tokens, cached, encode_s = self.encoded
        return {"images": images, "tokens": tokens, "cached": cached, "encode_s": _rounded(encode_s)}

    def told(self) -> dict[str, Any]:
        """The trace as JSON. Times are in seconds; predictions are from sending to the prompt's first token."""
        sent = [
            Sent(
                at_s,
                worker,
                computes,
                moved,
                PredictedPlacement(*expected),
                tuple(PredictedPlacement(*each) for each in instead),
            )
            for at_s, worker, computes, moved, expected, instead in self.sent
        ]
        waited = self.first_token_s - sent[-1].at_s if self.first_token_s is not None and sent else None
        return {
            "choice": self.choice,
            "prompt_tokens": self.prompt_tokens,
            "sent": [
                {
                    "at_s": _rounded(each.at_s),
                    "worker": each.worker,
                    "prompt_computed_by": each.prompt_computed_by,
                    "why": why(each, self.prompt_tokens),
                    "moved_because": each.moved_because or None,
                    "expected": _expected(each.expected),
                    "instead": [_expected(other) for other in each.instead],
                }
                for each in sent
            ],
            "first_token_s": _rounded(self.first_token_s),
            "first_token_since_sent_s": _rounded(waited),
            "queued_s": _rounded(self.queued_s),
            "cached_tokens": self.cached_tokens,
            "tokens": self.tokens,
            "brought": _brought(self.brought),
            "images": self.images,
            "preemptions": self.preemptions,
            "paused": [_paused(Paused(*each)) for each in self.paused],
            "drafts": {"rounds": self.rounds, "verified": self.drafts, "accepted": self.accepted},
            "steps_with_drafts": _steps(self.drafted),
            "finish": self.finish,
            "ended_s": _rounded(self.ended_s),
        }


class RequestTraces:
    """Traces of the newest jobs, by request id."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, tuple[RequestTrace, ...]] = OrderedDict()
        self._jobs = 0

    def begin(self, request: str, jobs: Sequence[RequestTrace]) -> None:
        """A request is admitted. If the id, which the client may choose, is in use, the jobs are appended to that
        trace."""
        before = self._of.pop(request, ())
        self._of[request] = kept = (*before, *jobs)[-MOST_JOBS:]
        self._jobs += len(kept) - len(before)
        while self._jobs > MOST_JOBS:
            _, gone = self._of.popitem(last=False)
            self._jobs -= len(gone)

    def of(self, request: str) -> tuple[RequestTrace, ...]:
        """Traces of a request's jobs; empty if the id is unknown."""
        return self._of.get(request, ())


def why(sent: Sent, tokens: int) -> str:
    """One line: why a job with `tokens` prompt tokens was sent to its worker."""
    expected, others = sent.expected, sent.instead
    apart = sent.prompt_computed_by != sent.worker
    answers = f"; {sent.worker} decodes, as the least loaded" if apart else ""
    if not others:
        return f"no other worker can take it{answers}"
    most = max(each.cached_tokens for each in others)
    if expected.cached_tokens > most:
        return f"{expected.cached_tokens:,} of its {tokens:,} tokens are cached there, {most:,} elsewhere{answers}"
    queue = min(each.queue_tokens for each in others)
    if expected.queue_tokens < queue:
        return f"{expected.queue_tokens:,} tokens wait there, {queue:,} or more elsewhere{answers}"
    return f"it costs least there: {expected.cost_s:.3f} s, elsewhere {min(e.cost_s for e in others):.3f}{answers}"


def _expected(each: PredictedPlacement) -> dict[str, Any]:
    return {
        **each._asdict(),
        **{name: _rounded(value) for name, value in each._asdict().items() if name.endswith("_s")},
        "cost_s": _rounded(each.cost_s),
    }


def _brought(fields: tuple[Any, ...] | None) -> dict[str, Any] | None:
    """Pages loaded from the KV offload tiers."""
    if fields is None:
        return None
    host, disk, read_s, predicted_s, compute_s = fields
    return {
        "host_tokens": host,
        "disk_tokens": disk,
        "read_s": _rounded(read_s),
        "read_expected_s": _rounded(predicted_s),
        "compute_expected_s": _rounded(compute_s),
    }


def _paused(paused: Paused) -> dict[str, Any]:
    seconds = {name: _rounded(value) for name, value in paused._asdict().items() if name.endswith("_s")}
    return {**paused._asdict(), **seconds}


def _steps(fields: tuple[Any, ...] | None) -> dict[str, Any] | None:
    """Mean over the timed steps that verified drafts."""
    if fields is None:
        return None
    steps, seconds, predicted_s, without_s = fields
    return {
        "timed": steps,
        "step_s": round(seconds / steps, 6),
        "step_expected_s": round(predicted_s / steps, 6),
        "step_without_expected_s": round(without_s / steps, 6),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
