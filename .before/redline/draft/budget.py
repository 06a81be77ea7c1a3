"""How far a training is, and what rate it learns at: steps, tokens or seconds, whichever ends first."""

import math

from redline.wire.base import Record


class Budget(Record, frozen=True):
    """None: without end; at least one has one."""

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
        """Totals after `step` steps."""
        steps = max(step - self.step, 1)
        return Reached(
            step=step,
            tokens=tokens,
            seconds=seconds,
            tokens_per_step=(tokens - self.tokens) / steps,
            seconds_per_step=(seconds - self.seconds) / steps,
        )

    def share(self, step: float, budget: Budget) -> float:
        """Of the budget, after `step` steps: 1 or more when it is spent."""
        since = step - self.step
        return max(
            step / budget.steps if budget.steps else 0.0,
            (self.tokens + since * self.tokens_per_step) / budget.tokens if budget.tokens else 0.0,
            (self.seconds + since * self.seconds_per_step) / budget.seconds if budget.seconds else 0.0,
        )


def is_agreement(step: int, every: int) -> bool:
    """After steps 1, 2, 4, 8, ... and then every so many: early steps say little about later ones."""
    return step % every == 0 or (step < every and step & (step - 1) == 0)


def rate(share: float, warmup: float) -> float:
    """Of the highest rate: up over `warmup` of the budget, then half a cosine down to 0."""
    if share < warmup:
        return share / warmup
    return 0.5 * (1 + math.cos(math.pi * min((share - warmup) / max(1 - warmup, 1e-9), 1.0)))
