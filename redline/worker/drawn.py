"""Checks that all tensor parallel ranks have sampled the same tokens.

Each rank samples by itself, without communication: equal logits lead to equal tokens. If they ever differed, the ranks'
slots would contain different texts, and the answer would mix both. So each rank keeps a digest of its steps' tokens.
Rank 0 sends its digest with every step, covering the results that it has read by then, and the other ranks compare it
with their own.
"""

from redline.errors import RankLost
from redline.messages.step import Drawn, StepResult


class TokenDigest:
    """A running digest of the tokens that one rank's steps have sampled."""

    def __init__(self) -> None:
        self.drawn = Drawn()

    def note(self, result: StepResult) -> None:
        """Adds the result of the next step. Call it once per step, in order."""
        last = self.drawn
        # Python's hash of integers, and of tuples of them, is the same in every process.
        self.drawn = Drawn(last.steps + 1, hash((last.digest, *[row.tokens for row in result.rows])))


class DigestComparison:
    """Compares a rank's own digests with those received from rank 0; either side may be some steps ahead."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._account = TokenDigest()
        self._compared = 0  # number of steps that have been compared
        self._mine: dict[int, tuple[int, int]] = {}  # later own digests by number of steps, with the last step's number
        self._told: dict[int, int] = {}  # later digests of rank 0, by number of steps

    def note(self, result: StepResult) -> None:
        """As `TokenDigest.note`. Raises RankLost if rank 0 has sampled other tokens."""
        self._account.note(result)
        drawn = self._account.drawn
        self._mine[drawn.steps] = drawn.digest, result.number
        self._compare(drawn.steps)

    def hear(self, drawn: Drawn) -> None:
        """Receives rank 0's digest. Raises RankLost if this rank has sampled other tokens."""
        if drawn.steps > self._compared:
            self._told[drawn.steps] = drawn.digest
            self._compare(drawn.steps)

    def _compare(self, steps: int) -> None:
        if steps not in self._mine or steps not in self._told:
            return
        digest, number = self._mine[steps]
        if digest != self._told[steps]:
            raise RankLost(f"rank {self._rank} has sampled other tokens in step {number:,}")
        self._compared = steps
        self._mine = {ahead: mine for ahead, mine in self._mine.items() if ahead > steps}
        self._told = {ahead: told for ahead, told in self._told.items() if ahead > steps}
