"""How far a training is, and what rate it learns at: steps, tokens or seconds, whichever ends first."""

import math

from redline.wire.base import Record


class Budget(Record, frozen=True):
    """How long to train. None: without end; at least one of the three is a number. tokens: of all ranks."""

    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None


class Reached(Record, frozen=True):
    """What all ranks agreed on after `step` steps. Between two agreements tokens and seconds go on as they went."""

    step: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_per_step: float = 0.0
    seconds_per_step: float = 0.0

    def next(self, step: int, tokens: float, seconds: float) -> "Reached":
        """What is reached after `step` steps, with `tokens` and `seconds` in all."""
        steps = max(step - self.step, 1)
        return Reached(
            step=step,
            tokens=tokens,
            seconds=seconds,
            tokens_per_step=(tokens - self.tokens) / steps,
            seconds_per_step=(seconds - self.seconds) / steps,
        )

    def share(self, step: float, budget: Budget) -> float:
        """The share of the budget that is spent after `step` steps: 1 or more when it is all spent."""
        since = step - self.step
        return max(
            step / budget.steps if budget.steps else 0.0,
            (self.tokens + since * self.tokens_per_step) / budget.tokens if budget.tokens else 0.0,
            (self.seconds + since * self.seconds_per_step) / budget.seconds if budget.seconds else 0.0,
        )


def is_agreement(step: int, every: int) -> bool:
    """Whether ranks agree after this step: after 1, 2, 4, 8, ...

    and then every so many, since early steps say little.
    """
    return step % every == 0 or (step < every and step & (step - 1) == 0)


def rate(share: float, warmup: float) -> float:
    """The learning rate as a share of the highest: up over `warmup` of the budget, then half a cosine down to 0.

    share: of the budget that is spent.
    """
    if share < warmup:
        return share / warmup
    return 0.5 * (1 + math.cos(math.pi * min((share - warmup) / max(1 - warmup, 1e-9), 1.0)))
