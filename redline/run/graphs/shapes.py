"""Which shapes of decode steps are recorded on a GPU: a function of the configuration, so every start is the same."""

import itertools

from redline.kernels.hopper.step.step_rows import MOST_POSITIONS, MOST_ROWS, MOST_STEP
from redline.wire.step import Shape

BUCKETS = 1, 2, 4, 8, 16, 32, 64, 96, 128, 192, MOST_ROWS
CONTEXTS = 1 << 11, 1 << 14  # tokens; and as long as a job can be. Attention over longer ones has more to combine
FIRST_SHAPES = 24  # recorded before the first job: a second or two each at Kimi's depth. The others wait for idle times


def shapes(slots: int, positions: int, reach: int) -> list[Shape]:
    """All shapes that are recorded, the most useful first: a function of the configuration alone.

    positions: of a row, at most. reach: the longest context, in tokens.

    A step is replayed in the cheapest shape that holds it. So those that hold much come first: of the longest context,
    without drafts and with all that a step of so many rows may have; then of short contexts; then with some drafts,
    which spares positions; then of middling contexts, which spares the least. Within each, few rows before many.
    """
    most = next((bucket for bucket in BUCKETS if bucket >= slots), MOST_ROWS)
    contexts = reach, *(context for context in CONTEXTS if context < reach)

    def deepest(rows: int) -> int:
        return min(positions, MOST_POSITIONS, MOST_STEP // rows)

    def place(shape: Shape) -> tuple[bool, bool, int, int]:
        middling = shape.longest == CONTEXTS[1] != reach
        between = shape.positions not in (1, deepest(shape.rows))
        return middling, between, contexts.index(shape.longest), shape.rows * shape.positions

    sizes = [(rows, of_row) for rows in BUCKETS if rows <= most for of_row in range(1, deepest(rows) + 1)]
    return sorted((Shape(*size, context) for size, context in itertools.product(sizes, contexts)), key=place)
