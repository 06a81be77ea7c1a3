"""How far jobs speculate: what was accepted, what rounds cost, and the choice between them.

Private to plan. The choosing itself is in tune; here is what it is told.
"""

from collections import Counter
from collections.abc import Sequence

from redline.plan.active import ActiveJob
from redline.tune.acceptance import KEEPS, REST_KEEPS, Acceptance
from redline.tune.choose import Rows, Worth, choose, gain
from redline.tune.costs import RoundTimes, StepCosts
from redline.wire.job import PAGE_TOKENS
from redline.wire.step import Drafter, RowResult, Step, StepResult

EVERY = 8  # steps between two decisions, and between two steps whose times are taken in
LIKE = 2  # steps of one kind before one whose time is its own
PROBE = 128  # decisions between two that draft nothing, so that it is known what that takes
MOST_FORCED = 15  # drafts of a row, at most, where a grammar forces more: others wait for a step that is long
NOTED = 4  # steps between two whose time is noted for their jobs: looking at 64 rows takes tens of microseconds
MATCHED_RATE = 0.1  # share of a step's surprise that the share of rows with a match takes over


class Speculation:
    """Decides how many drafts each row proposes, and counts what came of them.

    most: drafts of one row (0: nobody speculates). learned: there is a learned drafter, beside suffix matches.
    """

    def __init__(self, most: int, learned: bool, costs: StepCosts) -> None:
        self.times = RoundTimes(costs)
        self._most = most
        self._learned = learned
        self._worth = Worth()
        self._chosen = most  # at the last decision
        self._kind: tuple[int, int] | None = None  # of the last step: its rows, as a power of two, and drafts
        self._alike = 0  # steps of that kind before it, one after another
        self._until_next = 0
        self._until_probe = PROBE
        self._by_learned = Acceptance(most)  # of the learned drafter's own drafts
        self._by_suffix = Acceptance(most)  # of matches of a text's own past, whoever else follows it
        self._matched = 1.0  # of these, the share that has drafts in steps where any has
        self._outcomes: Counter[tuple[Drafter | None, int, int]] = Counter()  # rows by who drafted, proposed, accepted
        self._taken_in: Counter[tuple[Drafter | None, int, int]] = Counter()  # of these, what the last decision knew

    @property
    def drafts(self) -> int:
        """Rows that verified drafts."""
        return self._outcomes.total()

    @property
    def draft_tokens(self) -> int:
        """Drafts that were verified."""
        return sum(proposed * rows for (_, proposed, _), rows in self._outcomes.items())

    @property
    def accepted_tokens(self) -> int:
        """Drafts that held."""
        return sum(accepted * rows for (_, _, accepted), rows in self._outcomes.items())

    @property
    def suffix_draft_tokens(self) -> int:
        """Drafts of matches of a text's own past that were verified."""
        return self._proposed("suffix")

    @property
    def suffix_accepted_tokens(self) -> int:
        """How many of them held."""
        return self._accepted("suffix")

    @property
    def grammar_draft_tokens(self) -> int:
        """Drafts that a grammar has forced, and that were verified."""
        return self._proposed("grammar")

    @property
    def grammar_accepted_tokens(self) -> int:
        """How many of them held: all, where the model gives numbers."""
        return self._accepted("grammar")

    def _proposed(self, by: Drafter) -> int:
        return sum(proposed * rows for (one, proposed, _), rows in self._outcomes.items() if one == by)

    def _accepted(self, by: Drafter) -> int:
        return sum(accepted * rows for (one, _, accepted), rows in self._outcomes.items() if one == by)

    @property
    def accepted_per_pos(self) -> list[int]:
        """How often the first, second ... draft of a row held."""
        held = Counter[int]()
        for (_, _, accepted), rows in self._outcomes.items():
            held[accepted] += rows
        return [sum(rows for accepted, rows in held.items() if accepted > place) for place in range(self._most)]

    @property
    def follows(self) -> bool:
        """Whether there is a learned drafter and it pays."""
        return self._learned and self._worth.pays

    def lengths(self, jobs: Sequence[ActiveJob], most: int = PAGE_TOKENS) -> list[int]:
        """For each job, whose next row samples, the most drafts to propose behind that row; `most` at most.

        Decided every EVERY steps: what is known changes slowly, and a decision takes time that a small model's step
        would notice.
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
        """How many drafts a row of a step of `rows` decode rows verifies, at most, of those that a grammar forces.

        forced: for each row where it forces any, how many. They hold in any case, and a step of more positions takes no
        longer than several of fewer. But where rows are padded all take what the longest one does: then it is what the
        step was measured to take at the start that counts. (What steps have taken since says little of depths that are
        seldom tried.)
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
        by_suffix = Rows(len(jobs) - followed, suffix, self._matched)
        depth = choose(Rows(followed, learned), by_suffix, self.times)
        # Nothing is learnt of drafts that are not asked for: what was learnt fades, so that they are tried again.
        if not depth or not followed:
            self._by_learned.fade(REST_KEEPS)
        if not depth or followed == len(jobs):
            self._by_suffix.fade(REST_KEEPS)
            self._matched = 1 - (1 - self._matched) * REST_KEEPS
        return depth

    def _take_in(self) -> None:
        """What rows have accepted since the last decision."""
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
        """Take in what came of the drafts of a decode row, of a job that has not ended.

        Those of a grammar are counted; nothing is learnt of them, since they always hold.
        """
        if outcome.proposed:
            self._outcomes[outcome.by, outcome.proposed, outcome.accepted] += 1

    def predicted_ms(self, step: Step, result: StepResult) -> tuple[float, float] | None:
        """What is expected of a step that verified drafts, before `took` is told of it: milliseconds, and those of the
        same rows without any. None where the step had no drafts, or tokens of prompts, where nothing was measured, and
        for all steps but one in NOTED."""
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
        """Take in that a step took so many seconds.

        Times are learnt from one step in EVERY, where it holds nothing but decode rows which drafted as they verified,
        and so did the LIKE steps before it: of steps launched ahead of results, one's time is partly the other's.
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
