"""What a step costs: milliseconds by rows, positions and drafter passes.

`StepCosts` is a small grid that is measured once (rows x positions per row, and a drafter pass by its positions) and
read by linear interpolation. `RoundTimes` corrects it by what steps then really take: a common scale, since contexts
grow and machines slow down as a whole; and one factor for each kind of round, by rows and drafts.
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

SCALE_RATE = 0.04  # share of a step's surprise, in logarithms, that the scale takes over
KIND_RATE = 0.16  # share of it that the factor of its kind takes over
MOST_SURPRISE = math.log(2)  # a step that took more than twice as long was disturbed by something else
MOST_FACTOR = math.log(4)  # of a kind's correction, up or down

_Weights = list[tuple[int, float]]  # of the points on an axis, as interpolation mixes them


@dataclass(frozen=True)
class StepCosts:
    """What was measured. Without measurements every step costs the same, so that drafts seem free.

    padded: every row costs what the step's longest one does, as in the recorded steps of a GPU.

    Raises AssertionError where axes and grid do not fit together.
    """

    rows: tuple[int, ...] = ()  # numbers of rows that were measured, ascending
    counts: tuple[int, ...] = ()  # positions per row, ascending
    target_ms: tuple[tuple[float, ...], ...] = ()  # [rows][counts]: a step without a drafter
    draft_ms: tuple[float, ...] = ()  # [rows]: a drafter pass over so many positions
    padded: bool = False

    def __post_init__(self) -> None:
        for axis in (self.rows, self.counts):
            assert list(axis) == sorted(set(axis)), f"an axis of the cost grid is not ascending: {axis}"
        assert len(self.target_ms) == len(self.rows), "one line of the cost grid for each number of rows"
        assert all(len(line) == len(self.counts) for line in self.target_ms), "one cost for each count of positions"
        assert len(self.draft_ms) in (0, len(self.rows)), "one cost of a drafter pass for each number of rows"
        assert all(ms > 0 for line in (*self.target_ms, self.draft_ms) for ms in line), "a step that takes no time"

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self.rows and self.counts)

    def step_ms(self, rows: int, positions: float, passes: int = 0, followed: int = 0) -> float:
        """Milliseconds of a step of `rows` rows that compute so many positions each, `positions` of them on average.

        passes: of the learned drafter, over `followed` rows each. 1.0 where nothing was measured.
        """
        if not self.known:
            return 1.0
        columns = _mix(self.counts, positions)
        target = sum(
            weight * sum(share * self.target_ms[row][column] for column, share in columns)
            for row, weight in _mix(self.rows, rows)
        )
        if not self.draft_ms or not passes:
            return target
        return target + passes * sum(weight * self.draft_ms[row] for row, weight in _mix(self.rows, followed))


class RoundTimes:
    """Expected milliseconds of rounds, from what was measured and what steps have taken since.

    A round is a step of decode rows that verify `depth` drafts each, with as many passes of the learned drafter where
    it follows rows; one pass at least, for it reads what has become certain.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._scale = 0.0  # corrections are logarithms of factors
        self._of_kind: dict[tuple[int, int, bool], float] = defaultdict(float)
        self._measured: dict[tuple[int, int, int], float] = {}

    def ms(self, rows: int, depth: int, followed: int, drafted: float | None = None) -> float:
        """A round of `rows` rows, of which the learned drafter follows `followed`.

        drafted: rows that have drafts to verify; None: all. It matters where rows are not padded.
        """
        base = self._base(rows, depth, followed, rows if drafted is None else drafted)
        return base * math.exp(self._scale + self._of_kind[self._kind(rows, depth, followed)])

    def observed(self, rows: int, depth: int, followed: int, drafted: float, ms: float) -> None:
        """Corrects by a round that took `ms`; the other arguments are those of `ms`."""
        surprise = _bounded(math.log(max(ms, 1e-6) / self.ms(rows, depth, followed, drafted)), MOST_SURPRISE)
        kind = self._kind(rows, depth, followed)
        self._scale += SCALE_RATE * surprise
        self._of_kind[kind] = _bounded(self._of_kind[kind] + KIND_RATE * surprise, MOST_FACTOR)

    def _kind(self, rows: int, depth: int, followed: int) -> tuple[int, int, bool]:
        return rows.bit_length(), depth, followed > 0

    def _base(self, rows: int, depth: int, followed: int, drafted: float) -> float:
        passes = max(1, depth) if followed else 0
        if not self.costs.padded:
            return self.costs.step_ms(rows, 1 + depth * drafted / rows, passes, followed)
        found = self._measured.get((rows, depth, followed))
        if found is None:  # a decision looks at several, and has a hundredth of a round's time
            found = self.costs.step_ms(rows, 1 + depth, passes, rows)
            self._measured[rows, depth, followed] = found
        return found


def _mix(axis: Sequence[int], value: float) -> _Weights:
    """The points of an axis, with weights, whose mix stands for `value`: linear between the two around it, constant
    below the first, and in proportion above the last (twice the work, twice the time)."""
    if value <= axis[0]:
        return [(0, 1.0)]
    if value >= axis[-1]:
        return [(len(axis) - 1, value / axis[-1])]
    above = bisect.bisect_right(axis, value)
    low, high = axis[above - 1], axis[above]
    weight = (value - low) / (high - low)
    return [(above - 1, 1 - weight), (above, weight)]


def _bounded(value: float, most: float) -> float:
    return max(-most, min(most, value))
