"""What became of requests, and why: who got each of their jobs, what was expected of it, and what it took.

Of the newest requests alone, and without a word of their text. `redline explain` and /admin/requests/ID show them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from redline import clock
from redline.route.choose import Predicted
from redline.route.links import Route
from redline.route.resume import GoesOn
from redline.wire.delta import Brought, Delta, Drafted, Finish, Note, Preempted, Resumed
from redline.wire.job import JobId

MOST_JOBS = 4096  # of which is known what became of them; about 1 KB each
MOST_PAUSES = 16  # of a job: the newest


class Sent(NamedTuple):
    """One time that a job was sent to a worker."""

    at_s: float
    worker: str
    prompt_computed_by: str
    moved_because: str  # why the worker before could not go on with it; empty: there was none
    expected: Predicted  # of whoever computes the prompt
    instead: tuple[Predicted, ...]  # of the others that could have


class Paused(NamedTuple):
    """One time that a worker took a job's pages. Its last three come when it has gone on; None until then, or for
    good: it never did, or the worker has no clock."""

    at_s: float
    worker: str
    after_tokens: int  # of its answer
    by: str | None  # the job whose page was wanted, as workers call it; None: it was its own
    running: int  # jobs that went on
    pages: int  # of the worker, all held
    lost_tokens: int
    short_pages: int
    again_expected_tokens: int
    wait_expected_s: float
    again_expected_s: float  # from then to its next token
    again_tokens: int | None = None
    waited_s: float | None = None
    paused_s: float | None = None  # until its next token


class Story(msgspec.Struct, gc=False):
    """One job. Seconds count from its request's arrival, which `began` tells as time.perf_counter does.

    It is kept long after its answer, so it holds nothing that a garbage collection has to walk through.
    """

    choice: int
    prompt_tokens: int
    began: float
    sent: tuple[tuple[Any, ...], ...] = ()  # the fields of a Sent, whose own Predicteds are tuples too
    first_token_s: float | None = None
    queued_s: float | None = None
    cached_tokens: int = 0
    tokens: int = 0
    rounds: int = 0  # steps that verified drafts
    drafts: int = 0
    accepted: int = 0
    preemptions: int = 0
    paused: tuple[tuple[Any, ...], ...] = ()  # the fields of a Paused
    brought: tuple[Any, ...] | None = None  # those of a Brought, of the worker that told of it last
    drafted: tuple[Any, ...] | None = None  # those of a Drafted, likewise
    finish: Finish | None = None
    ended_s: float | None = None

    def goes(self, route: Route, moved_because: str) -> None:
        """It is sent to a worker. moved_because: as in `Sent`."""
        instead = tuple(tuple(each) for each in route.instead)
        computes = (route.prefill or route.link).name
        at_s = clock.perf_counter() - self.began
        self.sent += ((at_s, route.link.name, computes, moved_because, tuple(route.expected), instead),)

    def comes(self, delta: Delta, now: float) -> None:
        """More of its answer has come."""
        if delta.proposed:
            self.rounds += 1
            self.drafts += delta.proposed
            self.accepted += delta.accepted
        if delta.tokens and self.first_token_s is None:
            self.first_token_s, self.queued_s = now - self.began, delta.queued_s
            self.cached_tokens = delta.cached_tokens

    def notes(self, note: Note, id: JobId, expected: GoesOn | None = None, tokens: int = 0) -> None:
        """A worker has something to note of it. id: the worker's for it. expected: of one that is pre-empted, when it
        goes on. tokens: of its answer that have come."""
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
                # Of a prompt that another worker computes both are told with its first token.
                at_s = min(last.at_s, clock.perf_counter() - self.began - (note.paused_s or 0.0))
                last = last._replace(
                    at_s=at_s, again_tokens=note.again_tokens, waited_s=note.waited_s, paused_s=note.paused_s
                )
                self.paused = (*self.paused[:-1], tuple(last))
            case Resumed():
                pass  # another worker than told of its beginning
            case Brought():
                self.brought = (
                    *(note.host_tokens, note.disk_tokens, note.read_s, note.predicted_s),
                    note.compute_s,
                )
            case Drafted():
                self.drafted = (note.steps, note.seconds, note.predicted_s, note.without_s)

    def ends(self, finish: Finish, tokens: int, now: float) -> None:
        """Nothing more of it comes."""
        self.finish, self.tokens, self.ended_s = finish, tokens, now - self.began

    @property
    def worker(self) -> str | None:
        """Who had it last; None: nobody has had it."""
        return self.sent[-1][1] if self.sent else None

    def told(self) -> dict[str, Any]:
        """As JSON. Times are in seconds; what is expected is that of a prompt's first token since it was sent."""
        sent = [
            Sent(at_s, worker, computes, moved, Predicted(*expected), tuple(Predicted(*each) for each in instead))
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
            "preemptions": self.preemptions,
            "paused": [_paused(Paused(*each)) for each in self.paused],
            "drafts": {"rounds": self.rounds, "verified": self.drafts, "accepted": self.accepted},
            "steps_with_drafts": _steps(self.drafted),
            "finish": self.finish,
            "ended_s": _rounded(self.ended_s),
        }


class Stories:
    """The stories of the newest jobs, by their request's id."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, tuple[Story, ...]] = OrderedDict()
        self._jobs = 0

    def begin(self, request: str, jobs: Sequence[Story]) -> None:
        """A request is admitted. Another of the same id, which its client may have chosen, is put behind it."""
        before = self._of.pop(request, ())
        self._of[request] = kept = (*before, *jobs)[-MOST_JOBS:]
        self._jobs += len(kept) - len(before)
        while self._jobs > MOST_JOBS:
            _, gone = self._of.popitem(last=False)
            self._jobs -= len(gone)

    def of(self, request: str) -> tuple[Story, ...]:
        """A request's jobs; none where it is not known."""
        return self._of.get(request, ())


def why(sent: Sent, tokens: int) -> str:
    """One line: why a job of so many prompt tokens went where it did."""
    expected, others = sent.expected, sent.instead
    apart = sent.prompt_computed_by != sent.worker
    answers = f"; {sent.worker} answers, as the one with least to do" if apart else ""
    if not others:
        return f"no other worker can take it{answers}"
    most = max(each.cached_tokens for each in others)
    if expected.cached_tokens > most:
        return f"{expected.cached_tokens:,} of its {tokens:,} tokens are cached there, {most:,} elsewhere{answers}"
    queue = min(each.queue_tokens for each in others)
    if expected.queue_tokens < queue:
        return f"{expected.queue_tokens:,} tokens wait there, {queue:,} or more elsewhere{answers}"
    return f"it costs least there: {expected.cost_s:.3f} s, elsewhere {min(e.cost_s for e in others):.3f}{answers}"


def _expected(each: Predicted) -> dict[str, Any]:
    return {
        **each._asdict(),
        **{name: _rounded(value) for name, value in each._asdict().items() if name.endswith("_s")},
        "cost_s": _rounded(each.cost_s),
    }


def _brought(fields: tuple[Any, ...] | None) -> dict[str, Any] | None:
    """What was read from below the prefix cache."""
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
    """The mean of the steps that verified drafts, and were timed."""
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
