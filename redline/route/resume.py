"""When a job that a worker has pre-empted goes on again: a prediction, told beside what it took.

It waits until answers beside it have ended and left it enough pages, and then has tokens to compute again. How long
answers become is known on the mean alone, and of answers that other replicas of the API have asked for nothing is: so
it is a guess of the wait, and a better one of the computing. An answer that has gone on for long is not taken to end
sooner for that.
"""

from collections.abc import Iterable
from typing import NamedTuple

from redline.route.pace import Pace
from redline.wire.delta import Preempted


class Beside(NamedTuple):
    """An answer that goes on meanwhile."""

    pages: int  # that it holds
    tokens: int  # it has
    most_tokens: int  # it may have
    of: str  # its class


class GoesOn(NamedTuple):
    """Seconds, predicted when a job was pre-empted."""

    wait_s: float  # until there are pages for it
    again_s: float  # then, to its next token


def goes_on(lost: Preempted, beside: Iterable[Beside], pace: Pace) -> GoesOn:
    """What is expected. beside: the answers that the same worker writes; the job itself is not among them."""
    between_s = pace.between_s(lost.running)
    ends = sorted((min(pace.output(each.of), max(1, each.most_tokens - each.tokens)), each.pages) for each in beside)
    wait_s, short = 0.0, lost.short_pages
    for left, pages in ends:
        if short <= 0:
            break
        wait_s = left * between_s
        short -= pages + 1  # one more is kept for each that runs
    kept = max(0, lost.lost_tokens - lost.again_tokens)
    again_ms = pace.model.prompt_ms(kept, lost.again_tokens, pace.step_tokens, lost.running, pace.context)
    return GoesOn(wait_s, max(between_s, again_ms / 1e3))
