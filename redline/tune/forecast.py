"""What a worker's next step will take, learnt from its own: a fit to steps of all kinds, times the pace of the newest.

The pace is the median of what the newest steps with prompts beside answers took, over what the fit says of them. It
follows at once what slows a machine as a whole. The fit, some milliseconds in which nothing else is planned, is made
anew when twice as many steps with prompts have run, later every NEW_STEPS, and only where somebody asks.
"""

import statistics
from collections import deque

from redline.tune.pairs import Work
from redline.tune.steps import StepFit, StepModel

LEAST = 2  # steps of each kind, with prompts and without, before anything is predicted
NEW_STEPS = 256  # with prompts, between two fits, once there were as many
NEWEST = 16  # steps with prompts beside answers, by which is told how fast the machine is just now
FARTHEST = 2.0  # times what the fit says, or half of it, that the pace may be


class StepForecast:
    """Milliseconds of steps. The loop's thread uses it."""

    def __init__(self, experts_of: int = 0, experts_chosen: int = 0) -> None:
        """experts_of, experts_chosen: as in `StepModel`."""
        self._fit = StepFit(experts_of=experts_of, experts_chosen=experts_chosen)
        self._model: StepModel | None = None
        self._beside: deque[tuple[Work, float]] = deque(maxlen=NEWEST)  # and milliseconds
        self._pace: float | None = 1.0  # None: to be told anew
        self._seen = {True: 0, False: 0}  # steps, by whether they had prompts
        self._fitted = 0  # with prompts, when the fit was made

    @property
    def known(self) -> bool:
        """Whether enough steps have run."""
        return min(self._seen.values()) >= LEAST

    def took(self, work: Work, ms: float) -> None:
        """A step has taken so many milliseconds."""
        self._fit.add(work, ms)
        self._seen[work.prompt > 0] += 1
        if work.prompt and work.rows:
            self._beside.append((work, ms))
            self._pace = None

    def ms(self, work: Work) -> float:
        """What a step would take. Raises AssertionError while nothing is known."""
        assert self.known, f"too few steps have run to predict one: {self._seen}"
        with_prompts = self._seen[True]
        # At first each step says much; later the pace says what is new.
        if self._model is None or with_prompts - self._fitted >= min(NEW_STEPS, max(1, self._fitted)):
            self._model, self._fitted, self._pace = self._fit.model(), with_prompts, None
        if self._pace is None:
            self._pace = self._paced(self._model)
        return self._pace * self._model.step_ms(work)

    def _paced(self, model: StepModel) -> float:
        off = [ms / expected for work, ms in self._beside if (expected := model.step_ms(work)) > 0]
        return min(max(statistics.median(off), 1 / FARTHEST), FARTHEST) if off else 1.0
