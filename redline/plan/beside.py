"""How many tokens of prompts a step has beside answers, where its time is bounded. Private to plan.

`tune.chunks` chooses; here is what it is told. Time is that of steps that have settled, as it was told: a prompt waits
while steps run, and nothing here reads a clock.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from redline.plan.active import ActiveJob
from redline.tune.chunks import LOOKED_AT, Answers, Prompt, chunk_tokens
from redline.tune.pairs import Work


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

    spent_s: of all steps that have settled. bounded: steps whose prompts took all that they got, which was less than
    there was, and wanted more.
    """

    def __init__(self, step_ms: float | None) -> None:
        """step_ms: that such a step may take; None: as long as it does."""
        self.forecast: Forecast | None = None
        self.spent_s = 0.0
        self.bounded = 0
        self._step_ms = step_ms
        self._cut = False  # whether the step that is planned has less for prompts than they ask for

    def tokens(
        self,
        most: int,
        decoding: Sequence[ActiveJob],
        prompts: Sequence[ActiveJob],
        waiting: Iterable[ActiveJob],
        *,
        enter: bool,
    ) -> int:
        """Of `most` tokens, those that prompts get beside these answers: all where nothing bounds the step, or nothing
        is known of its time yet. prompts: that have begun, the oldest first. waiting: others. enter: whether one of
        these may begin now."""
        forecast, step_ms, self._cut = self.forecast, self._step_ms, False
        if forecast is None or step_ms is None or not decoding or most < 1 or not forecast.known:
            return most
        asked = [self._asked(job) for job in itertools.islice(itertools.chain(prompts, waiting), LOOKED_AT)]
        sharing = len(asked) if enter else min(len(prompts), LOOKED_AT)
        if not sharing:
            return most
        answers = Answers(len(decoding), sum(job.planned for job in decoding))
        chosen = chunk_tokens(forecast.ms, most, step_ms, answers, asked, sharing)
        self._cut = chosen < min(most, sum(prompt.tokens for prompt in asked[:sharing]))
        return chosen

    def left(self, tokens: int) -> None:
        """Of those of `tokens` so many are left: no prompt took them, since none more could begin."""
        self.bounded += self._cut and not tokens

    def _asked(self, job: ActiveJob) -> Prompt:
        tokens = max(1, job.work if job.slot is None else job.known - job.planned)
        promised_ms = None if job.generated else job.job.ttft_ms
        left_s = math.inf if promised_ms is None else promised_ms / 1e3 - (self.spent_s - job.came_at_s)
        return Prompt(tokens, job.known - tokens, left_s)
