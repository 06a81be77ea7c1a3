"""Milliseconds of a decode step, by rows, positions and drafter passes.

`StepCosts` is a small grid that is measured once (rows x positions per row, and a drafter pass by its positions) and
read by linear interpolation. `RoundTimes` corrects it by the observed times of steps: one common scale, since contexts
grow and machines slow down as a whole, and one factor for each kind of round, by rows and drafts.
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

SCALE_RATE = 0.04  # share of a step's prediction error (logarithm) that moves the common scale
KIND_RATE = 0.16  # share of the error that moves the factor of the step's kind
# clip for the error: a step more than twice as slow as predicted was disturbed from outside
MOST_SURPRISE = math.log(2)
MOST_FACTOR = math.log(4)  # bound on a kind's factor (logarithm), in both directions

_Weights = list[tuple[int, float]]  # (index, weight) of the axis points that interpolation mixes


@dataclass(frozen=True)
class StepCosts:
    """Measured step costs. Without measurements every step costs the same, so drafts are taken to be free.

    padded: every row costs the same as the longest row of the step, as in CUDA graphs.

    Raises AssertionError if the axes and the grid do not fit together.
    """

    rows: tuple[int, ...] = ()  # measured numbers of rows, ascending
    counts: tuple[int, ...] = ()  # measured positions per row, ascending
    target_ms: tuple[tuple[float, ...], ...] = ()  # [rows][counts]: a step without a drafter
    draft_ms: tuple[float, ...] = ()  # a drafter pass over that many positions
    padded: bool = False
    draft_once: bool = False  # one pass drafts all tokens of a round (a block drafter)

    def __post_init__(self) -> None:
        for axis in (self.rows, self.counts):
            assert list(axis) == sorted(set(axis)), f"an axis of the cost grid is not ascending: {axis}"
        assert len(self.target_ms) == len(self.rows), "one line of the cost grid for each number of rows"
        assert all(len(line) == len(self.counts) for line in self.target_ms), "one cost for each count of positions"
        assert len(self.draft_ms) in (0, len(self.rows)), "one cost of a drafter pass for each number of rows"
        assert all(ms > 0 for line in (*self.target_ms, self.draft_ms) for ms in line), "step times must be above 0"

    @property
    def known(self) -> bool:
        """Whether the grid has measurements."""
        return bool(self.rows and self.counts)

    def step_ms(self, rows: int, positions: float, passes: int = 0, followed: int = 0) -> float:
        """Milliseconds of a step with `rows` rows and `positions` positions per row, on average.

        passes: passes of the learned drafter, over `followed` rows each. The result is 1.0 if nothing was measured.
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
    """Expected milliseconds of rounds, from the measured grid and the observed times of later steps.

    A round is a decode step in which each row verifies `depth` drafts, plus `depth` passes of the learned drafter if it
    follows any rows: at least one pass, which reads the accepted tokens; and only one if it drafts blocks.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._scale = 0.0  # corrections are logarithms of factors
        self._of_kind: dict[tuple[int, int, bool], float] = defaultdict(float)
        self._measured: dict[tuple[int, int, int], float] = {}

    def ms(self, rows: int, depth: int, followed: int, drafted: float | None = None) -> float:
        """Expected milliseconds of a round of `rows` rows, `followed` of them with the learned drafter.

        drafted: rows that have drafts to verify; None: all. Used only if rows are not padded.
        """
        base = self._base(rows, depth, followed, rows if drafted is None else drafted)
        return base * math.exp(self._scale + self._of_kind[self._kind(rows, depth, followed)])

    def position_share(self, rows: int, depth: int, followed: int) -> float:
        """The share of a round's time that one position of one row takes, by the measured grid alone: the observed
        times are those of rounds that may have verified fewer drafts. 0 if rows are padded, since each then costs the
        same as the longest. `ms` has the arguments; depth: at least 1."""
        if self.costs.padded or not self.costs.known:
            return 0.0
        # Backwards from the last position: above the grid interpolation is proportional, so its slope is no position's.
        last = self.costs.step_ms(rows, 1 + depth) - self.costs.step_ms(rows, 1 + depth - 1 / rows)
        return max(0.0, last) / self._base(rows, depth, followed, rows)

    def observed(self, rows: int, depth: int, followed: int, drafted: float, ms: float) -> None:
        """Corrects the model by a round that took `ms` milliseconds; the other arguments are those of `ms`."""
        surprise = _bounded(math.log(max(ms, 1e-6) / self.ms(rows, depth, followed, drafted)), MOST_SURPRISE)
        kind = self._kind(rows, depth, followed)
        self._scale += SCALE_RATE * surprise
        self._of_kind[kind] = _bounded(self._of_kind[kind] + KIND_RATE * surprise, MOST_FACTOR)

    def _kind(self, rows: int, depth: int, followed: int) -> tuple[int, int, bool]:
        return rows.bit_length(), depth, followed > 0

    def _base(self, rows: int, depth: int, followed: int, drafted: float) -> float:
        passes = (1 if self.costs.draft_once else max(1, depth)) if followed else 0
        if not self.costs.padded:
            return self.costs.step_ms(rows, 1 + depth * drafted / rows, passes, followed)
        found = self._measured.get((rows, depth, followed))
        # cached, because a decision asks for several depths and may take a hundredth of a round's time
        if found is None:
            found = self.costs.step_ms(rows, 1 + depth, passes, rows)
            self._measured[rows, depth, followed] = found
        return found


def _mix(axis: Sequence[int], value: float) -> _Weights:
    """Indices of axis points, with the weights of a sum that represents `value`: linear between the two neighbours,
    constant below the first point, and proportional above the last (twice the work, twice the time)."""
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
