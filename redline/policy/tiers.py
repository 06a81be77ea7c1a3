"""Chooses which pages to fetch from KV offload tiers rather than recompute, from learned read times and prefill times.

A read takes a fixed time plus a time per page of each tier (`ReadTimes`); a prompt takes the time of its steps
(`PrefillTimes`). The comparison is between times to first token: of a prompt that reads its first pages and computes
the rest, and of one that is computed in full. Until enough steps have been measured, all stored pages are fetched.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from redline.policy.pairs import Work, expanded_of, pairs_of
from redline.policy.steps import StepModel, StepTimeFit

READINGS = 24  # newest reads kept of each tier
FADES = 0.85  # factor of a read's weight for each newer read of the same tier
UNLIKE = 0.5  # factor of its weight for each doubling between its number of pages and the requested number
LEAST = 3  # steps before predictions start
# prompt positions below which a step is not counted: it carries too little information about prefill
LEAST_POSITIONS = 32
MOST_DECODING = 0.125  # share of decode positions, relative to prompt positions, above which a step is not counted
NEW_STEPS = 8  # steps between two fits, which take milliseconds
NEWEST = 16  # newest steps, from which the current pace is computed
STEP_FADES = 0.8  # factor of a step's weight in the pace for each newer step of the same size
STEP_UNLIKE = 0.8  # factor of its weight for each doubling between its prompt tokens and the requested number
# safety margin: the share of a read's predicted time that it may take longer and still be no slower than computing
MARGIN = 0.1


class ReadTimes:
    """Predicted seconds of a read: an initial estimate, times the factor by which recent reads of this tier and size
    differed from it.

    The factor is a median: other programs on the machine make an occasional read ten times slower. The time of a
    read includes saving the pages that must make room for it.
    """

    def __init__(self, begin_s: float, page_s: Sequence[float], save_s: float = 0.0) -> None:
        """begin_s: estimated fixed time of a read. page_s: estimated time per page, by tier. save_s: estimated time
        per page that has to be saved first."""
        self._begin_s, self._page_s, self._save_s = begin_s, tuple(page_s), save_s
        # (pages read, pages saved, log of measured / estimated time), by tier.
        self._off = [deque[tuple[int, int, float]](maxlen=READINGS) for _ in page_s]

    def observed(self, pages: Sequence[int], seconds: float, saved: int = 0) -> None:
        """Adds a read of `pages[tier]` pages of each tier, for which `saved` pages were saved first, that took
        `seconds`. Ignored if `seconds` is not above 0."""
        if seconds > 0:
            guessed = self._begin_s + saved * self._save_s
            guessed += sum(count * page for count, page in zip(pages, self._page_s, strict=True))
            self._off[self._mostly(pages)].append((sum(pages), saved, math.log(seconds / guessed)))

    def predict(self, pages: Sequence[int], saved: int = 0) -> tuple[float, ...]:
        """The predicted fixed time of a read of `pages[tier]` pages of each tier, for which `saved` pages are saved
        first, and the time per page of each tier."""
        weighed = [(0.0, FADES ** len(self._off[self._mostly(pages)]))]  # the initial estimate, as the oldest read
        for age, (count, before, off) in enumerate(reversed(self._off[self._mostly(pages)])):
            unlike = abs(math.log2(max(1, count) / max(1, sum(pages)))) + abs(math.log2((1 + before) / (1 + saved)))
            weighed.append((off, FADES**age * UNLIKE**unlike))
        factor = math.exp(_median(weighed))
        return factor * (self._begin_s + saved * self._save_s), *(factor * page for page in self._page_s)

    def _mostly(self, pages: Sequence[int]) -> int:
        """The tier on which the read spends the most time."""
        return max(range(len(pages)), key=lambda tier: pages[tier] * self._page_s[tier])


class PrefillTimes:
    """Predicted seconds of a prefill: a fit to steps of all sizes, times the pace of the newest steps.

    The pace is the median ratio of measured to fitted time over the newest steps, with larger weights for steps of
    about the same size: a step with the few tokens that follow a fetched prefix differs from the steps that compute
    whole prompts. The pace is recomputed with each fit rather than carried over, since the fit has learnt from these
    steps too.
    """

    def __init__(self, experts_of: int = 0, experts_chosen: int = 0) -> None:
        """experts_of, experts_chosen: as in `StepModel`: a few tokens after a long prefix read fewer experts."""
        self._fit = StepTimeFit(experts_of=experts_of, experts_chosen=experts_chosen)
        self._model = StepModel(base=0.0)
        self._newest: deque[tuple[Work, float]] = deque(maxlen=NEWEST)  # (work, milliseconds)
        # of these steps, the newest first: logarithms of prompt tokens, and of measured / fitted time
        self._off: list[tuple[float, float]] = []
        self._paces: dict[int, float] = {}  # cached paces by tokens of a step, until another step is observed
        self._steps = self._new = 0  # steps added in all, and since the last fit

    @property
    def known(self) -> bool:
        """Whether enough steps have run to predict one."""
        return self._steps >= LEAST

    def observed(self, rows: Sequence[tuple[int, int]], decoding: int, seconds: float) -> None:
        """Adds a step that took `seconds`. rows: (first position, count) of its prompts. decoding: positions of its
        other rows."""
        work = _work(rows)
        if work.prompt < LEAST_POSITIONS or decoding > MOST_DECODING * work.prompt or seconds <= 0:
            return
        work = work._replace(rows=decoding)
        self._fit.add(work, 1e3 * seconds)
        self._newest.append((work, 1e3 * seconds))
        self._paces.clear()
        self._steps += 1
        self._new += 1

    def predict(self, first: int, end: int, step_tokens: int) -> float | None:
        """Predicted seconds to compute positions [first, end) in steps of `step_tokens` tokens; None until enough
        steps have run."""
        if not self.known:
            return None
        if self._new >= min(NEW_STEPS, self._steps - self._new + 1):
            self._model, self._new = self._fit.model(), 0
            self._paces.clear()
        whole, rest = divmod(end - first, step_tokens)
        ms = 0.0
        if whole:
            ms += self._pace(step_tokens) * self._model.prompt_ms(first, whole * step_tokens, step_tokens)
        if rest:
            ms += self._pace(rest) * self._model.prompt_ms(end - rest, rest, step_tokens)
        return ms / 1e3

    def _pace(self, positions: int) -> float:
        """The ratio of measured to fitted time for a step over `positions` positions of a prompt."""
        if not self._paces:
            expected = [(work.prompt, ms, self._model.step_ms(work)) for work, ms in reversed(self._newest)]
            self._off = [(math.log2(prompt), math.log(ms / least)) for prompt, ms, least in expected if least > 0]
        if (pace := self._paces.get(positions)) is None:
            weighed, newer, size = list[tuple[float, float]](), 0.0, math.log2(positions)
            for other, off in self._off:
                like = STEP_UNLIKE ** abs(other - size)
                weighed.append((off, like * STEP_FADES**newer))
                newer += like
            weighed.append((0.0, STEP_FADES**newer))  # the fit itself, as the oldest step
            pace = self._paces[positions] = math.exp(_median(weighed))
        return pace


class FetchChoice(NamedTuple):
    """The number of pages to fetch, and the predicted seconds. None: not known."""

    pages: int
    fetch_s: float = 0.0  # until the pages are in the KV pool
    rest_s: float | None = None  # then, to compute the positions after them
    compute_s: float | None = None  # to compute all positions instead

    @property
    def saves_s(self) -> float:
        """Reduction of the time to first token in seconds; 0 if not known."""
        if self.rest_s is None or self.compute_s is None:
            return 0.0
        return self.compute_s - self.rest_s - self.fetch_s


def choose(
    cached: int,
    positions: int,
    page_s: Sequence[float],
    wait_s: float,
    times: PrefillTimes,
    *,
    page_tokens: int,
    step_tokens: int,
) -> FetchChoice:
    """How many of the pages to fetch, from the first on, for the largest saving of time; 0 if no number certainly saves
    any.

    cached: positions before the pages. positions: of the prompt. page_s: seconds to fetch each page. wait_s: seconds
    before the first fetch starts.
    """
    compute_s, fetch_s = times.predict(cached, positions, step_tokens), wait_s
    if compute_s is None:
        return FetchChoice(len(page_s), wait_s + sum(page_s))
    best, saved = FetchChoice(0), 0.0
    for count, seconds in enumerate(page_s, 1):
        fetch_s += seconds
        rest_s = times.predict(cached + count * page_tokens, positions, step_tokens)
        choice = FetchChoice(count, fetch_s, rest_s, compute_s)
        if choice.saves_s - MARGIN * fetch_s > saved:
            best, saved = choice, choice.saves_s - MARGIN * fetch_s
    return best


def _median(weighed: Iterable[tuple[float, float]]) -> float:
    """Weighted median: the value with half of the weight below it, or the mean of two neighbours. weighed: (value,
    weight)."""
    ordered = sorted(weighed)
    half, below = sum(weight for _, weight in ordered) / 2, 0.0
    for at, (value, weight) in enumerate(ordered):
        below += weight
        if math.isclose(below, half) and at + 1 < len(ordered):
            return (value + ordered[at + 1][0]) / 2
        if below > half:
            return value
    return ordered[-1][0]


def _work(rows: Sequence[tuple[int, int]]) -> Work:
    """The prefill work of a step."""
    return Work(
        prompt=sum(count for _, count in rows),
        pairs=sum(pairs_of(first, count) for first, count in rows),
        expanded=sum(expanded_of(first, count) for first, count in rows),
    )
