"""How many tokens of prompts a step computes beside answers, so that it is not longer than it may be.

A chunk of a prompt lies in one step with the next tokens of all answers, and so between two tokens of each. It may take
what SHARE of the step's most time leaves, by prediction, in whole pages. Small chunks cost: each step reads the weights
anew, and expands what lies before it. So where not even a page keeps the time, a chunk is the shortest by which answers
wait no more than MOST_WAIT times what they wait in all by whole chunks; and where more prompts would miss their first
token than answers wait, it is as long as keeps those, and whole where nothing shorter does. A prompt that would be late
even if it were alone from now on asks for nothing: what answers wait would not bring it back. Pure.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from redline.tune.pairs import Work, expanded_of, pairs_of
from redline.wire.job import PAGE_TOKENS

SHARE = 0.9  # of a time that may be used: what is predicted is what steps usually take, and some take longer
MOST_WAIT = 4 / 3  # times what answers wait by whole chunks, for the same tokens, where steps are too long in any case
LOOKED_AT = 128  # prompts, the oldest, when a chunk is chosen


class Prompt(NamedTuple):
    """A prompt that is computed or waits. left_s: until its first token is late; infinite: nothing is promised."""

    tokens: int  # that are to be computed
    before: int = 0  # that are, or are cached
    left_s: float = math.inf


class Answers(NamedTuple):
    """Answers that have a row in the step, and the tokens before them, of all together."""

    rows: int
    context: float = 0.0


def chunk_tokens(
    ms: Callable[[Work], float],
    most: int,
    step_ms: float,
    answers: Answers,
    prompts: Sequence[Prompt],
    sharing: int | None = None,
) -> int:
    """Tokens of prompts for a step beside answers: pages, or `most`, which is all that there may be, and where nobody
    has a share.

    ms: what a step is predicted to take; with more in it it does not take less. step_ms: that it may take. prompts: the
    oldest first. sharing: so many of them, the first, may have a share of the step; None: all.
    """
    if most < 1 or not prompts[:sharing]:
        return most
    pages, share = -(-most // PAGE_TOKENS), _Share(prompts[:sharing], answers)

    def work(count: int) -> Work:
        return share.work(min(most, count * PAGE_TOKENS))

    def rate(count: int) -> float:
        has = work(count)
        return has.prompt / ms(has)

    chosen = _least(lambda count: ms(work(count)) > SHARE * step_ms, 1, pages + 1) - 1
    if not chosen:
        alone_ms = ms(work(0))

        def added_ms(count: int) -> float:
            has = work(count)
            return (ms(has) - alone_ms) / has.prompt

        chosen = _least(lambda count: added_ms(count) <= MOST_WAIT * added_ms(pages), 1, pages)
    if chosen < pages and any(prompt.left_s < math.inf for prompt in prompts):
        late = [needed for needed in _needed(prompts, rate(pages)) if needed > rate(chosen)]
        if len(late) > answers.rows:
            chosen = _least(lambda count: rate(count) >= max(late), chosen, pages)
    return min(most, chosen * PAGE_TOKENS)


def work_of(tokens: int, prompts: Sequence[Prompt], answers: Answers) -> Work:
    """A step with so many tokens of these prompts: half for those that have less to compute than the oldest, those with
    least first, and the rest for the oldest, as the planner shares them."""
    return _Share(prompts, answers).work(tokens)


class _Share:
    """How prompts share a step's tokens."""

    def __init__(self, prompts: Sequence[Prompt], answers: Answers) -> None:
        self._prompts, self._answers = prompts, answers
        least = prompts[0].tokens if prompts else 0
        self._quick = sorted((prompt.tokens, place) for place, prompt in enumerate(prompts) if prompt.tokens < least)

    def work(self, tokens: int) -> Work:
        left, half, parts = tokens, tokens // 2, dict[int, int]()
        for count, place in self._quick:
            if not half:
                break
            parts[place] = min(half, count)
            half -= parts[place]
            left -= parts[place]
        for place, prompt in enumerate(self._prompts):
            if not left:
                break
            if place not in parts:
                parts[place] = min(left, prompt.tokens)
                left -= parts[place]
        pairs, expanded = 0.0, 0
        for place, count in parts.items():
            before = self._prompts[place].before
            pairs += pairs_of(before, count)
            expanded += expanded_of(before, count)
        return Work(tokens - left, pairs, self._answers.rows, self._answers.context, expanded)


def _needed(prompts: Sequence[Prompt], fastest: float) -> list[float]:
    """Tokens a millisecond that keep each first token that is promised and can be kept. fastest: as many as there can
    be."""
    shorter, before = dict[int, int](), 0
    for place in sorted(range(len(prompts)), key=lambda place: prompts[place].tokens):
        before += prompts[place].tokens
        shorter[place] = before
    needed, older = list[float](), 0
    for place, (tokens, _, left_s) in enumerate(prompts):
        older += tokens
        left_ms = SHARE * 1e3 * left_s
        if left_s < math.inf and tokens <= fastest * left_ms:
            needed.append(min(older, 2 * shorter[place]) / left_ms)
    return needed


def _least(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The least of `low` to `high` of which something holds that holds of all above; `high`: of none below it."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
