"""What a step costs: milliseconds by rows, positions and drafter passes.

A small grid is measured once (rows x positions per row, and a drafter pass by its positions) and read by linear
interpolation. What steps then really take corrects it: a common scale, since contexts grow and machines slow down as a
whole; and the points around the step, which drift back to what was measured while nobody visits them.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

SCALE_RATE = 0.05  # share of a step's surprise, in logarithms, that the common scale takes over
POINT_RATE = 0.05  # share of it that the points around the step take over
POINT_KEEPS = 0.999  # share of a point's correction that is left a step later
MOST_SURPRISE = math.log(2)  # a step that took more than twice as long was disturbed by something else
MOST_POINT = math.log(4)  # of a point's correction, up or down

_Weights = list[tuple[int, float]]  # of the points on an axis, as interpolation mixes them


@dataclass(frozen=True)
class StepCosts:
    """What was measured, with corrections. Without measurements every step costs the same, so that drafts seem free.

    padded: every row costs what the step's longest one does, as in the recorded steps of a GPU.

    Raises AssertionError where axes and grid do not fit together.
    """

    rows: tuple[int, ...] = ()  # numbers of rows that were measured, ascending
    counts: tuple[int, ...] = ()  # positions per row, ascending
    target_ms: tuple[tuple[float, ...], ...] = ()  # [rows][counts]: a step without a drafter
    draft_ms: tuple[float, ...] = ()  # [rows]: a drafter pass over so many positions
    padded: bool = False
    scale: float = 0.0  # corrections are logarithms of factors
    target_points: tuple[tuple[float, ...], ...] = ()
    draft_points: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for axis in (self.rows, self.counts):
            assert list(axis) == sorted(set(axis)), f"an axis of the cost grid is not ascending: {axis}"
        assert len(self.target_ms) == len(self.rows), "one line of the cost grid for each number of rows"
        assert all(len(line) == len(self.counts) for line in self.target_ms), "one cost for each count of positions"
        assert len(self.draft_ms) in (0, len(self.rows)), "one cost of a drafter pass for each number of rows"
        assert all(ms > 0 for line in (*self.target_ms, self.draft_ms) for ms in line), "a step that takes no time"
        if not self.target_points:
            object.__setattr__(self, "target_points", tuple((0.0,) * len(self.counts) for _ in self.rows))
            object.__setattr__(self, "draft_points", (0.0,) * len(self.draft_ms))

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self.rows and self.counts)

    def positions(self, drafts: Sequence[int]) -> int:
        """Positions that a step computes whose rows verify so many drafts each."""
        rows = len(drafts)
        return rows * (1 + max(drafts, default=0)) if self.padded else rows + sum(drafts)

    def passes(self, drafts: Sequence[int]) -> list[float]:
        """Positions of each pass of the learned drafter that drafts so many tokens behind each row that it follows.

        The first pass reads what has become certain, and drafts one token. Only the rows that draft are computed to
        their end, in every pass.
        """
        if not drafts:
            return []
        rows, deepest = float(len(drafts)), max(1, *drafts)
        if self.padded:
            return [rows] * deepest
        return [rows, *(float(sum(1 for count in drafts if count > done)) for done in range(1, deepest))]

    def step_ms(self, rows: int, positions: float, passes: Sequence[float] = ()) -> float:
        """Milliseconds of a step of `rows` rows with `positions` positions together, drafter passes included.

        passes: the positions of each pass of the learned drafter. 1.0 where nothing was measured.
        """
        if not self.known:
            return 1.0
        return self._target_ms(rows, positions) + sum(self._draft_ms(count) for count in passes)

    def observed(self, rows: int, positions: float, passes: Sequence[float], ms: float) -> "StepCosts":
        """The costs corrected by a step that took `ms`; the other arguments are those of `step_ms`."""
        if not self.known:
            return self
        target, draft = self._target_ms(rows, positions), sum(self._draft_ms(count) for count in passes)
        surprise = _bounded(math.log(max(ms, 1e-6) / (target + draft)), MOST_SURPRISE)
        share = POINT_RATE * surprise
        target_points = [[point * POINT_KEEPS for point in line] for line in self.target_points]
        columns = _mix(self.counts, positions / rows)
        for row, row_weight in _mix(self.rows, rows):
            line = target_points[row]
            for column, weight in columns:
                line[column] = _bounded(
                    line[column] + share * row_weight * weight * target / (target + draft), MOST_POINT
                )
        draft_points = [point * POINT_KEEPS for point in self.draft_points]
        if draft:
            for count in passes:
                for row, weight in _mix(self.rows, count):
                    part = weight / len(passes) * draft / (target + draft)
                    draft_points[row] = _bounded(draft_points[row] + share * part, MOST_POINT)
        return replace(
            self,
            scale=self.scale + SCALE_RATE * surprise,
            target_points=tuple(tuple(line) for line in target_points),
            draft_points=tuple(draft_points),
        )

    def _target_ms(self, rows: int, positions: float) -> float:
        columns = _mix(self.counts, positions / rows)
        ms = 0.0
        for row, row_weight in _mix(self.rows, rows):
            line = self._target_now[row]
            ms += row_weight * sum(weight * line[at] for at, weight in columns)
        return ms

    def _draft_ms(self, positions: float) -> float:
        if not self.draft_ms:
            return 0.0
        return sum(weight * self._draft_now[at] for at, weight in _mix(self.rows, positions))

    @cached_property
    def _target_now(self) -> list[list[float]]:
        return [self._corrected(*line) for line in zip(self.target_ms, self.target_points, strict=True)]

    @cached_property
    def _draft_now(self) -> list[float]:
        return self._corrected(self.draft_ms, self.draft_points)

    def _corrected(self, measured: Sequence[float], points: Sequence[float]) -> list[float]:
        return [ms * math.exp(self.scale + point) for ms, point in zip(measured, points, strict=True)]


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
