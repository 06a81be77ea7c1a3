"""When each request of an open load is planned to be sent.

The times between two requests are drawn from a gamma distribution, whose shape is the burstiness and whose mean is one
over the rate. What a few hundred draws add up to lies some per cent beside what the rate asks for, so they are all
scaled by one factor until the last request is planned at count / rate, as `vllm bench serve` does: two runs of one rate
then differ in the spacing and not in the load. A ramp's rate changes with each request, and its times stay as drawn.
"""

import math
import random
from itertools import accumulate

from redline.bench.serving.target import Pace
from redline.errors import ConfigError


def planned(count: int, pace: Pace) -> list[float] | None:
    """Planned times of `count` requests, seconds from the run's beginning, rising; None where no schedule is asked for.

    Without a schedule (an infinite rate and no ramp) a request is due when a place is free. The same seed gives the
    same times. Raises ConfigError for a pace that cannot be kept.
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


def check(pace: Pace) -> None:
    """Raises ConfigError, naming the flag, where a pace cannot be kept."""
    if not pace.rate > 0:
        raise ConfigError(f"--request-rate {pace.rate:g}: it has to be above 0, or inf")
    if not pace.burstiness > 0:
        raise ConfigError(f"--burstiness {pace.burstiness:g}: it has to be above 0; 1 is a Poisson process")
    if pace.max_concurrency is not None and pace.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {pace.max_concurrency}: it has to be 1 or more")
    if pace.warmups < 0:
        raise ConfigError(f"--num-warmups {pace.warmups}: it cannot be negative")
    if pace.deadline is not None and not pace.deadline > 0:
        raise ConfigError(f"the deadline of {pace.deadline:g} s: it has to be above 0")
    ramp = pace.ramp
    if ramp is None:
        return
    if ramp.strategy not in ("linear", "exponential"):
        raise ConfigError(f"--ramp-up-strategy {ramp.strategy!r}: it is linear or exponential")
    if not (0 < ramp.start < math.inf and 0 < ramp.end < math.inf):
        raise ConfigError(f"a ramp from {ramp.start:g} to {ramp.end:g} requests/s: both have to be above 0 and finite")


def _rate(place: int, count: int, pace: Pace) -> float:
    """Requests/s when the request at `place` is due."""
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
