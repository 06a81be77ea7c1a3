"""SLO targets of requests, and how much each second of latency weighs against a target.

    strain(s) = -promised x log(1 - s / promised)

A second weighs 1 when none of the target is used, 2 when half of it is, and 10 when nine tenths are: the weight is the
target over the time that is left. Above nine tenths it stays 10 until the target is missed, and is 1 after that: a
request that is late anyway loses no more than its time. Sums of strain compare a delay of one request's first token
with a delay of another's tokens, and the latency of one request with that of the requests that it delays. Pure
functions.
"""

import math
from typing import NamedTuple

NEARLY = 0.9  # share of the target above which the weight no longer rises
HEAVY = 1 / (1 - NEARLY)  # weight of a second at that share


class Targets(NamedTuple):
    """SLO targets in seconds: time to first token, and mean time between two tokens of a request. A request that meets
    both is good.

    Infinite: no target.
    """

    ttft_s: float = math.inf
    itl_s: float = math.inf


def strain(seconds: float, promised_s: float, beyond: float = 1.0) -> float:
    """SLO-weighted latency of `seconds` seconds against the target `promised_s`; without a target, the seconds
    themselves.

    beyond: weight of a second after the target is missed; HEAVY if the target may yet be met.
    """
    if promised_s == math.inf:
        return seconds
    used = seconds / promised_s
    if used <= NEARLY:
        return -promised_s * math.log1p(-used)
    heavy = -math.log1p(-NEARLY) + (min(used, 1.0) - NEARLY) * HEAVY
    return promised_s * (heavy + max(0.0, used - 1.0) * beyond)
