"""Training progress and learning rate, by steps, tokens or seconds, whichever budget ends first."""

import math

from redline.messages.base import Record


class TrainBudget(Record, frozen=True):
    """How long to train. None: unlimited; at least one of the three must be set. tokens: over all ranks."""

    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None


class Reached(Record, frozen=True):
    """Progress that all ranks agreed on after `step` steps. Between agreements tokens and seconds are extrapolated."""

    step: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_per_step: float = 0.0
    seconds_per_step: float = 0.0

    def next(self, step: int, tokens: float, seconds: float) -> "Reached":
        """The progress after `step` steps, with `tokens` and `seconds` in total."""
        steps = max(step - self.step, 1)
        return Reached(
            step=step,
            tokens=tokens,
            seconds=seconds,
            tokens_per_step=(tokens - self.tokens) / steps,
            seconds_per_step=(seconds - self.seconds) / steps,
        )

    def share(self, step: float, budget: TrainBudget) -> float:
        """The share of the budget used after `step` steps: 1 or more if it is used up."""
        since = step - self.step
        return max(
            step / budget.steps if budget.steps else 0.0,
            (self.tokens + since * self.tokens_per_step) / budget.tokens if budget.tokens else 0.0,
            (self.seconds + since * self.seconds_per_step) / budget.seconds if budget.seconds else 0.0,
        )


def is_agreement(step: int, every: int) -> bool:
    """Whether ranks synchronise their progress after this step: after steps 1, 2, 4, 8, ... and multiples of `every`.

    Early steps are synchronised more often because their times are not representative.
    """
    return step % every == 0 or (step < every and step & (step - 1) == 0)


def rate(share: float, warmup: float) -> float:
    """The learning rate as a share of its maximum: linear over `warmup` of the budget, then a half cosine down to 0.

    share: share of the budget used.
    """
    if share < warmup:
        return share / warmup
    return 0.5 * (1 + math.cos(math.pi * min((share - warmup) / max(1 - warmup, 1e-9), 1.0)))
