"""Autoscaling: the number of workers, from recent estimates of the number needed and the time that a start takes.

A `Look` is one estimate of how many workers meet the SLO targets with room for traffic that may arrive while another
worker starts. Workers are added once several consecutive estimates were higher than the number running, and removed
once no estimate has been higher than the lower number for a long time. While a worker starts it costs money and serves
no requests. So the longer a start takes, the longer the demand must last before one is started, and the longer a
running worker is kept. Pure functions.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from redline.messages.news import Role
from redline.policy.expected import Roles

CONFIRM = 2  # consecutive estimates, at least, that must ask for more before a worker is started
WANTED_STARTS = 0.1  # times the start time: how long more workers must have been wanted
KEPT_STARTS = 2  # times the start time: how long fewer workers must have been enough before one is stopped
NEWEST = 0.25  # the newest share of the window, in which a rise is detected before it fills the window


class Look(NamedTuple):
    """One estimate. at: its time in seconds. workers: enough workers, with room (`policy.roles.RoleChoice.ample`)."""

    at: float
    workers: int


class ScalingLimits(NamedTuple):
    """Bounds on the number of workers, and the cost of a change.

    least, most: running workers, at least and at most. spare_s: seconds that fewer workers must have been enough, at
    least, before one is stopped. start_s: seconds from a worker's start until it takes requests.
    """

    least: int
    most: int
    spare_s: float
    start_s: float

    @property
    def kept_s(self) -> float:
        """Seconds that fewer workers must have been enough before one is stopped."""
        return max(self.spare_s, KEPT_STARTS * self.start_s)


class Count(NamedTuple):
    """The number of workers to run, and the reason."""

    workers: int
    why: str


def choose_count(looks: Sequence[Look], running: int, limits: ScalingLimits, now: float) -> Count:
    """The number of workers to run. looks: the newest last. running: running workers, including those that are
    starting. now: in seconds, by the clock of the looks."""
    since = now - WANTED_STARTS * limits.start_s
    newest = [look.workers for place, look in enumerate(looks) if look.at >= since or place >= len(looks) - CONFIRM]
    wanted = min(newest) if len(newest) >= CONFIRM and looks[0].at <= since else 0
    more = min(wanted, limits.most)
    if more > running:
        return Count(more, f"{wanted} workers are needed to meet the SLO targets, {running} are running")
    if running < limits.least:
        return Count(limits.least, f"the minimum is {limits.least} workers, {running} are running")
    lately = _wanted_lately(looks, limits.kept_s, now)
    fewer = running if lately is None else max(limits.least, lately)
    if fewer < running:
        why = f"{running} workers are running, and at most {fewer} were needed in the last {limits.kept_s:.0f} s"
        return Count(fewer, why)
    return Count(running, f"{running} workers are running, {wanted} are needed")


def rising(rate: float, newest: int, seconds: float) -> float:
    """The request rate for which to size the fleet, in requests per second: `rate`, that of the whole window, or the
    rate of the `newest` requests in its last `seconds` seconds, minus one standard deviation, if that is higher."""
    return max(rate, (newest - math.sqrt(newest)) / seconds)


def role_of_another(now: Roles, wanted: Roles) -> Role:
    """The role of one more worker. now: roles of the running workers. wanted: the best roles with one worker more,
    by prediction. Prefill is not split from decode on a prediction alone: if no worker has the prefill role now, the
    new one gets "both"."""
    if not now.prefill:
        return "both"
    return "prefill" if wanted.prefill > now.prefill else "decode"


def forgotten(looks: Sequence[Look], seconds: float, now: float) -> int:
    """How many of the oldest looks can be dropped: all older than `seconds` but one, which shows that the others
    cover the whole time."""
    old = sum(look.at < now - seconds for look in looks)
    return max(0, min(old - 1, len(looks) - CONFIRM))


def _wanted_lately(looks: Sequence[Look], seconds: float, now: float) -> int | None:
    """The highest number of workers that any look of the last `seconds` seconds wanted; None if the looks do not go
    back that far."""
    if not looks or looks[0].at > now - seconds:
        return None
    return max((look.workers for look in looks if look.at >= now - seconds), default=None)
