"""Speculative decoding: acceptance statistics, step costs, and the number of draft tokens.

Private to the scheduler. The choice itself is in `policy`; this module collects its inputs.
"""

from collections import Counter
from collections.abc import Sequence

from redline.messages.job import PAGE_TOKENS
from redline.messages.step import Drafter, RowResult, Step, StepResult
from redline.policy.acceptance import KEEPS, REST_KEEPS, Acceptance
from redline.policy.costs import RoundTimes, StepCosts
from redline.policy.draft_count import DraftingRows, Worth, choose, gain, least_survival
from redline.scheduler.active import ActiveJob

EVERY = 8  # interval, in steps, of decisions and of measured step times
LIKE = 2  # consecutive steps of one kind before the measured one: before that, its time includes part of other steps
PROBE = 128  # decisions between two without draft tokens, to measure the time of plain decode
MOST_FORCED = 15  # maximum number of draft tokens of a row that a grammar forces: a longer step delays other jobs
NOTED = 4  # one step in NOTED is noted for its jobs' traces: reading 64 rows takes tens of microseconds
MATCHED_RATE = 0.1  # weight of a new value in the moving average of the share of rows with a suffix match


class Speculation:
    """Decides how many draft tokens each row proposes, and counts how many were accepted.

    most: maximum number of draft tokens of one row; 0 disables speculative decoding. learned: there is a learned
    drafter in addition to suffix matches.
    """

    def __init__(self, most: int, learned: bool, costs: StepCosts) -> None:
        self.times = RoundTimes(costs)
        self._most = most
        self._learned = learned
        self._worth = Worth()
        self._chosen = most  # draft tokens per row, as of the last decision
        self._least = 0.0  # probability of acceptance from which on a draft token pays off, as of the last decision
        # Of the last step: bit length of its number of rows, and its draft tokens per row.
        self._kind: tuple[int, int] | None = None
        self._alike = 0  # number of consecutive steps of that kind before it
        self._until_next = 0
        self._until_probe = PROBE
        self._by_learned = Acceptance(most)  # of the learned drafter's draft tokens
        self._by_suffix = Acceptance(most)  # of suffix matches, in any job
        self._matched = 1.0  # share of rows with a suffix match, in steps in which any row has one
        self._outcomes: Counter[tuple[Drafter | None, int, int]] = Counter()  # rows by (drafter, proposed, accepted)
        self._taken_in: Counter[tuple[Drafter | None, int, int]] = Counter()  # the same, as of the last decision

    @property
    def drafts(self) -> int:
        """Rows that verified draft tokens."""
        return self._outcomes.total()

    @property
    def draft_tokens(self) -> int:
        """Verified draft tokens."""
        return sum(proposed * rows for (_, proposed, _), rows in self._outcomes.items())

    @property
    def accepted_tokens(self) -> int:
        """Accepted draft tokens."""
        return sum(accepted * rows for (_, _, accepted), rows in self._outcomes.items())

    @property
    def suffix_draft_tokens(self) -> int:
        """Verified draft tokens from suffix matches."""
        return self._proposed("suffix")

    @property
    def suffix_accepted_tokens(self) -> int:
        """Accepted draft tokens from suffix matches."""
        return self._accepted("suffix")

    @property
    def grammar_draft_tokens(self) -> int:
        """Verified draft tokens forced by a grammar."""
        return self._proposed("grammar")

    @property
    def grammar_accepted_tokens(self) -> int:
        """Accepted draft tokens forced by a grammar: all, if the model's logits are numbers."""
        return self._accepted("grammar")

    def _proposed(self, by: Drafter) -> int:
        return sum(proposed * rows for (one, proposed, _), rows in self._outcomes.items() if one == by)

    def _accepted(self, by: Drafter) -> int:
        return sum(accepted * rows for (one, _, accepted), rows in self._outcomes.items() if one == by)

    @property
    def accepted_per_pos(self) -> list[int]:
        """How often the first, second ... draft token of a row was accepted."""
        held = Counter[int]()
        for (_, _, accepted), rows in self._outcomes.items():
            held[accepted] += rows
        return [sum(rows for accepted, rows in held.items() if accepted > place) for place in range(self._most)]

    @property
    def follows(self) -> bool:
        """Whether there is a learned drafter and it pays."""
        return self._learned and self._worth.pays

    @property
    def least(self) -> float:
        """The probability of acceptance from which on it pays off to verify a draft token."""
        return self._least

    def lengths(self, jobs: Sequence[ActiveJob], most: int = PAGE_TOKENS) -> list[int]:
        """For each job, the number of draft tokens to propose after its next row, which samples; at most `most`.

        Decided every EVERY steps: the statistics change slowly, and a decision takes a noticeable part of a small
        model's step.
        """
        if not self._most or not jobs:
            return [0] * len(jobs)
        if self.times.costs.known:
            self._until_next -= 1
            if self._until_next < 0:
                self._until_next = EVERY - 1
                self._chosen = self._choose(jobs, most)
        chosen = min(self._chosen, most)
        return [max(0, min(chosen, job.room - 2)) for job in jobs]

    def forced(self, rows: int, forced: Sequence[int], most: int) -> int:
        """Maximum number of grammar-forced draft tokens that a row verifies, in a step of `rows` decode rows.

        forced: number of forced tokens, for each row that has any. They are always accepted, and one step with more
        positions takes no longer than several steps with fewer. But if rows are padded, every row takes the time of the
        longest: then the step costs measured at the start decide. (The times of later steps contain little about
        numbers of draft tokens that are rarely used.)
        """
        costs, deepest = self.times.costs, min(max(forced), most, MOST_FORCED)
        if not (costs.known and costs.padded):
            return deepest
        tokens = [rows + sum(min(count, depth) for count in forced) for depth in range(deepest + 1)]
        return max(reversed(range(deepest + 1)), key=lambda depth: tokens[depth] / costs.step_ms(rows, 1 + depth))

    def _choose(self, jobs: Sequence[ActiveJob], most: int) -> int:
        self._take_in()
        self._until_probe -= 1
        if not self._until_probe:
            self._until_probe = PROBE
            return 0
        learned, suffix = self._by_learned.survival()[:most], self._by_suffix.survival()[:most]
        if self._learned:
            self._worth = self._worth.seen(gain(learned, len(jobs), self.times))
        followed = sum(job.drafting for job in jobs) if self.follows else 0
        by_suffix = DraftingRows(len(jobs) - followed, suffix, self._matched)
        by_learned = DraftingRows(followed, learned)
        depth = choose(by_learned, by_suffix, self.times)
        if self.times.costs.draft_once:  # chains do not know how probable their drafts are
            tokens = by_learned.tokens()[depth] + by_suffix.tokens()[depth]
            self._least = least_survival(len(jobs), depth, tokens, followed, self.times)
        # Draft tokens that are not requested give no statistics: the old statistics fade, so that drafting is tried
        # again.
        if not depth or not followed:
            self._by_learned.fade(REST_KEEPS)
        if not depth or followed == len(jobs):
            self._by_suffix.fade(REST_KEEPS)
            self._matched = 1 - (1 - self._matched) * REST_KEEPS
        return depth

    def _take_in(self) -> None:
        """Update the acceptance statistics with the rows since the last decision."""
        sources: tuple[tuple[Drafter, Acceptance], ...] = ("learned", self._by_learned), ("suffix", self._by_suffix)
        for by, source in sources:
            news = {
                (proposed, accepted): rows - self._taken_in[one, proposed, accepted]
                for (one, proposed, accepted), rows in self._outcomes.items()
                if one == by
            }
            if any(news.values()):
                source.fade(KEEPS)
            for (proposed, accepted), rows in news.items():
                source.seen(proposed, accepted, rows)
        self._taken_in = self._outcomes.copy()

    def settled(self, outcome: RowResult) -> None:
        """Count the result of a decode row of a job that has not ended.

        Draft tokens forced by a grammar are only counted: they are always accepted, so they do not enter the acceptance
        statistics.
        """
        if outcome.proposed:
            self._outcomes[outcome.by, outcome.proposed, outcome.accepted] += 1

    def predicted_ms(self, step: Step, result: StepResult) -> tuple[float, float] | None:
        """Predicted time of a step that verified draft tokens, before `took` is called for it, and of the same rows
        without draft tokens; in milliseconds. None if the step had no draft tokens or had prompt tokens, if step
        costs were not measured, and for all steps but one in NOTED."""
        rows = step.rows
        if (
            not self._most
            or step.number % NOTED
            or not self.times.costs.known
            or not rows
            or rows[-1].start is not None
        ):
            return None
        depth = max(row.drafts for row in rows)
        drafted = sum(out.proposed > 0 for out in result.rows) if depth else 0
        if not drafted:
            return None
        followed = sum(row.drafting for row in rows)
        return self.times.ms(len(rows), depth, followed, drafted), self.times.ms(len(rows), 0, 0)

    def took(self, step: Step, result: StepResult, seconds: float) -> None:
        """Add the duration of a step.

        Only one step in EVERY is used, and only if it has nothing but decode rows with equal numbers of proposed and
        verified draft tokens, and the LIKE steps before it were of the same kind: steps are launched ahead of results,
        so the time of one includes part of another.
        """
        if not self.times.costs.known:
            return
        depth = max([row.drafts for row in step.rows], default=0)
        kind = None if not step.rows or step.rows[-1].start is not None else (len(step.rows).bit_length(), depth)
        self._alike = self._alike + 1 if kind == self._kind else 0
        self._kind = kind
        if kind is None or self._alike % EVERY != LIKE:
            return
        ran = [(row, out) for row, out in zip(step.rows, result.rows, strict=True) if out.tokens]
        if not ran:
            return
        drafted = sum(out.proposed > 0 for _, out in ran)
        followed = [row.propose for row, _ in ran if row.drafting]
        if len(followed) < len(ran) and depth and not any(out.by == "grammar" for _, out in ran):
            matching = sum(out.proposed > 0 for row, out in ran if not row.drafting)
            if matching:
                self._matched += MATCHED_RATE * (matching / (len(ran) - len(followed)) - self._matched)
        if not followed or max(followed) == depth:
            self.times.observed(len(ran), depth, len(followed), drafted, seconds * 1000)
