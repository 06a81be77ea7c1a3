"""Step times and answer lengths, learned from reports of all workers together, with exponentially fading weights.

They are not learned per worker: a worker with a slow moment would then be avoided, and never be measured again.
`LatencyModel` predicts step times from the content of a step (`policy.steps.StepModel`, fitted to the steps that
workers report), and the length of answers. `PrefillShare` is kept per worker: the share of its time spent on prefill.
"""

import math

import msgspec

from redline.policy.pairs import Work
from redline.policy.steps import StepModel, StepTimeStats

FRESH_TOKEN_S = 1e-4  # seconds per prompt token, before any prefill was measured
FRESH_OUTPUT = 256  # tokens of an answer, before any is complete
STEP_MEMORY = 0.99  # factor on the weight of earlier steps when a step is added
OUTPUT_MEMORY = 0.98  # factor on the weight of earlier answers when an answer is added
BUSY_S = 30.0  # time constant of a worker's prefill share: the duration of some answers


class LatencyModel:
    """Recent measurements. Every property has a default before the first one."""

    def __init__(self, known: StepModel | None = None) -> None:
        """known: a fixed step model; None: it is learned."""
        self.step_tokens = 512  # maximum tokens of a step: the minimum over all workers
        self._known = known
        self._sums = StepTimeStats()
        self._prompts = False  # whether a step with prompt tokens was measured
        self._rows = self._context = self._tokens = 0.0  # of steps without prompts
        self._prompt = self._pairs = self._expanded = 0.0  # of steps with prompts
        self._outputs: dict[str, tuple[float, float]] = {}  # by class: number of answers, and their tokens

    def experts(self, of: int, chosen: int) -> None:
        """Set experts per layer and experts per token. Call before the first `stepped`."""
        self._sums.experts_of, self._sums.experts_chosen = of, chosen

    def stepped(self, work: Work, seconds: float, tokens: float) -> None:
        """Add a step: its work, its duration in seconds, and the number of answer tokens that it gave."""
        if self._known is None:
            self._sums.add(work, 1e3 * seconds)
        keep = STEP_MEMORY
        if work.prompt:
            self._prompts = True
            self._prompt = keep * self._prompt + work.prompt
            self._pairs = keep * self._pairs + work.pairs
            self._expanded = keep * self._expanded + work.expanded
        elif work.rows and tokens:
            self._rows = keep * self._rows + work.rows
            self._context = keep * self._context + work.context
            self._tokens = keep * self._tokens + tokens

    def answered(self, of: str, tokens: int) -> None:
        """Add the length of a completed answer of class `of`."""
        answers, all = self._outputs.get(of, (0.0, 0.0))
        self._outputs[of] = OUTPUT_MEMORY * answers + 1, OUTPUT_MEMORY * all + tokens

    @property
    def model(self) -> StepModel:
        """The step time model."""
        if self._known is not None:
            return self._known
        model = self._sums.model() or StepModel(base=0.0)
        return model if self._prompts else msgspec.structs.replace(model, prompt=1e3 * FRESH_TOKEN_S)

    @property
    def context(self) -> float:
        """Mean context of a decode row, in tokens."""
        return self._context / self._rows if self._rows else 0.0

    @property
    def steps_a_token(self) -> float:
        """Decode steps per answer token; less than 1 if draft tokens are accepted."""
        return self._rows / self._tokens if self._tokens else 1.0

    def token_s(self, model: StepModel) -> float:
        """Seconds per prompt token of a long queue, computed in full steps."""
        ms = (model.base + model.experts * model.share(self.step_tokens)) / self.step_tokens + model.prompt
        if self._prompt:
            ms += (model.pair * self._pairs + model.expand * self._expanded) / self._prompt
        return ms / 1e3

    def between_s(self, answers: float) -> float:
        """Seconds between two tokens of an answer, with `answers` answers running, this one included."""
        return self.model.decode_ms(answers, self.context) * self.steps_a_token / 1e3

    def output(self, of: str) -> float:
        """Mean number of tokens of an answer of class `of`."""
        answers, tokens = self._outputs.get(of, (0.0, 0.0))
        return max(1.0, tokens / answers) if answers else FRESH_OUTPUT


class PrefillShare:
    """The share of its time that one worker spends on prefill, over about the last BUSY_S seconds."""

    __slots__ = ("_at", "_share")

    def __init__(self) -> None:
        self._share = self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Add a prompt with a predicted prefill time of `seconds`."""
        self._share = self.share(now) + seconds / BUSY_S
        self._at = now

    def share(self, now: float) -> float:
        """The share at time `now`; more than 1 if more work arrives than the worker can compute."""
        return self._share * math.exp((self._at - now) / BUSY_S)
