"""How far each job speculates: what was accepted, what steps cost, and the choice between them.

Private to plan. The choosing itself is in tune; here is what it is told.
"""

import itertools
from collections.abc import Sequence

from redline.plan.active import ActiveJob
from redline.tune.acceptance import ALL_KEEP, JOB_KEEPS, Acceptance, rates, survival
from redline.tune.choose import Worth, choose, gain
from redline.tune.costs import StepCosts
from redline.wire.job import PAGE_TOKENS
from redline.wire.step import Row, RowResult, Step, StepResult

EVERY = 8  # steps between two decisions
MATCHED_RATE = 0.05  # share of a step's surprise that the share of rows with a match takes over


class Speculation:
    """Decides how many drafts each row proposes, and counts what came of them.

    most: drafts of one row (0: nobody speculates). learned: there is a learned drafter, beside suffix matches.
    """

    def __init__(self, most: int, learned: bool, costs: StepCosts) -> None:
        self.drafts = 0  # rows that verified drafts
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.accepted_per_pos = [0] * most
        self.costs = costs
        self._most = most
        self._learned = learned
        self._worth = Worth()
        self._chosen: dict[ActiveJob, int] = {}  # at the last decision
        self._usual = most  # of a job that came after it
        self._until_next = 0
        self._by_learned = Acceptance()  # of all jobs that the learned drafter follows
        self._by_suffix = Acceptance()  # of all others
        self._matched = 1.0  # of these, the share that has drafts in steps where any has

    @property
    def follows(self) -> bool:
        """Whether there is a learned drafter and it pays."""
        return self._learned and self._worth.pays

    def lengths(self, jobs: Sequence[ActiveJob], most: int = PAGE_TOKENS) -> list[int]:
        """For each job, whose next row samples, the most drafts to propose behind that row; `most` at most.

        Decided every EVERY steps: what is known changes slowly, and a decision costs up to a millisecond, which a small
        model's step would notice.
        """
        if not self._most or not jobs:
            return [0] * len(jobs)
        if not self.costs.known:
            return [max(0, min(self._most, most, job.room - 2)) for job in jobs]
        self._until_next -= 1
        if self._until_next < 0:
            self._until_next = EVERY - 1
            chosen = self._choose(jobs, most)
            self._chosen = dict(zip(jobs, chosen, strict=True))
            self._usual = round(sum(chosen) / len(chosen))
        return [max(0, min(self._chosen.get(job, self._usual), most, job.room - 2)) for job in jobs]

    def _choose(self, jobs: Sequence[ActiveJob], most: int) -> list[int]:
        if self._learned:
            chances = survival(Acceptance(), rates(self._by_learned, min(self._most, most)))
            self._worth = self._worth.seen(gain(chances, len(jobs), self.costs))
        drafting = [job.drafting and self.follows for job in jobs]
        by_learned, by_suffix = rates(self._by_learned, self._most), rates(self._by_suffix, self._most)
        survivals = [
            survival(job.acceptance, (by_learned if learned else by_suffix)[: max(0, min(most, job.room - 2))])
            for job, learned in zip(jobs, drafting, strict=True)
        ]
        if self.costs.padded:  # rows that have no match pay for those that have one
            survivals = [
                chances if learned else [chance * self._matched for chance in chances]
                for chances, learned in zip(survivals, drafting, strict=True)
            ]
        asked = choose(survivals, drafting, self.costs)
        # Nothing is learnt of drafts that are not asked for: what was learnt fades, so that they are tried again.
        if not any(itertools.compress(asked, drafting)):
            self._by_learned = self._by_learned.seen(0, 0, ALL_KEEP)
        if not any(length for length, learned in zip(asked, drafting, strict=True) if not learned):
            self._by_suffix = self._by_suffix.seen(0, 0, ALL_KEEP)
            self._matched = 1 - (1 - self._matched) * ALL_KEEP
        return asked

    def settled(self, job: ActiveJob, row: Row, outcome: RowResult) -> None:
        """Take in what came of the drafts of a decode row, of a job that has not ended."""
        proposed, accepted = outcome.proposed, outcome.accepted
        if not self._most:
            return
        job.acceptance = job.acceptance.seen(proposed, accepted, JOB_KEEPS)
        if not proposed:
            return
        if row.drafting:
            self._by_learned = self._by_learned.seen(proposed, accepted, ALL_KEEP)
        else:
            self._by_suffix = self._by_suffix.seen(proposed, accepted, ALL_KEEP)
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        for place in range(accepted):
            self.accepted_per_pos[place] += 1

    def took(self, step: Step, result: StepResult, seconds: float) -> None:
        """Take in the time of a step, in seconds, and correct the costs by it.

        Only steps that hold nothing but decode rows are compared with what they should cost, and of these only those
        whose number is even.
        """
        matching = [
            out.proposed > 0
            for row, out in zip(step.rows, result.rows, strict=True)
            if row.start is None and not row.drafting
        ]
        if any(matching):
            self._matched += MATCHED_RATE * (sum(matching) / len(matching) - self._matched)
        if not self.costs.known or step.number % 2 or any(row.start is not None for row in step.rows):
            return
        ran = [(row, out) for row, out in zip(step.rows, result.rows, strict=True) if out.tokens]
        if not ran:
            return
        positions = self.costs.positions([row.drafts if self.costs.padded else out.proposed for row, out in ran])
        passes = self.costs.passes([row.propose for row, _ in ran if row.drafting])
        self.costs = self.costs.observed(len(ran), positions, passes, seconds * 1000)
