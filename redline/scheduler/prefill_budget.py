"""Prefill budget of a step that also has decode rows, if the step time is bounded.

This module collects the inputs; `policy.chunk_budget` chooses the budget. Time is the sum of the durations of settled
steps: a prompt waits while steps run, and nothing here reads a clock.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from redline.policy.chunk_budget import LOOKED_AT, Answers, PrefillLeft, chunk_tokens
from redline.policy.pairs import Work
from redline.scheduler.active import ActiveJob


class Forecast(Protocol):
    """Predicts step times in milliseconds (`policy.forecast.StepForecast`)."""

    @property
    def known(self) -> bool:
        """Whether there is enough data for a prediction."""
        ...

    def took(self, work: Work, ms: float) -> None:
        """Add the duration of a step."""
        ...

    def ms(self, work: Work) -> float:
        """Predicted duration of a step."""
        ...


class PrefillBudget:
    """Limits the prefill budget of mixed steps (prefill and decode).

    spent_s: sum of the durations of all settled steps. bounded: number of steps whose reduced prefill budget was used
    up while prompts could have used more.
    """

    def __init__(self, step_ms: float | None) -> None:
        """step_ms: maximum duration of a mixed step; None disables the limit."""
        self.forecast: Forecast | None = None
        self.spent_s = 0.0
        self.bounded = 0
        self._step_ms = step_ms
        self._cut = False  # whether the step being scheduled has a smaller prefill budget than its prompts could use

    def tokens(
        self,
        most: int,
        decoding: Sequence[ActiveJob],
        prompts: Sequence[ActiveJob],
        waiting: Iterable[ActiveJob],
        *,
        enter: bool,
    ) -> int:
        """Prefill budget, out of `most` tokens, of a step with these decode rows: `most` if the step time is not
        bounded or cannot be predicted yet. prompts: running jobs in prefill, oldest first. waiting: jobs that have
        not started. enter: whether a waiting job may start in this step."""
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
        """Report how many tokens of the prefill budget were not used, because no further prompt could start."""
        self.bounded += self._cut and not tokens

    def _asked(self, job: ActiveJob) -> PrefillLeft:
        tokens = max(1, job.work if job.slot is None else job.known - job.planned)
        promised_ms = None if job.generated else job.job.ttft_ms
        left_s = math.inf if promised_ms is None else promised_ms / 1e3 - (self.spent_s - job.came_at_s)
        return PrefillLeft(tokens, job.known - tokens, left_s)
