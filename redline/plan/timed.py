"""What some of the newest steps computed and how long they took, for whoever wants to know what steps cost.

Of steps with prompts every one, of others one in EVERY: a load goes out five times a second at most, and says what the
newest of each kind were.
"""

from collections import deque
from collections.abc import Sequence

from redline.plan.active import ActiveJob
from redline.tune.pairs import expanded_of, pairs_of
from redline.wire.news import TimedStep
from redline.wire.step import Step, StepResult

EVERY = 8  # steps without a prompt: counting the contexts of 64 rows takes 10 us
KEPT = 2  # of each kind


class TimedSteps:
    """The newest steps of each kind."""

    def __init__(self) -> None:
        self._with_prompts: deque[TimedStep] = deque(maxlen=KEPT)
        self._without: deque[TimedStep] = deque(maxlen=KEPT)

    @property
    def newest(self) -> tuple[TimedStep, ...]:
        """In the order of their numbers."""
        return tuple(sorted([*self._with_prompts, *self._without], key=lambda step: step.number))

    def took(self, step: Step, jobs: Sequence[ActiveJob], result: StepResult, seconds: float) -> None:
        """A step has settled. jobs: one for each of its rows."""
        with_prompts = step.rows[-1].start is not None  # decode rows stand before all others
        if not with_prompts and step.number % EVERY:
            return
        prompt, pairs, expanded, rows, context, tokens = 0, 0.0, 0, 0, 0, 0
        for row, job, outcome in zip(step.rows, jobs, result.rows, strict=True):
            if row.start is None:
                rows += 1
                context += job.computed
                tokens += len(outcome.tokens)
            else:
                prompt += row.count
                pairs += pairs_of(row.start, row.count)
                expanded += expanded_of(row.start, row.count)
        timed = TimedStep(
            number=step.number,
            prompt=prompt,
            pairs=pairs,
            expanded=expanded,
            rows=rows,
            context=context,
            tokens=tokens,
            ms=seconds * 1e3,
        )
        (self._with_prompts if with_prompts else self._without).append(timed)
