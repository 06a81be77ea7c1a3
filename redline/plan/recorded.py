"""Which recorded shape a step replays. Private to plan, but for those who launch steps without a planner.

Ranks that replayed different shapes of one step would wait for each other for ever. So only a shape that all of them
have reported is named, and the name travels in the step.
"""

from redline.wire.job import PAGE_TOKENS
from redline.wire.step import Recorded, Shape


class RecordedShapes:
    """The shapes of decode steps that every rank has reported, and the choice among them."""

    def __init__(self, *reports: Recorded, ranks: int = 1) -> None:
        """ranks: how many there are; nothing is chosen before all of them have reported."""
        self._ranks = ranks
        self._reports: dict[int, Recorded] = {}
        self._shapes: frozenset[Shape] = frozenset()
        self._drafts: dict[int, int] = {}  # by rows
        self._ways: dict[tuple[int, int], list[Shape]] = {}  # by rows and positions: what may hold them, the best first
        for report in reports:
            self.report(report)

    def report(self, recorded: Recorded) -> None:
        """Takes in what a rank can replay now, in the place of what it has reported before."""
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
        """The cheapest that holds so many rows of so many positions, whose contexts have `longest` tokens at most.

        Where none has so many positions, it is the cheapest of those that have the most; None: nothing holds the rows.
        """
        ways = self._ways.get((rows, positions))
        if ways is None:
            # What a step costs is its positions, then the contexts that attention may have to combine.
            holding = [shape for shape in self._shapes if shape.rows >= rows]
            ways = self._ways[rows, positions] = sorted(
                holding,
                key=lambda shape: (max(0, positions - shape.positions), shape.rows * shape.positions, shape.longest),
            )
        return next((shape for shape in ways if shape.longest >= longest), None)

    def drafts(self, rows: int) -> int:
        """How many drafts each of so many rows verifies at most; a page of them where no shape bounds that."""
        most = self._drafts.get(rows)
        if most is None:
            holding = [shape.positions - 1 for shape in self._shapes if shape.rows >= rows]
            most = self._drafts[rows] = max(holding, default=PAGE_TOKENS)
        return most
