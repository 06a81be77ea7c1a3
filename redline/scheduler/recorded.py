"""Choice of the CUDA graph that a step replays.

Ranks that replayed different graphs for one step would deadlock in the all-reduce. So only a graph that all ranks have
captured is chosen, and the step names it.
"""

from redline.messages.job import PAGE_TOKENS
from redline.messages.step import CapturedShapes, Shape


class RecordedShapes:
    """The shapes of decode steps for which every rank has captured a CUDA graph, and the choice among them."""

    def __init__(self, *reports: CapturedShapes, ranks: int = 1) -> None:
        """ranks: number of ranks; no graph is chosen before all of them have reported."""
        self._ranks = ranks
        self._reports: dict[int, CapturedShapes] = {}
        self._shapes: frozenset[Shape] = frozenset()
        self._drafts: dict[int, int] = {}  # by number of rows
        # By rows and positions: the shapes that can hold them, cheapest first.
        self._ways: dict[tuple[int, int], list[Shape]] = {}
        for report in reports:
            self.report(report)

    def report(self, recorded: CapturedShapes) -> None:
        """Set the graphs that a rank has captured; replaces its previous report."""
        if self._reports.get(recorded.rank) is recorded:
            return
        self._reports[recorded.rank] = recorded
        shapes = frozenset(recorded.shapes)
        for report in self._reports.values():
            shapes &= frozenset(report.shapes)
        self._shapes = shapes if len(self._reports) == self._ranks else frozenset()
        self._ways.clear()
        self._drafts.clear()

    def choose(self, rows: int, positions: int, longest: int) -> Shape | None:
        """The cheapest shape for `rows` rows of `positions` positions with contexts of at most `longest` tokens.

        If no shape has enough positions, the cheapest of those with the most; None if no shape fits the rows and
        contexts.
        """
        ways = self._ways.get((rows, positions))
        if ways is None:
            # The cost of a step is determined by its positions, then by the context lengths that attention may have to
            # combine.
            holding = [shape for shape in self._shapes if shape.rows >= rows]
            ways = self._ways[rows, positions] = sorted(
                holding,
                key=lambda shape: (max(0, positions - shape.positions), shape.rows * shape.positions, shape.longest),
            )
        return next((shape for shape in ways if shape.longest >= longest), None)

    def drafts(self, rows: int) -> int:
        """Maximum number of draft tokens that each of `rows` rows can verify; PAGE_TOKENS if no shape limits it."""
        most = self._drafts.get(rows)
        if most is None:
            holding = [shape.positions - 1 for shape in self._shapes if shape.rows >= rows]
            most = self._drafts[rows] = max(holding, default=PAGE_TOKENS)
        return most
