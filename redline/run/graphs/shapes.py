"""Which shapes of decode steps are recorded on a GPU: a function of the configuration, so every start is the same."""

import itertools
from typing import NamedTuple

from redline.kernels.hopper.step.step_rows import MOST_POSITIONS, MOST_ROWS

BUCKETS = 1, 2, 4, 8, 16, 32, MOST_ROWS
CONTEXTS = 1 << 11, 1 << 14  # tokens; and as long as a job can be. Attention over longer ones has more to combine
MOST_SHAPES = 24  # all of them are recorded before the first job: a second or two each at Kimi's depth


class Shape(NamedTuple):
    """The size of a recorded decode step."""

    rows: int
    positions: int  # of each row
    longest: int  # context of any row, in tokens


def shapes(slots: int, positions: int, reach: int) -> list[Shape]:
    """The shapes that are recorded, in the order of their recording: a function of the configuration alone.

    positions: of a row, at most. reach: the longest context, in tokens.

    A step is replayed in the cheapest shape that holds it. So those that hold much come first: of the longest context,
    without drafts and with all; then of shorter contexts; then with some drafts. Within each, few rows before many.
    """
    most = next((bucket for bucket in BUCKETS if bucket >= slots), MOST_ROWS)
    positions = min(positions, MOST_POSITIONS)
    contexts = reach, *(context for context in CONTEXTS if context < reach)
    sizes = itertools.product([bucket for bucket in BUCKETS if bucket <= most], range(1, positions + 1), contexts)

    def place(shape: Shape) -> tuple[bool, int, int]:
        return shape.positions not in (1, positions), contexts.index(shape.longest), shape.rows * shape.positions

    return sorted((Shape(*size) for size in sizes), key=place)[:MOST_SHAPES]
