"""Synthetic acceptance: how many drafts hold is drawn, not found out: a benchmark's speed has a stated acceptance.

Drafter and verification run in full; only the verdict is drawn. As vLLM and InferenceX define it: rates are
unconditional, the share of rounds in which the first 1, 2 ... drafts all hold; a length is the mean number of tokens
of a round, the target's own among them, with the least variance that there is.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from redline.errors import ConfigError

GOLDEN = (1.83, 2.43, 2.88, 3.24, 3.46)  # tokens of a round with 1, 2 ... drafts: InferenceX's curve for Kimi's EAGLE-3

Acceptance = float | tuple[float, ...]  # a length, or rates


def rates_of(acceptance: Acceptance, drafts: int, place: str) -> tuple[float, ...]:
    """The share of rounds in which the first 1, 2 ... `drafts` drafts all hold.

    A length L is rounds in which all of the first L - 1 rounded down hold, and one more in some. Of rates the first
    `drafts` count. Raises ConfigError, naming `place`, for a length outside 1 to 1 + drafts, fewer rates than drafts,
    rates that rise, and what is no share.
    """
    if isinstance(acceptance, tuple):
        rates = acceptance
        if len(rates) < drafts:
            raise ConfigError(f"{place} has {len(rates)} rates; expected {drafts}: one for each draft of a round")
        if not all(0 <= rate <= 1 for rate in rates) or any(a < b for a, b in pairwise(rates)):
            raise ConfigError(
                f"{place} is {', '.join(f'{rate:g}' for rate in rates)}; expected shares from 0 to 1 that never rise: "
                "in how many rounds the first 1, 2 ... drafts all hold"
            )
        return rates[:drafts]
    if not 1 <= acceptance <= 1 + drafts:
        raise ConfigError(
            f"{place} is {acceptance:g}; expected the mean tokens of a round, 1 to {1 + drafts}: one of the "
            "target's own and its drafts (or rates with a comma, such as 0.83,0.6)"
        )
    whole = math.floor(acceptance - 1)
    return tuple(1.0 if place < whole else acceptance - 1 - whole if place == whole else 0.0 for place in range(drafts))


def length_of(rates: Sequence[float]) -> float:
    """The mean tokens of a round with these rates."""
    return 1 + sum(rates)


def read_acceptance(text: str, place: str) -> Acceptance:
    """A length such as 2.88, or rates with a comma, such as 0.83,0.6,0.45. Raises ConfigError, naming `place`."""
    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise ConfigError(f"{place} is {text!r}; expected a length such as 2.88, or rates such as 0.83,0.6,0.45")
    return tuple(numbers) if "," in text else numbers[0]
