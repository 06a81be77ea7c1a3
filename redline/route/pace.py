"""What prompts and answers take, learned from what happened: of all workers together, each time with less of what was
before.

Of all together: one that had a slow moment would be avoided, and so never be measured again. `Pace` knows what a step
takes by what is in it (`tune.steps.StepModel`, from the steps that workers tell of), and how long answers become.
`Busy` is one worker's: the share of its time that it computes prompts.
"""

import math

import msgspec

from redline.tune.pairs import Work
from redline.tune.steps import StepModel, StepSums

FRESH_TOKEN_S = 1e-4  # of a prompt, where nothing has been computed yet
FRESH_OUTPUT = 256  # tokens of an answer, where none has ended yet
STEP_MEMORY = 0.99  # share of what was measured that stays when a step is added
OUTPUT_MEMORY = 0.98  # likewise an answer
BUSY_S = 30.0  # over which a worker's share of prompts is taken: some answers


class Pace:
    """What has been measured lately. Everything has a value from the beginning on."""

    def __init__(self, known: StepModel | None = None) -> None:
        """known: what steps take, where nothing is to be learned of it."""
        self.step_tokens = 512  # of a step, at most: the least of all workers
        self._known = known
        self._sums = StepSums()
        self._prompts = False  # whether a step with some was measured
        self._rows = self._context = self._tokens = 0.0  # of steps without prompts
        self._prompt = self._pairs = self._expanded = 0.0  # of steps with prompts
        self._outputs: dict[str, tuple[float, float]] = {}  # of each class: answers, and their tokens

    def experts(self, of: int, chosen: int) -> None:
        """Each layer has so many experts, of which a token chooses so many. To be said before steps are added."""
        self._sums.experts_of, self._sums.experts_chosen = of, chosen

    def stepped(self, work: Work, seconds: float, tokens: float) -> None:
        """A step with so much in it took so many seconds, and gave so many tokens of answers."""
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
        """An answer of a class has come to its end."""
        answers, all = self._outputs.get(of, (0.0, 0.0))
        self._outputs[of] = OUTPUT_MEMORY * answers + 1, OUTPUT_MEMORY * all + tokens

    @property
    def model(self) -> StepModel:
        """What a step takes."""
        if self._known is not None:
            return self._known
        model = self._sums.model() or StepModel(base=0.0)
        return model if self._prompts else msgspec.structs.replace(model, prompt=1e3 * FRESH_TOKEN_S)

    @property
    def context(self) -> float:
        """Tokens that a row of an answer attends to, on the mean."""
        return self._context / self._rows if self._rows else 0.0

    @property
    def steps_a_token(self) -> float:
        """Of an answer; less than 1 where drafts hold."""
        return self._rows / self._tokens if self._tokens else 1.0

    def token_s(self, model: StepModel) -> float:
        """Seconds for a token of a prompt among many, in steps that are full."""
        ms = (model.base + model.experts * model.share(self.step_tokens)) / self.step_tokens + model.prompt
        if self._prompt:
            ms += (model.pair * self._pairs + model.expand * self._expanded) / self._prompt
        return ms / 1e3

    def between_s(self, answers: float) -> float:
        """Seconds between two tokens of an answer, where so many are written, it among them."""
        return self.model.decode_ms(answers, self.context) * self.steps_a_token / 1e3

    def output(self, of: str) -> float:
        """Tokens that an answer of a class becomes, on the mean."""
        answers, tokens = self._outputs.get(of, (0.0, 0.0))
        return max(1.0, tokens / answers) if answers else FRESH_OUTPUT


class Busy:
    """The share of its time that one worker computes prompts, over the last BUSY_S or so."""

    __slots__ = ("_at", "_share")

    def __init__(self) -> None:
        self._share = self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        """It is to compute a prompt, for so long."""
        self._share = self.share(now) + seconds / BUSY_S
        self._at = now

    def share(self, now: float) -> float:
        """As of now; more than 1 where more comes than it can compute."""
        return self._share * math.exp((self._at - now) / BUSY_S)
