"""Chooses the number of draft tokens per row, and whether the learned drafter pays off.

The objective is expected tokens per millisecond of the whole step. A row with k drafts gives one token plus one for
each accepted draft. All rows of a step get the same number of drafts: on a GPU each row costs what the longest one
does.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from redline.policy.costs import RoundTimes

PATIENCE = 4  # consecutive decisions that must agree before the learned drafter is switched off or on
# gain below which the drafter is switched off, and above which it is switched on: reading prompts, and choosing, cost
# time too
LEAVE, TAKE_UP = 1.05, 1.15
LEAST = 1.05  # expected gain below which no drafts are requested: the acceptance rates are estimates


@dataclass(frozen=True)
class DraftingRows:
    """Rows of a step with drafts of the same source.

    count     number of rows
    survival  the probability that the first 1, 2 ... drafts of a row are all accepted
    share     share of these rows that have any drafts
    """

    count: int
    survival: Sequence[float]
    share: float = 1.0

    def tokens(self) -> list[float]:
        """Expected tokens of all these rows with 0, 1, 2 ... drafts each."""
        return [self.count * (1 + self.share * held) for held in itertools.accumulate(self.survival, initial=0.0)]


def choose(learned: DraftingRows, suffix: DraftingRows, times: RoundTimes) -> int:
    """The number of drafts per row with the most expected tokens per millisecond; of several equally good numbers the
    largest. 0 if the best one gives less than LEAST times the tokens per millisecond of no drafts.

    learned: rows that the learned drafter follows. suffix: all other rows; their drafts come from suffix matches at no
    cost. If no step times were measured, drafts are taken to be free.
    """
    rows = learned.count + suffix.count
    drafted = learned.count + suffix.share * suffix.count
    rates = [
        (one + other) / times.ms(rows, depth, learned.count, drafted)
        for depth, (one, other) in enumerate(zip(learned.tokens(), suffix.tokens(), strict=True))
    ]
    best = max(reversed(range(len(rates))), key=rates.__getitem__)
    return best if rates[best] >= LEAST * rates[0] else 0


def least_survival(rows: int, depth: int, tokens: float, followed: int, times: RoundTimes) -> float:
    """The probability of acceptance from which on verifying one more draft of a row pays off: the time of a position
    over the time of a token, in a step of `rows` rows with `depth` drafts each that gives `tokens` tokens."""
    return min(1.0, times.position_share(rows, depth, followed) * tokens) if depth else 0.0


def gain(survival: Sequence[float], rows: int, times: RoundTimes) -> float:
    """Speedup of `rows` rows with the learned drafter, at the best number of drafts, compared with no drafts.

    survival: the probability that a row's first 1, 2 ... drafts are all accepted.
    """
    tokens = DraftingRows(rows, survival).tokens()
    best = max(given / times.ms(rows, depth, rows) for depth, given in enumerate(tokens))
    return best * times.ms(rows, 0, 0) / rows


@dataclass(frozen=True)
class Worth:
    """Whether the learned drafter pays off. Switching is slow on purpose: the drafter cannot resume a job that it has
    stopped following.

    against: consecutive decisions so far that contradict `pays`.
    """

    pays: bool = True
    against: int = 0

    def seen(self, gain: float) -> "Worth":
        """The state after one more decision, at which the learned drafter made rows `gain` times faster (see
        `gain`)."""
        other = gain < LEAVE if self.pays else gain > TAKE_UP
        against = self.against + 1 if other else 0
        return Worth(not self.pays) if against >= PATIENCE else Worth(self.pays, against)
