"""How many tokens to draft behind each row, and whether the learned drafter pays at all.

One objective: expected tokens per millisecond of the whole step. A row with k drafts gives one token and as many more
as hold. All rows of a step draft as many: on a GPU each costs what the longest one does anyway.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from redline.tune.costs import RoundTimes

PATIENCE = 4  # decisions that must say the same, one after another, before the learned drafter is left or taken up
LEAVE, TAKE_UP = 1.05, 1.15  # left below, taken up above this gain: reading prompts, and choosing, cost time too
LEAST = 1.05  # what drafts must bring, to be asked for at all: what is known of them is an estimate


@dataclass(frozen=True)
class Rows:
    """Rows of a step with drafts of one source.

    count     how many
    survival  the probability that the first 1, 2 ... drafts of a row all hold
    share     of these rows, those that have any drafts
    """

    count: int
    survival: Sequence[float]
    share: float = 1.0

    def tokens(self) -> list[float]:
        """What is expected of all these rows with 0, 1, 2 ... drafts each."""
        return [self.count * (1 + self.share * held) for held in itertools.accumulate(self.survival, initial=0.0)]


def choose(learned: Rows, suffix: Rows, times: RoundTimes) -> int:
    """The drafts behind each row that give the most tokens per millisecond; the most of several that give as many. None
    where that is less than LEAST times what no drafts give.

    learned: rows that the learned drafter follows. suffix: all others, whose drafts cost nothing to make. Where nothing
    was measured, all drafts seem free.
    """
    rows = learned.count + suffix.count
    drafted = learned.count + suffix.share * suffix.count
    rates = [
        (one + other) / times.ms(rows, depth, learned.count, drafted)
        for depth, (one, other) in enumerate(zip(learned.tokens(), suffix.tokens(), strict=True))
    ]
    best = max(reversed(range(len(rates))), key=rates.__getitem__)
    return best if rates[best] >= LEAST * rates[0] else 0


def gain(survival: Sequence[float], rows: int, times: RoundTimes) -> float:
    """How many times faster `rows` rows are with the learned drafter, at the best length, than with no drafts.

    survival: the probability that a row's first 1, 2 ... drafts all hold.
    """
    tokens = Rows(rows, survival).tokens()
    best = max(given / times.ms(rows, depth, rows) for depth, given in enumerate(tokens))
    return best * times.ms(rows, 0, 0) / rows


@dataclass(frozen=True)
class Worth:
    """Whether the learned drafter pays. It changes slowly: a job that the drafter leaves is lost to it.

    against: decisions, one after another, that have said the contrary of `pays`.
    """

    pays: bool = True
    against: int = 0

    def seen(self, gain: float) -> "Worth":
        """After one more decision, at which the learned drafter made rows `gain` times faster (see `gain`)."""
        other = gain < LEAVE if self.pays else gain > TAKE_UP
        against = self.against + 1 if other else 0
        return Worth(not self.pays) if against >= PATIENCE else Worth(self.pays, against)
