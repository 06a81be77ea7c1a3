"""Predicts when a preempted job resumes; the prediction is reported with the measured time.

The job waits until other answers on the worker have ended and freed enough pages, and then recomputes tokens. Only the
mean length of answers is known, and nothing of answers from other API replicas: so the wait is a rough estimate, and
the recompute time a better one. An answer that has been running for long is not assumed to end sooner.
"""

from collections.abc import Iterable
from typing import NamedTuple

from redline.messages.delta import Preempted
from redline.router.latency_model import LatencyModel


class ConcurrentAnswer(NamedTuple):
    """Another running answer on the same worker."""

    pages: int  # pages that it holds
    tokens: int  # tokens so far
    most_tokens: int  # maximum number of tokens
    of: str  # class of its request


class GoesOn(NamedTuple):
    """Seconds, predicted at the preemption of a job."""

    wait_s: float  # until enough pages are free
    again_s: float  # from then to its next token


def goes_on(lost: Preempted, beside: Iterable[ConcurrentAnswer], pace: LatencyModel) -> GoesOn:
    """The prediction. beside: the other running answers on the worker, without the preempted job."""
    between_s = pace.between_s(lost.running)
    ends = sorted((min(pace.output(each.of), max(1, each.most_tokens - each.tokens)), each.pages) for each in beside)
    wait_s, short = 0.0, lost.short_pages
    for left, pages in ends:
        if short <= 0:
            break
        wait_s = left * between_s
        short -= pages + 1  # admission keeps one more page free for each running job
    kept = max(0, lost.lost_tokens - lost.again_tokens)
    again_ms = pace.model.prompt_ms(kept, lost.again_tokens, pace.step_tokens, lost.running, pace.context)
    return GoesOn(wait_s, max(between_s, again_ms / 1e3))
