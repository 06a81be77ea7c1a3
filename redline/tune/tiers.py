"""Which pages to fetch rather than to compute: what prompts take, learnt from steps, beside what tiers take.

A step over a prompt's positions takes a fixed time, a time for each position, and a time for each pair of a position
and one that it attends to. The three are fitted to the steps that have run, newer ones counting more. Until steps have
told anything, nothing is predicted: then whatever is kept is fetched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

KEEPS = 0.97  # of what was learnt before, with each step that is taken in
LEAST = 3  # steps before anything is predicted
LEAST_POSITIONS = 32  # of a step's prompts, which otherwise says little of them
MOST_DECODING = 0.125  # of a step's positions; a step with more says little of its prompts
PAIRS = 4096 * 512.0  # that make one unit, so that the three columns are of a size
POSITIONS = 512.0  # likewise
RIDGE = 1e-6  # of each column's own square: it decides where steps were all alike


class PrefillTimes:
    """What prompts take, in seconds, as the steps so far have shown."""

    def __init__(self) -> None:
        self._square = [[0.0] * 3 for _ in range(3)]
        self._with = [0.0] * 3
        self._found: tuple[float, float, float] | None = None
        self._steps = 0

    @property
    def known(self) -> bool:
        """Whether enough steps have run."""
        return self._steps >= LEAST

    def observed(self, rows: Sequence[tuple[int, int]], decoding: int, seconds: float) -> None:
        """Takes in a step. rows: (first position, count) of its prompts. decoding: positions of its other rows."""
        positions = sum(count for _, count in rows)
        if positions < LEAST_POSITIONS or decoding > MOST_DECODING * positions:
            return
        column = _columns(1, positions, sum(_pairs(first, first + count) for first, count in rows))
        for i in range(3):
            self._with[i] = KEEPS * self._with[i] + column[i] * seconds
            for j in range(3):
                self._square[i][j] = KEEPS * self._square[i][j] + column[i] * column[j]
        self._steps += 1
        self._found = None

    def predict(self, first: int, end: int, step_tokens: int) -> float | None:
        """Seconds to compute positions [first, end) in steps of so many; None while it is not known."""
        if not self.known:
            return None
        if self._found is None:
            self._found = _solved(self._square, self._with)
        steps = -(-(end - first) // step_tokens)
        columns = _columns(steps, end - first, _pairs(first, end))
        return sum(weight * column for weight, column in zip(self._found, columns, strict=True))


@dataclass(frozen=True)
class Choice:
    """So many pages are fetched, which takes `fetch_s`, and computing them would take `compute_s` (None: not known)."""

    pages: int
    fetch_s: float = 0.0
    compute_s: float | None = None


def choose(
    first: int, page_s: Sequence[float], wait_s: float, times: PrefillTimes, *, page_tokens: int, step_tokens: int
) -> Choice:
    """How many of some pages to fetch, from the first on, so that most time is saved; 0 where none is.

    first: the position at which they begin. page_s: seconds to fetch each. wait_s: before the first is fetched.
    """
    best, saved, fetch_s = Choice(0), 0.0, wait_s
    if not times.known:
        return Choice(len(page_s), wait_s + sum(page_s))
    for count, seconds in enumerate(page_s, 1):
        fetch_s += seconds
        compute_s = times.predict(first, first + count * page_tokens, step_tokens) or 0.0
        if compute_s - fetch_s > saved:
            best, saved = Choice(count, fetch_s, compute_s), compute_s - fetch_s
    return best


def _pairs(first: int, end: int) -> float:
    """Pairs of a position of [first, end) and one that it attends to."""
    return (end * (end + 1) - first * (first + 1)) / 2


def _columns(steps: float, positions: float, pairs: float) -> tuple[float, float, float]:
    return steps, positions / POSITIONS, pairs / PAIRS


def _solved(square: Sequence[Sequence[float]], right: Sequence[float]) -> tuple[float, float, float]:
    """The three times that fit best, none of them negative: one that would be is left out."""
    left_in = [0, 1, 2]
    while True:
        found = _gauss(
            [[square[i][j] * (1 + RIDGE * (i == j)) for j in left_in] for i in left_in], [right[i] for i in left_in]
        )
        if min(found) >= 0 or len(left_in) == 1:
            whole = dict(zip(left_in, found, strict=True))
            return max(0.0, whole.get(0, 0.0)), max(0.0, whole.get(1, 0.0)), max(0.0, whole.get(2, 0.0))
        del left_in[min(range(len(found)), key=found.__getitem__)]


def _gauss(square: list[list[float]], right: list[float]) -> list[float]:
    """x with square x = right, for a square that is symmetric and positive: no pivots have to be looked for."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = square[j][i] / square[i][i]
            right[j] -= factor * right[i]
            for k in range(i, size):
                square[j][k] -= factor * square[i][k]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (right[i] - sum(square[i][j] * found[j] for j in range(i + 1, size))) / square[i][i]
    return found
