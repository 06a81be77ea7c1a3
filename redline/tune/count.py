"""How many workers run: what looks at the traffic have said lately, and what it costs to start one.

A look says how many are wanted, and how many would be ample should more come. More are started once CONFIRM looks in a
row have wanted more; fewer run once, for a long time, no look has said that they would not be ample. A start takes time
in which a worker costs and does nothing: it is not begun where it would take longer than what comes is looked ahead,
and one that runs is kept for at least KEPT_STARTS times as long as starting it anew would take. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

CONFIRM = 2  # looks in a row that want more, before one is started
KEPT_STARTS = 2  # times what a start takes, for which fewer have to be ample before one ends


class Look(NamedTuple):
    """What one look said. at: seconds. wanted, ample: workers, as in `tune.roles.Choice`."""

    at: float
    wanted: int
    ample: int


class Limits(NamedTuple):
    """How many workers there may be, and what a change costs.

    least, most: workers that run. spare_s: for which fewer have to be ample. start_s: from a worker's start until it
    takes requests. horizon_s: over which a start has to pay.
    """

    least: int
    most: int
    spare_s: float
    start_s: float
    horizon_s: float

    @property
    def kept_s(self) -> float:
        """For so long fewer have to be ample before one ends."""
        return max(self.spare_s, KEPT_STARTS * self.start_s)


class Count(NamedTuple):
    """How many workers are to run, and why."""

    workers: int
    why: str


def choose_count(looks: Sequence[Look], running: int, limits: Limits, now: float) -> Count:
    """How many workers are to run. looks: the newest last. running: workers, those that are being started included.
    now: in seconds, by the clock of the looks."""
    wanted = min((look.wanted for look in looks[-CONFIRM:]), default=0) if len(looks) >= CONFIRM else 0
    more = min(wanted, limits.most)
    if more > running:
        if limits.start_s >= limits.horizon_s:
            why = f"{wanted} workers are wanted, but a start takes {limits.start_s:.0f} s of {limits.horizon_s:.0f}"
            return Count(running, f"{why}: it does not pay")
        return Count(more, f"to keep what is promised {wanted} workers are wanted, and {running} run")
    if running < limits.least:
        return Count(limits.least, f"{limits.least} workers are to run in any case, and {running} run")
    ample = ample_lately(looks, limits.kept_s, now)
    fewer = running if ample is None else max(limits.least, ample)
    if fewer < running:
        why = f"{running} workers run, and no more than {fewer} were wanted, with room, for {limits.kept_s:.0f} s"
        return Count(fewer, why)
    return Count(running, f"{running} workers run, and {wanted} are wanted")


def ample_lately(looks: Sequence[Look], seconds: float, now: float) -> int | None:
    """The most workers that a look of the last so many seconds wanted, with room; None where looks do not go back so
    far."""
    if not looks or looks[0].at > now - seconds:
        return None
    return max((max(look.wanted, look.ample) for look in looks if look.at >= now - seconds), default=None)


def forgotten(looks: Sequence[Look], seconds: float, now: float) -> int:
    """How many of the oldest looks say nothing any more: all older than that but one, by which it is known that the
    others go back so far."""
    old = sum(look.at < now - seconds for look in looks)
    return max(0, min(old - 1, len(looks) - CONFIRM))
