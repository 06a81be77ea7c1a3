"""Predicted step time of this worker: a fit to all kinds of its own steps, times a correction from its newest steps.

The correction (pace) is the median ratio of measured to fitted time over the newest mixed steps (prefill and decode).
It follows at once anything that slows the whole machine. The fit takes some milliseconds, in which nothing else is
scheduled. It is repeated when the number of steps with prompts has doubled, later every NEW_STEPS such steps, and only
when a prediction is requested.
"""

import statistics
from collections import deque

from redline.policy.pairs import Work
from redline.policy.steps import StepModel, StepTimeFit

LEAST = 2  # steps of each kind, with prompts and without, before predictions start
NEW_STEPS = 256  # steps with prompts between two fits, once there were that many
NEWEST = 16  # newest mixed steps, from which the pace is computed
FARTHEST = 2.0  # bound on the pace: at most 2 times the fit, at least half of it


class StepForecast:
    """Predicts step times in milliseconds. For the loop's thread alone."""

    def __init__(self, experts_of: int = 0, experts_chosen: int = 0) -> None:
        """experts_of, experts_chosen: as in `StepModel`."""
        self._fit = StepTimeFit(experts_of=experts_of, experts_chosen=experts_chosen)
        self._model: StepModel | None = None
        self._beside: deque[tuple[Work, float]] = deque(maxlen=NEWEST)  # (work, milliseconds) of the newest mixed steps
        self._pace: float | None = 1.0  # None: to be recomputed
        self._seen = {True: 0, False: 0}  # steps seen, by whether they had prompts
        self._fitted = 0  # steps with prompts at the last fit

    @property
    def known(self) -> bool:
        """Whether enough steps have run to predict one."""
        return min(self._seen.values()) >= LEAST

    def took(self, work: Work, ms: float) -> None:
        """Adds a step that took `ms` milliseconds."""
        self._fit.add(work, ms)
        self._seen[work.prompt > 0] += 1
        if work.prompt and work.rows:
            self._beside.append((work, ms))
            self._pace = None

    def ms(self, work: Work) -> float:
        """Predicted milliseconds of a step. Raises AssertionError unless `known`."""
        assert self.known, f"too few steps have run to predict one: {self._seen}"
        with_prompts = self._seen[True]
        # Early on each step changes the fit; later the pace follows new steps.
        if self._model is None or with_prompts - self._fitted >= min(NEW_STEPS, max(1, self._fitted)):
            self._model, self._fitted, self._pace = self._fit.model(), with_prompts, None
        if self._pace is None:
            self._pace = self._paced(self._model)
        return self._pace * self._model.step_ms(work)

    def _paced(self, model: StepModel) -> float:
        off = [ms / expected for work, ms in self._beside if (expected := model.step_ms(work)) > 0]
        return min(max(statistics.median(off), 1 / FARTHEST), FARTHEST) if off else 1.0
