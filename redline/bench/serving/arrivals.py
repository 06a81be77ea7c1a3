"""Planned arrival times of the requests of an open load.

The times between requests are drawn from a gamma distribution, with the burstiness as its shape and 1 / rate as its
mean. The sum of a few hundred draws differs from the target by some per cent, so all times are scaled by one factor
that puts the last request at count / rate, as in `vllm bench serve`: two runs at one rate then differ in spacing, not
in load. A ramp's rate changes with each request, and its times stay as drawn.
"""

import math
import random
from itertools import accumulate

from redline.bench.serving.target import LoadPace
from redline.errors import ConfigError


def planned(count: int, pace: LoadPace) -> list[float] | None:
    """Planned times of `count` requests, in seconds from the start of the run, rising; None without a schedule.

    Without a schedule (an infinite rate and no ramp) a request is sent as soon as max_concurrency allows. The same seed
    gives the same times. Raises ConfigError for an invalid pace.
    """
    check(pace)
    if pace.ramp is None and math.isinf(pace.rate):
        return None
    chance = random.Random(pace.seed)
    gaps = [_gap(_rate(place, count, pace), pace.burstiness, chance) for place in range(count)]
    times = list(accumulate(gaps))
    if pace.ramp is None and times and times[-1] > 0:
        scale = count / pace.rate / times[-1]
        times = [time * scale for time in times]
    return times


def check(pace: LoadPace) -> None:
    """Raises ConfigError, naming the flag, for an invalid pace."""
    if not pace.rate > 0:
        raise ConfigError(f"--request-rate {pace.rate:g}: must be above 0, or inf")
    if not pace.burstiness > 0:
        raise ConfigError(f"--burstiness {pace.burstiness:g}: must be above 0; 1 is a Poisson process")
    if pace.max_concurrency is not None and pace.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {pace.max_concurrency}: must be at least 1")
    if pace.warmups < 0:
        raise ConfigError(f"--num-warmups {pace.warmups}: must not be negative")
    if pace.deadline is not None and not pace.deadline > 0:
        raise ConfigError(f"the deadline of {pace.deadline:g} s: must be above 0")
    ramp = pace.ramp
    if ramp is None:
        return
    if ramp.strategy not in ("linear", "exponential"):
        raise ConfigError(f"--ramp-up-strategy {ramp.strategy!r}: must be linear or exponential")
    if not (0 < ramp.start < math.inf and 0 < ramp.end < math.inf):
        raise ConfigError(f"a ramp from {ramp.start:g} to {ramp.end:g} requests/s: both must be above 0 and finite")


def _rate(place: int, count: int, pace: LoadPace) -> float:
    """Requests/s at the time of request number `place`."""
    ramp = pace.ramp
    if ramp is None:
        return pace.rate
    progress = place / max(count - 1, 1)
    if ramp.strategy == "linear":
        return ramp.start + (ramp.end - ramp.start) * progress
    return ramp.start * (ramp.end / ramp.start) ** progress


def _gap(rate: float, burstiness: float, chance: random.Random) -> float:
    if math.isinf(burstiness):
        return 1 / rate
    return chance.gammavariate(burstiness, 1 / (rate * burstiness))
