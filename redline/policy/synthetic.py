"""Synthetic acceptance: the number of accepted drafts is drawn from given rates, so that a benchmark has a stated
acceptance length.

Drafter and verification run in full; only the number of accepted drafts is drawn. As defined by vLLM and InferenceX:
rates are unconditional, the share of rounds in which the first 1, 2 ... drafts are all accepted; a length is the mean
number of tokens per round, including the target model's own token, with the smallest possible variance.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from redline.errors import ConfigError

GOLDEN = (1.83, 2.43, 2.88, 3.24, 3.46)  # tokens per round with 1, 2 ... drafts: InferenceX's curve for Kimi's EAGLE-3
# Of a block's drafts, each if those before it are accepted. Derived: with equal probabilities, 7 drafts give the 5.3
# tokens per round that z-lab/Kimi-K2.5-DFlash (a block of 8) is published with on GSM8K.
GOLDEN_BLOCK = 0.878
GOLDEN_BLOCK_DRAFTS = 7

Acceptance = float | tuple[float, ...]  # acceptance length, or rates


def rates_of(acceptance: Acceptance, drafts: int, place: str) -> tuple[float, ...]:
    """The share of rounds in which the first 1, 2 ... `drafts` drafts are all accepted.

    With a length L the first floor(L - 1) drafts of every round are accepted, and one more in some rounds. Of rates the
    first `drafts` are used. Raises ConfigError, naming `place`, if a length is outside 1 to 1 + drafts, if there are
    fewer rates than drafts, if rates increase, and if a rate is not in 0 to 1.
    """
    if isinstance(acceptance, tuple):
        rates = acceptance
        if len(rates) < drafts:
            raise ConfigError(f"{place} has {len(rates)} rates; expected {drafts}: one per draft of a round")
        if not all(0 <= rate <= 1 for rate in rates) or any(a < b for a, b in pairwise(rates)):
            raise ConfigError(
                f"{place} is {', '.join(f'{rate:g}' for rate in rates)}; expected shares from 0 to 1 that never rise: "
                "the share of rounds in which the first 1, 2 ... drafts are all accepted"
            )
        return rates[:drafts]
    if not 1 <= acceptance <= 1 + drafts:
        raise ConfigError(
            f"{place} is {acceptance:g}; expected a mean number of tokens per round, 1 to {1 + drafts}: one of the "
            "target's own and its drafts (or rates with a comma, such as 0.83,0.6)"
        )
    whole = math.floor(acceptance - 1)
    return tuple(1.0 if place < whole else acceptance - 1 - whole if place == whole else 0.0 for place in range(drafts))


def length_of(rates: Sequence[float]) -> float:
    """The mean number of tokens per round with these rates."""
    return 1 + sum(rates)


def golden_block(drafts: int) -> float:
    """Mean tokens per round if each of a block's first `drafts` drafts is accepted with GOLDEN_BLOCK."""
    return sum(GOLDEN_BLOCK**number for number in range(drafts + 1))


def read_acceptance(text: str, place: str) -> Acceptance:
    """Parses a length such as 2.88, or comma-separated rates such as 0.83,0.6,0.45. Raises ConfigError, naming
    `place`."""
    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise ConfigError(f"{place} is {text!r}; expected a length such as 2.88, or rates such as 0.83,0.6,0.45")
    return tuple(numbers) if "," in text else numbers[0]
