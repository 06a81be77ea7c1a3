"""What requests are promised, and how heavy a second of theirs weighs against it.

    strain(s) = -promised x log(1 - s / promised)

A second weighs 1 where nothing of what is promised is used, 2 where half of it is, 10 where nine tenths are: it takes
that share of what is left. From there on it weighs 10 until the promise is broken, and 1 beyond: a request that is late
anyway loses no more than its time. Sums of strains compare a delay of a first token with one of an answer's tokens, and
that of one request with that of the others that it holds up. Pure.
"""

import math
from typing import NamedTuple

NEARLY = 0.9  # of what is promised: beyond, a second weighs no more than here
HEAVY = 1 / (1 - NEARLY)  # how much it weighs there


class Targets(NamedTuple):
    """Seconds to the first token, and between two tokens of an answer, on its mean. Who keeps both is good.

    Infinite: nothing is promised.
    """

    ttft_s: float = math.inf
    itl_s: float = math.inf


def strain(seconds: float, promised_s: float, beyond: float = 1.0) -> float:
    """So many seconds, as heavy as they weigh against what is promised; where nothing is, as they are.

    beyond: how heavy one is that comes after the promise is broken; HEAVY where it may yet be kept.
    """
    if promised_s == math.inf:
        return seconds
    used = seconds / promised_s
    if used <= NEARLY:
        return -promised_s * math.log1p(-used)
    heavy = -math.log1p(-NEARLY) + (min(used, 1.0) - NEARLY) * HEAVY
    return promised_s * (heavy + max(0.0, used - 1.0) * beyond)
