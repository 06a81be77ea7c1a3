"""Whether ranks have drawn the same tokens.

No rank asks another what was decided: equal bits lead to equal tokens. Should they once not, their slots would hold
different texts, and each would answer with a part of both. So each keeps a digest of what its steps gave. Rank 0 sends
its own with every step, as far as it has read results by then, and the others compare.
"""

from redline.errors import RankLost
from redline.wire.step import Drawn, StepResult


class Account:
    """A running digest of the tokens that the steps of one rank gave."""

    def __init__(self) -> None:
        self.drawn = Drawn()

    def note(self, result: StepResult) -> None:
        """The next step has ended so; each is noted once, in their order."""
        last = self.drawn
        # Python's hash of integers, and of tuples of them, is the same in every process.
        self.drawn = Drawn(last.steps + 1, hash((last.digest, *[row.tokens for row in result.rows])))


class Comparison:
    """A rank's own account beside what rank 0 says of its own: either may be some steps ahead."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._account = Account()
        self._compared = 0  # steps
        self._mine: dict[int, tuple[int, int]] = {}  # beyond them, by steps: the digest, and the last one's number
        self._told: dict[int, int] = {}  # digests, likewise

    def note(self, result: StepResult) -> None:
        """As `Account.note`. Raises RankLost where rank 0 has drawn otherwise."""
        self._account.note(result)
        drawn = self._account.drawn
        self._mine[drawn.steps] = drawn.digest, result.number
        self._compare(drawn.steps)

    def hear(self, drawn: Drawn) -> None:
        """What rank 0 says. Raises RankLost where this rank has drawn otherwise."""
        if drawn.steps > self._compared:
            self._told[drawn.steps] = drawn.digest
            self._compare(drawn.steps)

    def _compare(self, steps: int) -> None:
        if steps not in self._mine or steps not in self._told:
            return
        digest, number = self._mine[steps]
        if digest != self._told[steps]:
            raise RankLost(f"rank {self._rank} has drawn other tokens in step {number:,}")
        self._compared = steps
        self._mine = {ahead: mine for ahead, mine in self._mine.items() if ahead > steps}
        self._told = {ahead: told for ahead, told in self._told.items() if ahead > steps}
