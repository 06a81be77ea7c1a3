"""Which pages to fetch rather than to compute: what readings take, beside what prompts take, each learnt as it happens.

A reading takes a time of its own and a time for each page of a tier (`ReadTimes`); a prompt takes its steps
(`PrefillTimes`). Compared are the first tokens that follow: of a prompt whose pages are read, and whose rest is
computed behind them, and of one that is all computed. Until steps have told anything, whatever is kept is fetched.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from redline.tune.pairs import Work, expanded_of, pairs_of
from redline.tune.steps import StepFit, StepModel

READINGS = 24  # newest, of each tier
FADES = 0.85  # of a reading's weight, with each of its tier that is newer
UNLIKE = 0.5  # of its weight, for each doubling between its pages and those that are asked for
LEAST = 3  # steps before anything is predicted
LEAST_POSITIONS = 32  # of a step's prompts, which otherwise says little of them
MOST_DECODING = 0.125  # of a step's positions; a step with more says little of its prompts
NEW_STEPS = 8  # between two fits, which take milliseconds
NEWEST = 16  # steps, by which is told how fast the machine is just now
STEP_FADES = 0.8  # of a step's weight there, with each that is newer and as large
STEP_UNLIKE = 0.8  # of its weight, for each doubling between its prompt tokens and those that are asked for
MARGIN = 0.1  # of a reading's predicted time, which it may take more and still be no slower than computing


class ReadTimes:
    """What readings take, in seconds: a first guess, times by how much readings of this tier and size were off it.

    Their median counts: what a machine's other programs do makes one reading in some take ten times as long. Pages that
    have to be saved, to make room for those that are read, are of the reading's time.
    """

    def __init__(self, begin_s: float, page_s: Sequence[float], save_s: float = 0.0) -> None:
        """begin_s: the guess for a reading beside its pages. page_s: for a page, by tier. save_s: for one that is saved
        first."""
        self._begin_s, self._page_s, self._save_s = begin_s, tuple(page_s), save_s
        # Pages that were read, and saved, and the logarithm of took / guessed.
        self._off = [deque[tuple[int, int, float]](maxlen=READINGS) for _ in page_s]

    def observed(self, pages: Sequence[int], seconds: float, saved: int = 0) -> None:
        """Takes in a reading of so many pages of each tier, for which so many were saved. What is no time is left
        out."""
        if seconds > 0:
            guessed = self._begin_s + saved * self._save_s
            guessed += sum(count * page for count, page in zip(pages, self._page_s, strict=True))
            self._off[self._mostly(pages)].append((sum(pages), saved, math.log(seconds / guessed)))

    def predict(self, pages: Sequence[int], saved: int = 0) -> tuple[float, ...]:
        """Of a reading of so many pages of each tier, for which so many are saved: what it takes beside its pages, and
        for a page of each tier."""
        weighed = [(0.0, FADES ** len(self._off[self._mostly(pages)]))]  # the guess, as the oldest of readings
        for age, (count, before, off) in enumerate(reversed(self._off[self._mostly(pages)])):
            unlike = abs(math.log2(max(1, count) / max(1, sum(pages)))) + abs(math.log2((1 + before) / (1 + saved)))
            weighed.append((off, FADES**age * UNLIKE**unlike))
        factor = math.exp(_median(weighed))
        return factor * (self._begin_s + saved * self._save_s), *(factor * page for page in self._page_s)

    def _mostly(self, pages: Sequence[int]) -> int:
        """The tier whose pages take most of a reading."""
        return max(range(len(pages)), key=lambda tier: pages[tier] * self._page_s[tier])


class PrefillTimes:
    """What prompts take, in seconds: a fit to steps of all sizes, times the pace of the newest.

    The pace is the median of what the newest steps took over what this fit says of them, those of about the size
    counting more: the few tokens behind what was read are a step unlike those that compute prompts. A pace that is
    carried on from fit to fit counts them twice: the fit has learnt from them too.
    """

    def __init__(self, experts_of: int = 0, experts_chosen: int = 0) -> None:
        """experts_of, experts_chosen: as `StepModel` has them: a few tokens behind a long prefix read fewer of them."""
        self._fit = StepFit(experts_of=experts_of, experts_chosen=experts_chosen)
        self._model = StepModel(base=0.0)
        self._newest: deque[tuple[Work, float]] = deque(maxlen=NEWEST)  # and milliseconds
        self._off: list[tuple[float, float]] = []  # of these, the newest first: logarithms of tokens, and of the pace
        self._paces: dict[int, float] = {}  # by tokens of a step, until another is observed
        self._steps = self._new = 0  # that were taken in, and since the last fit

    @property
    def known(self) -> bool:
        """Whether enough steps have run."""
        return self._steps >= LEAST

    def observed(self, rows: Sequence[tuple[int, int]], decoding: int, seconds: float) -> None:
        """Takes in a step. rows: (first position, count) of its prompts. decoding: positions of its other rows."""
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
        """Seconds to compute positions [first, end) in steps of so many; None while it is not known."""
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
        """Times what the model says, of a step over so many positions of a prompt."""
        if not self._paces:
            expected = [(work.prompt, ms, self._model.step_ms(work)) for work, ms in reversed(self._newest)]
            self._off = [(math.log2(prompt), math.log(ms / least)) for prompt, ms, least in expected if least > 0]
        if (pace := self._paces.get(positions)) is None:
            weighed, newer, size = list[tuple[float, float]](), 0.0, math.log2(positions)
            for other, off in self._off:
                like = STEP_UNLIKE ** abs(other - size)
                weighed.append((off, like * STEP_FADES**newer))
                newer += like
            weighed.append((0.0, STEP_FADES**newer))  # that of the fit, as the oldest
            pace = self._paces[positions] = math.exp(_median(weighed))
        return pace


class Choice(NamedTuple):
    """So many pages are fetched: what that is predicted to take, in seconds. None: not known."""

    pages: int
    fetch_s: float = 0.0  # until they are in their place
    rest_s: float | None = None  # then, to compute what lies behind them
    compute_s: float | None = None  # to compute all of it instead

    @property
    def saves_s(self) -> float:
        """How much sooner the first token comes; 0 where that is not known."""
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
) -> Choice:
    """How many of some pages to fetch, from the first on, so that most time is saved; 0 where none surely is.

    cached: positions before the pages. positions: of the prompt. page_s: seconds to fetch each. wait_s: before the
    first is fetched.
    """
    compute_s, fetch_s = times.predict(cached, positions, step_tokens), wait_s
    if compute_s is None:
        return Choice(len(page_s), wait_s + sum(page_s))
    best, saved = Choice(0), 0.0
    for count, seconds in enumerate(page_s, 1):
        fetch_s += seconds
        rest_s = times.predict(cached + count * page_tokens, positions, step_tokens)
        choice = Choice(count, fetch_s, rest_s, compute_s)
        if choice.saves_s - MARGIN * fetch_s > saved:
            best, saved = choice, choice.saves_s - MARGIN * fetch_s
    return best


def _median(weighed: Iterable[tuple[float, float]]) -> float:
    """The value with half of the weight below it: between two, their mean. weighed: (value, weight)."""
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
    """What a step computes of its prompts."""
    return Work(
        prompt=sum(count for _, count in rows),
        pairs=sum(pairs_of(first, count) for first, count in rows),
        expanded=sum(expanded_of(first, count) for first, count in rows),
    )
