"""SLO attainment: the targets of each class, and how many requests met them.

A class is a table of the deployment, [sla.NAME], to which keys refer; all other requests belong to DEFAULT_SLA. A
request meets the TTFT target, the ITL target, both or neither. As everywhere, a choice counts as a request.

    first token   from the request's arrival
    pace          (last token - first token) / (tokens - 1): one long gap is not visible among many tokens

A request that ends with an error misses both. If its client disconnects, a request is judged by the tokens so far; if
there were none and it was not late yet, it is not counted.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from redline import clock
from redline.api.config import DEFAULT_SLA, Sla
from redline.api.telemetry.metrics import Metrics
from redline.messages.delta import Finish
from redline.policy.targets import Targets

LATELY_S = 60.0  # window of the recent counts in the status
MOST_LATELY = 4096  # requests kept for the recent counts, per class


class RequestTimes(NamedTuple):
    """Seconds of a request that has ended. first_token: None if it had none. pace: None with fewer than two tokens."""

    whole: float
    first_token: float | None
    pace: float | None


class TargetsMet(NamedTuple):
    """The targets that a request has met."""

    ttft: bool
    itl: bool


def targets_of(slas: Mapping[str, Sla]) -> dict[str, Targets]:
    """SLO targets by class; "" holds those of all other requests. A missing target is infinite."""

    def seconds(most_ms: float | None) -> float:
        return math.inf if most_ms is None else most_ms / 1e3

    found = {name: Targets(seconds(sla.ttft_ms), seconds(sla.itl_ms)) for name, sla in slas.items()}
    return {**found, "": found.get(DEFAULT_SLA, Targets())}


class Attainment:
    """Counts per class, since the start and recent. Requests of a class without targets are not counted."""

    def __init__(
        self, targets: Mapping[str, Sla], metrics: Metrics, clock: Callable[[], float] = clock.monotonic
    ) -> None:
        """clock: seconds, for the window of recent counts."""
        self.targets = targets
        self._metrics = metrics
        self._clock = clock
        self._counts = {name: dict.fromkeys(_all(), 0) for name in targets}
        self._lately: dict[str, deque[tuple[float, TargetsMet]]] = {name: deque(maxlen=MOST_LATELY) for name in targets}
        for name, target in targets.items():
            metrics.promised(name, target.ttft_ms, target.itl_ms)

    def ended(self, of: str, took: RequestTimes, finish: Finish) -> None:
        """Count a request of a class that has ended; a class without its own targets has those of DEFAULT_SLA."""
        name = of if of in self.targets else DEFAULT_SLA
        if (target := self.targets.get(name)) is None or (kept := keeps(target, took, finish)) is None:
            return
        self._counts[name][kept] += 1
        self._lately[name].append((self._clock(), kept))
        self._metrics.kept(name, ttft=kept.ttft, itl=kept.itl)

    def told(self) -> dict[str, Any]:
        """As JSON: the targets, and how many requests met them, in total and in the last LATELY_S."""
        now, told = self._clock(), dict[str, Any]()
        for name, target in self.targets.items():
            lately = self._lately[name]
            while lately and now - lately[0][0] > LATELY_S:
                lately.popleft()
            newest = [kept for _, kept in lately]
            told[name] = {
                "ttft_ms": target.ttft_ms,
                "itl_ms": target.itl_ms,
                **_told(self._counts[name]),
                "last_minute": _told({kept: newest.count(kept) for kept in _all()}),
            }
        return told


def keeps(target: Sla, took: RequestTimes, finish: Finish) -> TargetsMet | None:
    """The targets that a request has met; None if that cannot be determined."""
    if finish == "error":
        return TargetsMet(ttft=False, itl=False)
    if took.first_token is None and finish == "aborted" and _within(took.whole, target.ttft_ms):
        return None
    waited = took.whole if took.first_token is None else took.first_token
    return TargetsMet(_within(waited, target.ttft_ms), took.pace is None or _within(took.pace, target.itl_ms))


def _within(seconds: float, most_ms: float | None) -> bool:
    return most_ms is None or seconds * 1000 <= most_ms


def _all() -> list[TargetsMet]:
    return [TargetsMet(ttft, itl) for ttft in (True, False) for itl in (True, False)]


def _told(counts: Mapping[TargetsMet, int]) -> dict[str, int]:
    return {
        "requests": sum(counts.values()),
        "ttft_met": sum(count for kept, count in counts.items() if kept.ttft),
        "itl_met": sum(count for kept, count in counts.items() if kept.itl),
        "both_met": counts[TargetsMet(ttft=True, itl=True)],
    }
