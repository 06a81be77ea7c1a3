"""How many workers run: what looks at the traffic have said lately, and what it costs to start one.

A look says how many workers keep what is promised with room for what may come while another starts. More are started
once looks have wanted more for a while, fewer run once no look has wanted more for long. A start takes time in which a
worker costs and does nothing. So the longer it takes, the longer have looks to want it, and the longer is one that runs
kept. Pure.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from redline.tune.expected import Roles
from redline.wire.news import Role

CONFIRM = 2  # looks in a row, at least, that want more before one is started
WANTED_STARTS = 0.1  # times what a start takes, for which looks have to want it
KEPT_STARTS = 2  # likewise, for which fewer have to be enough before one ends
NEWEST = 0.25  # of the window: in it a rise is seen before it fills the window


class Look(NamedTuple):
    """What one look said. at: seconds. workers: that are enough with room (`tune.roles.Choice.ample`)."""

    at: float
    workers: int


class Limits(NamedTuple):
    """How many workers there may be, and what a change costs.

    least, most: workers that run. spare_s: for which fewer have to be enough, at least. start_s: from a worker's start
    until it takes requests.
    """

    least: int
    most: int
    spare_s: float
    start_s: float

    @property
    def kept_s(self) -> float:
        """For so long fewer have to be enough before one ends."""
        return max(self.spare_s, KEPT_STARTS * self.start_s)


class Count(NamedTuple):
    """How many workers are to run, and why."""

    workers: int
    why: str


def choose_count(looks: Sequence[Look], running: int, limits: Limits, now: float) -> Count:
    """How many workers are to run. looks: the newest last. running: workers, those that are being started included.
    now: in seconds, by the clock of the looks."""
    since = now - WANTED_STARTS * limits.start_s
    newest = [look.workers for place, look in enumerate(looks) if look.at >= since or place >= len(looks) - CONFIRM]
    wanted = min(newest) if len(newest) >= CONFIRM and looks[0].at <= since else 0
    more = min(wanted, limits.most)
    if more > running:
        return Count(more, f"to keep what is promised {wanted} workers are wanted, and {running} run")
    if running < limits.least:
        return Count(limits.least, f"{limits.least} workers are to run in any case, and {running} run")
    lately = _wanted_lately(looks, limits.kept_s, now)
    fewer = running if lately is None else max(limits.least, lately)
    if fewer < running:
        why = f"{running} workers run, and no more than {fewer} were wanted for {limits.kept_s:.0f} s"
        return Count(fewer, why)
    return Count(running, f"{running} workers run, and {wanted} are wanted")


def rising(rate: float, newest: int, seconds: float) -> float:
    """Requests a second to count workers by. rate: of the whole window; or of the newest, which came in so many seconds
    at its end, where even one deviation less of these is more."""
    return max(rate, (newest - math.sqrt(newest)) / seconds)


def role_of_another(now: Roles, wanted: Roles) -> Role:
    """What one more worker is to do. now: roles of those that run; wanted: the best of one more, by prediction, which
    parts no prompts from answers where nobody has tried that."""
    if not now.prefill:
        return "both"
    return "prefill" if wanted.prefill > now.prefill else "decode"


def forgotten(looks: Sequence[Look], seconds: float, now: float) -> int:
    """How many of the oldest looks say nothing any more: all older than that but one, by which it is known that the
    others go back so far."""
    old = sum(look.at < now - seconds for look in looks)
    return max(0, min(old - 1, len(looks) - CONFIRM))


def _wanted_lately(looks: Sequence[Look], seconds: float, now: float) -> int | None:
    """The most workers that a look of the last so many seconds wanted; None where looks do not go back so far."""
    if not looks or looks[0].at > now - seconds:
        return None
    return max((look.workers for look in looks if look.at >= now - seconds), default=None)
