"""Chunked prefill with a bound on step time: the number of prompt tokens in a step that also decodes.

A prompt chunk runs in the same step as the next token of every decoding request, so it adds to the inter-token latency
of each. The chunk is the longest, in whole pages, that keeps the predicted step time within SHARE of `step_ms`. Small
chunks have a cost: each step reads the weights again and expands the keys and values of the prompt's earlier tokens.
Therefore, if even one page exceeds the bound, the chunk is the shortest that delays the decoding requests in total by
at most MOST_WAIT times as much as whole chunks. If more prompts would miss their TTFT target than there are decoding
requests, the chunk is long enough to keep those targets, or whole if no shorter one does. A prompt that would be late
even if it ran alone from now on is not counted: delaying the decoding requests would not save it. Pure functions.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from redline.messages.job import PAGE_TOKENS
from redline.policy.pairs import Work, expanded_of, pairs_of

SHARE = 0.9  # share of a time limit that may be used: predictions are of typical step times, and some steps take longer
# times the delay of decoding requests with whole chunks, for the same tokens, if all steps exceed the limit
MOST_WAIT = 4 / 3
LOOKED_AT = 128  # oldest prompts considered when a chunk is chosen


class PrefillLeft(NamedTuple):
    """A running or waiting prefill. left_s: seconds until its first token misses the TTFT target; infinite: no
    target."""

    tokens: int  # tokens still to compute
    before: int = 0  # tokens already computed or cached
    left_s: float = math.inf


class Answers(NamedTuple):
    """Decode rows of the step: `rows` requests, and `context`, the tokens of context of all of them together."""

    rows: int
    context: float = 0.0


def chunk_tokens(
    ms: Callable[[Work], float],
    most: int,
    step_ms: float,
    answers: Answers,
    prompts: Sequence[PrefillLeft],
    sharing: int | None = None,
) -> int:
    """Prefill budget of a mixed step, in tokens: a multiple of a page, or `most`, the tokens available, which is also
    the result if no prompt may have a share.

    ms: predicts the milliseconds of a step; must not decrease with more work. step_ms: bound on the step's time.
    prompts: the oldest first. sharing: only the first `sharing` prompts may have a share of the step; None: all.
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


def work_of(tokens: int, prompts: Sequence[PrefillLeft], answers: Answers) -> Work:
    """The work of a step with `tokens` tokens of these prompts, divided as the scheduler does: half for the prompts
    that have less to compute than the oldest one, shortest first, and the rest for the oldest."""
    return _Share(prompts, answers).work(tokens)


class _Share:
    """How prompts share a step's tokens."""

    def __init__(self, prompts: Sequence[PrefillLeft], answers: Answers) -> None:
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


def _needed(prompts: Sequence[PrefillLeft], fastest: float) -> list[float]:
    """Tokens per millisecond needed for each TTFT target that can still be met. fastest: the highest possible rate."""
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
    """The smallest value in [low, high) for which `holds` is true, by binary search; `high` if there is none.
    `holds` must be monotonic: once true, true for all larger values."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
