"""How many tokens of prompts a step computes beside answers, so that it is not longer than it may be.

A chunk of a prompt lies in one step with the next tokens of all answers, and so between two tokens of each. It may take
what SHARE of the step's most time leaves, by prediction, in whole pages; but a page in any case, so that every prompt
goes on. Small chunks cost: each step reads the weights anew. So where a prompt would miss its first token by them, a
chunk is as long as keeps that, and whole where nothing shorter does. A prompt that would be late even if it were alone
from now on asks for nothing: what answers wait would not bring it back. Pure.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from redline.wire.job import PAGE_TOKENS

SHARE = 0.9  # of a time that may be used: what is predicted is what steps usually take, and some take longer
LOOKED_AT = 128  # prompts, the oldest, when a chunk is chosen


class Due(NamedTuple):
    """A prompt that is computed or waits. left_s: until its first token is late; infinite: nothing is promised."""

    tokens: int  # that are to be computed
    left_s: float


def chunk_tokens(ms: Callable[[int], float], most: int, step_ms: float, due: Sequence[Due] = ()) -> int:
    """Tokens of prompts for a step beside answers: pages, or `most`, which is all that there may be.

    ms: what the step is predicted to take with so many of them; it does not fall. step_ms: that it may take. due: all
    prompts, the oldest first.
    """
    pages, may_take_ms = -(-most // PAGE_TOKENS), SHARE * step_ms

    def takes_ms(count: int) -> float:
        return ms(min(most, count * PAGE_TOKENS))

    chosen = max(1, _least(lambda count: takes_ms(count) > may_take_ms, 1, pages + 1) - 1)
    if chosen < pages and (rate := _needed(due, most / takes_ms(pages))):
        chosen = _least(lambda count: count * PAGE_TOKENS >= rate * takes_ms(count), chosen, pages)
    return min(most, chosen * PAGE_TOKENS)


def _needed(due: Sequence[Due], fastest: float) -> float:
    """Tokens a millisecond that keep all first tokens that can be kept; 0: nothing is promised. fastest: as many as
    there can be."""
    if all(one.left_s == math.inf for one in due):
        return 0.0
    shorter, before = dict[int, int](), 0
    for place in sorted(range(len(due)), key=lambda place: due[place].tokens):
        before += due[place].tokens
        shorter[place] = before
    needed, older = 0.0, 0
    for place, (tokens, left_s) in enumerate(due):
        older += tokens
        left_ms = SHARE * 1e3 * left_s
        if tokens <= fastest * left_ms:
            # Half of what prompts get is for those with least to compute, the rest for the oldest.
            needed = max(needed, min(older, 2 * shorter[place]) / left_ms)
    return needed


def _least(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The least of `low` to `high` of which something holds that holds of all above; `high`: of none below it."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
