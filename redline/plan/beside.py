"""How many tokens of prompts a step has beside answers, where its time is bounded. Private to plan.

`tune.chunks` chooses; here is what it is told. Time is that of steps that have settled, as it was told: a prompt waits
while steps run, and nothing here reads a clock.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from redline.plan.active import ActiveJob
from redline.tune.chunks import LOOKED_AT, Due, chunk_tokens
from redline.tune.pairs import Work, expanded_of, pairs_of


class Forecast(Protocol):
    """Milliseconds of steps (`tune.forecast.StepForecast`)."""

    @property
    def known(self) -> bool:
        """Whether anything can be predicted."""
        ...

    def took(self, work: Work, ms: float) -> None:
        """A step has taken so many milliseconds."""
        ...

    def ms(self, work: Work) -> float:
        """What a step would take."""
        ...


class Beside:
    """Bounds what prompts get of a step that also has decode rows.

    spent_s: of all steps that have settled. bounded: steps whose prompts got less than there was.
    """

    def __init__(self, step_ms: float | None) -> None:
        """step_ms: that such a step may take; None: as long as it does."""
        self.forecast: Forecast | None = None
        self.spent_s = 0.0
        self.bounded = 0
        self._step_ms = step_ms

    def tokens(
        self, most: int, decoding: Sequence[ActiveJob], prompts: Sequence[ActiveJob], waiting: Iterable[ActiveJob]
    ) -> int:
        """Of `most` tokens, those that prompts get beside these answers. prompts: that have begun, the oldest first.
        waiting: others. All where nothing bounds the step, or nothing is known of its time yet."""
        forecast, step_ms = self.forecast, self._step_ms
        if forecast is None or step_ms is None or not decoding or most < 1 or not forecast.known:
            return most
        asked = list(itertools.islice(itertools.chain(prompts, waiting), LOOKED_AT))
        if not asked:
            return most
        # The deepest counts for all: a chunk of it takes longest.
        before = max((job.planned for job in prompts), default=asked[0].known - asked[0].work)
        rows, context = len(decoding), sum(job.planned for job in decoding)

        def ms(tokens: int) -> float:
            return forecast.ms(Work(tokens, pairs_of(before, tokens), rows, context, expanded_of(before, tokens)))

        chosen = chunk_tokens(ms, most, step_ms, [self._due(job) for job in asked])
        self.bounded += chosen < min(most, sum(_left(job) for job in asked))
        return chosen

    def _due(self, job: ActiveJob) -> Due:
        promised_ms = job.job.ttft_ms
        if promised_ms is None or job.generated:
            return Due(_left(job), math.inf)
        return Due(_left(job), promised_ms / 1e3 - (self.spent_s - job.came_at_s))


def _left(job: ActiveJob) -> int:
    """Tokens that are to be computed."""
    return job.work if job.slot is None else job.known - job.planned
