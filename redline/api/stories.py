"""What became of requests, and why: who got each of their jobs, what was expected of it, and what it took.

Of the newest requests alone, and without a word of their text. `redline explain` and /admin/requests/ID show them.
"""

import time
from collections import OrderedDict
from typing import Any

from redline.route.choose import Predicted
from redline.route.links import Route
from redline.wire.delta import Delta, Finish

MOST_JOBS = 4096  # of which is known what became of them; about 2 KB each


class Story:
    """One job, from its request's arrival on. Seconds count from there, as time.perf_counter tells."""

    __slots__ = (
        "_began",
        "accepted",
        "cached_tokens",
        "choice",
        "drafts",
        "ended_s",
        "finish",
        "first_token_s",
        "prompt_tokens",
        "queued_s",
        "rounds",
        "sent",
        "tokens",
    )

    def __init__(self, choice: int, prompt_tokens: int, began: float) -> None:
        self.choice = choice
        self.prompt_tokens = prompt_tokens
        self.sent: list[tuple[float, Route, str]] = []  # when, whereto, and why it had to move
        self.first_token_s: float | None = None
        self.queued_s: float | None = None
        self.cached_tokens = 0
        self.tokens = 0
        self.rounds = 0  # steps that verified drafts
        self.drafts = 0
        self.accepted = 0
        self.finish: Finish | None = None
        self.ended_s: float | None = None
        self._began = began

    def goes(self, route: Route, why_moved: str) -> None:
        """It is sent to a worker; why_moved: from the one before, where there was one."""
        self.sent.append((time.perf_counter() - self._began, route, why_moved))

    def comes(self, delta: Delta, now: float) -> None:
        """More of its answer has come."""
        if delta.proposed:
            self.rounds += 1
            self.drafts += delta.proposed
            self.accepted += delta.accepted
        if delta.tokens and self.first_token_s is None:
            self.first_token_s, self.queued_s = now - self._began, delta.queued_s
            self.cached_tokens = delta.cached_tokens

    def ends(self, finish: Finish, tokens: int, now: float) -> None:
        """Nothing more of it comes."""
        self.finish, self.tokens, self.ended_s = finish, tokens, now - self._began

    @property
    def worker(self) -> str | None:
        """Who had it last; None: nobody has had it."""
        return self.sent[-1][1].link.name if self.sent else None

    def told(self) -> dict[str, Any]:
        """As JSON. Times are in seconds; what is expected is that of a prompt's first token since it was sent."""
        waited = None
        if self.first_token_s is not None and self.sent:
            waited = self.first_token_s - self.sent[-1][0]
        return {
            "choice": self.choice,
            "prompt_tokens": self.prompt_tokens,
            "sent": [
                {
                    "at_s": round(at, 4),
                    "worker": route.link.name,
                    "prompt_computed_by": (route.prefill or route.link).name,
                    "why": why(route, self.prompt_tokens),
                    "moved_because": moved or None,
                    "expected": _expected(route.expected),
                    "instead": [_expected(each) for each in route.instead],
                }
                for at, route, moved in self.sent
            ],
            "first_token_s": _rounded(self.first_token_s),
            "first_token_since_sent_s": _rounded(waited),
            "queued_s": _rounded(self.queued_s),
            "cached_tokens": self.cached_tokens,
            "tokens": self.tokens,
            "drafts": {"rounds": self.rounds, "verified": self.drafts, "accepted": self.accepted},
            "finish": self.finish,
            "ended_s": _rounded(self.ended_s),
        }


class Stories:
    """The stories of the newest jobs, by their request's id."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, list[Story]] = OrderedDict()
        self._jobs = 0

    def begin(self, request: str, jobs: list[Story]) -> None:
        """A request is admitted. Another of the same id, which its client may have chosen, is put behind it."""
        self._of.setdefault(request, []).extend(jobs)
        self._of.move_to_end(request)
        self._jobs += len(jobs)
        while self._jobs > MOST_JOBS and len(self._of) > 1:
            _, gone = self._of.popitem(last=False)
            self._jobs -= len(gone)
        if self._jobs > MOST_JOBS:
            kept = self._of[request]
            self._jobs -= len(kept) - MOST_JOBS
            del kept[:-MOST_JOBS]

    def of(self, request: str) -> list[Story]:
        """A request's jobs; none where it is not known."""
        return self._of.get(request, [])


def why(route: Route, tokens: int) -> str:
    """One line: why a job of so many prompt tokens went where it did."""
    expected, others = route.expected, route.instead
    answers = f"; {route.link.name} answers, as the one with least to do" if route.prefill is not None else ""
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
        "token_s": round(each.token_s, 8),
        "first_token_s": _rounded(each.first_token_s),
        "cost_s": _rounded(each.cost_s),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
