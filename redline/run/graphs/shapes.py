"""The shapes of decode steps for which CUDA graphs are captured: a function of the configuration, so every start is
the same."""

import itertools

from redline.kernels.cuda.step.step_rows import MOST_POSITIONS, MOST_ROWS, MOST_STEP
from redline.messages.step import Shape

BUCKETS = 1, 2, 4, 8, 16, 32, 64, 96, 128, 192, MOST_ROWS
# context lengths in tokens, in addition to the longest possible; attention over longer contexts has more partial
# results to combine
CONTEXTS = 1 << 11, 1 << 14
# captured before the first job, in one to two seconds each at Kimi's depth; the others are captured while idle
FIRST_SHAPES = 24


def shapes(slots: int, positions: int, reach: int) -> list[Shape]:
    """All shapes to capture, the most useful first.

    positions: per row, at most. reach: the longest context, in tokens.

    A step is replayed in the cheapest shape that holds it. So the shapes that hold most steps come first: those of the
    longest context, without drafts and with the maximum of drafts; then those of the shortest context; then those with
    fewer drafts, which save positions; then those of the middle context length, which saves the least. Within each
    group, few rows come before many.
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
