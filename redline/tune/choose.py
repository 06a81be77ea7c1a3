"""How many tokens to draft for each row, and whether the learned drafter pays at all.

One objective: expected tokens per millisecond of the whole step. A row with k drafts gives one token and as many more
as hold. First the best length that is the same for all rows, which is all there is to choose where every row costs what
the longest does. Else, at the rate that it reaches, a draft of a row is worth its place when the chance that it holds,
over what its position costs, is above that rate; the better of the two is taken.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from redline.tune.costs import StepCosts

PATIENCE = 4  # decisions that must say the same, one after another, before the learned drafter is left or taken up
LEAVE, TAKE_UP = 1.03, 1.08  # left below, taken up above this gain: reading prompts, and choosing, cost time too


def choose(survivals: Sequence[Sequence[float]], drafting: Sequence[bool], costs: StepCosts) -> list[int]:
    """The most drafts to propose for each row.

    survivals: for each row, the probability that its first 1, 2 ... drafts all hold; as long as the row may draft.
    drafting: whether the learned drafter works for the row; other rows' drafts cost nothing to make.
    """
    rows, deepest = len(survivals), max(map(len, survivals), default=0)
    best, rate = [0] * rows, 0.0
    if not deepest:
        return best
    if not costs.known:
        return [len(chances) for chances in survivals]
    gains = [list(itertools.accumulate(chances, initial=1.0)) for chances in survivals]  # [row][drafts]: tokens
    for depth in range(deepest + 1):
        lengths = [min(depth, len(chances)) for chances in survivals]
        found = tokens_per_ms(gains, drafting, lengths, costs)
        if found >= rate:
            best, rate = lengths, found
    if rows == 1 or costs.padded:
        return best
    price = rate * _position_ms(rows, sum(best), costs)
    paying = [sum(1 for chance in chances if chance > price) for chances in survivals]
    for depth in range(deepest + 1):  # a pass more of the learned drafter is paid for by all
        lengths = [min(depth, most) if learned else most for most, learned in zip(paying, drafting, strict=True)]
        found = tokens_per_ms(gains, drafting, lengths, costs)
        if found > rate:
            best, rate = lengths, found
    return best


def tokens_per_ms(
    gains: Sequence[Sequence[float]], drafting: Sequence[bool], lengths: Sequence[int], costs: StepCosts
) -> float:
    """Expected tokens per millisecond of a step with these lengths, if every step is like it.

    gains: for each row, the tokens that are expected of it with 0, 1, 2 ... drafts. drafting: as in `choose`. lengths:
    drafts of each row.
    """
    given = [gain[length] for gain, length in zip(gains, lengths, strict=True)]
    passes = costs.passes(list(itertools.compress(lengths, drafting)))
    return sum(given) / costs.step_ms(len(lengths), costs.positions(lengths), passes)


def gain(survival: Sequence[float], rows: int, costs: StepCosts) -> float:
    """How many times faster `rows` rows are with the learned drafter, at the best length, than with no drafts.

    survival: the probability that a row's first 1, 2 ... drafts all hold.
    """
    best, each = 0.0, 1.0
    for depth in range(len(survival) + 1):
        each += survival[depth - 1] if depth else 0.0
        passes = [rows] * max(1, depth)
        best = max(best, rows * each / costs.step_ms(rows, rows * (1 + depth), passes))
    return best / (rows / costs.step_ms(rows, rows))


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


def _position_ms(rows: int, drafts: int, costs: StepCosts) -> float:
    """Milliseconds of one position more, around a step of `rows` rows with `drafts` drafts together."""
    low, high = rows + max(0, drafts - rows), rows + drafts + rows
    return max(0.0, costs.step_ms(rows, high) - costs.step_ms(rows, low)) / (high - low)
