"""The scheduler's limits."""

import math
from dataclasses import dataclass

from redline.errors import ConfigError
from redline.messages.job import PAGE_TOKENS

MOST_STEP_TOKENS = 1 << 16  # log probabilities of this many prompt tokens, with 20 alternatives each, take 23 MB


@dataclass(frozen=True)
class PlanConfig:
    """Limits on a planner's steps and queues. Raises ConfigError for values that contradict each other."""

    step_tokens: int = 512  # maximum number of positions of a step
    step_ms: float | None = None  # limit on the predicted time of a step that mixes prefill and decode; None: no limit
    max_running: int = 64  # maximum number of running jobs, each in a slot
    max_waiting: int = 1024  # maximum number of queued jobs, not counting those that free slots can take
    admit_together: int = 1  # waiting jobs are admitted when this many slots are free, or enough for all of them
    ahead: int = 1  # maximum number of unsettled steps while the next is scheduled
    draft_tokens: int = 0  # maximum number of draft tokens per row; 0 disables speculative decoding
    learned: bool = False  # a learned drafter is loaded; otherwise draft tokens are suffix matches

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.step_tokens:
            raise ConfigError(
                f"max_running is {self.max_running} and step_tokens {self.step_tokens}: "
                "a step needs a token for each running job"
            )
        if self.step_tokens > MOST_STEP_TOKENS:
            raise ConfigError(f"step_tokens is {self.step_tokens:,}; the maximum is {MOST_STEP_TOKENS:,}")
        if not 1 <= self.admit_together <= self.max_running:
            raise ConfigError(
                f"admit_together is {self.admit_together}; expected 1 to max_running, which is {self.max_running}"
            )
        if self.step_ms is not None and not 0 < self.step_ms < math.inf:
            raise ConfigError(f"step_ms is {self.step_ms:g}; expected a time in milliseconds, greater than 0")
        if self.max_waiting < 0 or self.ahead < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting} and ahead {self.ahead}: neither can be negative")
        if not 0 <= self.draft_tokens <= PAGE_TOKENS:
            raise ConfigError(f"draft_tokens is {self.draft_tokens}; expected 0 to {PAGE_TOKENS}")
