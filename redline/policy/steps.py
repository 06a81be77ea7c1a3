"""Step time model: milliseconds of a worker's step from the work in it, fitted to measured steps.

    ms = base + experts x share of them that are read + row x rows + context x their contexts
              + prompt x prompt tokens + pair x (prompt tokens x positions that each attends to)
              + expand x positions whose keys and values are expanded for these tokens

`StepModel` is the sum. `StepTimeFit` finds its coefficients: none is negative, errors are relative, and outliers get
little weight. It keeps a window of each kind of step, so that hours of decoding do not displace what was learnt about
prompts.
A fit predicts the typical time of a step; `on_the_mean` turns it into the mean time, which is higher if some steps take
much longer. `StepTimeStats` finds both at once from exponentially fading sums, for callers that need a model at every
request: a fit takes milliseconds, `StepTimeStats` tenths of one.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from redline.messages.base import Record
from redline.policy.pairs import Work, chosen_share, expanded_of, pairs_of

KEPT = 24  # newest steps kept of each kind
KINDS = 512  # kinds kept; above that, the least recently seen kind is dropped
PRIOR_STEPS = 4  # weight of a prior, in steps
TURNS = 8  # iterations of reweighting steps by their residuals
OUTLIER = 2.5  # multiple of the typical error above which a step's weight falls in inverse proportion to its error
LEAST_ERROR = 0.01  # smallest typical error assumed: below it is chance
LATELY = 96  # newest steps of each sort (with prompts, without) that the mean is taken of: some seconds of a busy fleet
LEAST_LATELY = 4  # steps below which no mean is taken
FARTHEST = 8.0  # bound on the correction to the mean: at most 8 times, at least an eighth
FADING = 0.99  # share of the sums that each added step of the same sort keeps
FADING_PACE = 0.95  # share kept of the sums for the current pace
ADDED = 8  # steps added before the sums are solved again
# multiple of the mean at which a step's time is clipped: longer ones, as during kernel compilation, are no pace
UNUSUAL = 32.0
# Relative weight with which `pair` and `expand` are pulled to 0. If all prompts are alike, their times cannot be told
# apart from the time per token, and cached tokens would seem to cost the same as others.
UNSEEN = 1e-3

_Array = NDArray[np.float64]


class StepModel(Record, frozen=True):
    """Milliseconds of a step: one coefficient for each term, none negative.

    experts_of, experts_chosen: experts per layer and experts per token; 0: every step reads all weights, and `experts`
    has no effect.
    """

    base: float
    experts: float = 0.0
    row: float = 0.0
    context: float = 0.0
    prompt: float = 0.0
    pair: float = 0.0
    expand: float = 0.0
    experts_of: int = 0
    experts_chosen: int = 0

    def share(self, positions: float) -> float:
        """Expected share of a layer's experts that `positions` positions use, if they choose independently: 1 - (1 -
        k / E)^T."""
        return chosen_share(self.experts_of, self.experts_chosen, positions)

    def step_ms(self, work: Work) -> float:
        """Milliseconds of one step."""
        return (
            self.base
            + self.experts * self.share(work.prompt + work.rows)
            + self.row * work.rows
            + self.context * work.context
            + self.prompt * work.prompt
            + self.pair * work.pairs
            + self.expand * work.expanded
        )

    def decode_ms(self, rows: float, context: float) -> float:
        """Milliseconds of a pure decode step of `rows` rows with `context` tokens of context each. `rows` may be a
        mean."""
        return self.base + self.experts * self.share(rows) + rows * (self.row + self.context * context)

    def prompt_ms(self, cached: int, uncached: int, chunk: int, rows: float = 0.0, context: float = 0.0) -> float:
        """Milliseconds of all steps of a prompt, with `chunk` of its tokens in each but the last.

        rows, context: decode rows in each of these steps, and the tokens of context of each row.
        """
        if uncached <= 0:
            return 0.0
        whole, rest = divmod(uncached, chunk)
        steps = whole + (rest > 0)
        shares = whole * self.share(chunk + rows) + (self.share(rest + rows) if rest else 0.0)
        beside = rows * (self.row + self.context * context)
        expanded = whole * (cached + chunk * (whole + 1) / 2) + (expanded_of(cached, uncached) if rest else 0)
        own = self.prompt * uncached + self.pair * pairs_of(cached, uncached) + self.expand * expanded
        return steps * (self.base + beside) + self.experts * shares + own


class StepTimeFit:
    """Fits the coefficients to (work, milliseconds) of steps. `add` is cheap; `model` takes milliseconds.

    prior: the coefficients before any measurement; those that no step determines keep its values.
    """

    def __init__(self, prior: StepModel | None = None, *, experts_of: int = 0, experts_chosen: int = 0) -> None:
        """experts_of, experts_chosen: as in `StepModel`; ignored if there is a prior, which has its own."""
        self._prior = prior or StepModel(base=0.0, experts_of=experts_of, experts_chosen=experts_chosen)
        self._kinds: OrderedDict[tuple[int, ...], deque[tuple[Work, float]]] = OrderedDict()
        self._has_prior = prior is not None

    def __len__(self) -> int:
        """Number of steps kept."""
        return sum(map(len, self._kinds.values()))

    def add(self, work: Work, ms: float) -> None:
        """Adds a step that took `ms` milliseconds. Times that are 0 or not finite are ignored."""
        if not 0 < ms < math.inf:
            return
        kind = tuple(int(each).bit_length() for each in work)
        self._kinds.setdefault(kind, deque(maxlen=KEPT)).append((work, ms))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > KINDS:
            self._kinds.popitem(last=False)

    def model(self) -> StepModel:
        """The coefficients with the smallest error on the kept steps; those of the prior if there are none."""
        if not self._kinds:
            return self._prior
        # A kind's weight is the square root of its number of steps, so that frequent kinds do not drown rare ones, nor
        # a single step all others.
        kept = [(work, ms, len(kind) ** -0.5) for kind in self._kinds.values() for work, ms in kind]
        took = np.array([ms for _, ms, _ in kept])
        # relative: the fit makes each row's sum 1
        terms = np.array([self._terms(work) for work, _, _ in kept]) / took[:, None]
        kinds = np.array([weight for _, _, weight in kept])
        mixed, weights = self._before(), kinds
        for _ in range(TURNS):
            mixed = self._solve(terms, weights)
            off = np.abs(terms @ mixed - 1.0)
            typical = max(LEAST_ERROR, 1.4826 * float(np.median(off)))  # the standard deviation, if errors are normal
            weights = kinds * np.minimum(1.0, OUTLIER * typical / np.maximum(off, 1e-12))
        base, experts, row, context, prompt, pair, expand = (float(each) for each in mixed)
        return StepModel(
            base=base, experts=experts, row=row, context=context, prompt=prompt, pair=pair, expand=expand,
            experts_of=self._prior.experts_of, experts_chosen=self._prior.experts_chosen,
        )  # fmt: skip

    def _terms(self, work: Work) -> tuple[float, ...]:
        return _terms(work, self._prior.share(work.prompt + work.rows))

    def _before(self) -> _Array:
        prior = self._prior
        return np.array([prior.base, prior.experts, prior.row, prior.context, prior.prompt, prior.pair, prior.expand])

    def _solve(self, terms: _Array, weights: _Array) -> _Array:
        before = self._before()
        pull = np.full(len(before), PRIOR_STEPS / len(terms) if self._has_prior else 1e-9)
        return _solved(terms.T @ (weights[:, None] * terms), terms.T @ weights, pull, before)


def _terms(work: Work, share: float) -> tuple[float, ...]:
    """The factors of the coefficients. share: of experts that are read."""
    return 1.0, share, work.rows, work.context, work.prompt, work.pairs, work.expanded


def _solved(a: _Array, b: _Array, pull: _Array, before: _Array) -> _Array:
    """Solves the normal equations for non-negative coefficients, each pulled towards `before` with the weight
    `pull`."""
    scale = np.sqrt(np.diagonal(a))  # so that all terms have the same scale
    scale = np.where(scale == 0, 1.0, scale)
    return _not_negative(a / np.outer(scale, scale) + np.diag(pull), b / scale + pull * before * scale) / scale


class StepTimeStats:
    """A `StepModel` of the recent mean step time, from fading sums over steps with prompts and over steps without."""

    def __init__(self) -> None:
        self.experts_of = self.experts_chosen = 0  # as in `StepModel`; set before steps are added
        self._sums = [_StepSums(), _StepSums()]  # over steps without prompts, and with
        self._model: StepModel | None = None
        self._added = 0  # steps added since the model was solved

    def add(self, work: Work, ms: float) -> None:
        """Adds a step that took `ms` milliseconds. Times that are 0 or not finite are ignored."""
        if not 0 < ms < math.inf:
            return
        sums = self._sums[work.prompt > 0]
        if sums.steps >= ADDED:
            ms = min(ms, UNUSUAL * sums.mean_ms)
        share = chosen_share(self.experts_of, self.experts_chosen, work.prompt + work.rows)
        sums.add(np.array(_terms(work, share)), ms)
        self._added += 1

    def model(self) -> StepModel | None:
        """The model; None if no step was added. Solved at the first call, then again whenever ADDED more steps were
        added."""
        steps = sum(each.steps for each in self._sums)
        if self._added and self._added >= min(ADDED, steps):
            self._model, self._added = self._solved(), 0
        return self._model

    def _solved(self) -> StepModel:
        without, having = self._sums
        a, b = without.a + having.a, without.b + having.b
        mixed = _solved(a, b, np.array([1e-9] * 5 + [UNSEEN] * 2), np.zeros(len(b)))
        beside = np.array([False] * 4 + [True] * 3)  # prompt, pair, expand
        if without.steps:
            mixed = np.where(beside, mixed, mixed * _times(without.ms, float(without.terms @ mixed)))
        if having.steps:
            other_ms = float(having.terms @ np.where(beside, 0.0, mixed))
            times = _times(having.ms - other_ms, float(having.terms @ mixed) - other_ms)
            mixed = np.where(beside, mixed * times, mixed)
        return StepModel(*map(float, mixed), experts_of=self.experts_of, experts_chosen=self.experts_chosen)


class _StepSums:
    """Sums over steps of one sort, with the largest weight on the newest. a, b: normal equations of relative errors;
    terms, ms: plain sums."""

    def __init__(self) -> None:
        terms = len(_terms(Work(), 0.0))
        self.steps, self.ms = 0, 0.0
        self.a, self.b, self.terms = np.zeros((terms, terms)), np.zeros(terms), np.zeros(terms)

    def add(self, terms: _Array, ms: float) -> None:
        relative = terms / ms
        self.a = FADING * self.a + np.outer(relative, relative)
        self.b = FADING * self.b + relative
        self.terms = FADING_PACE * self.terms + terms
        self.ms = FADING_PACE * self.ms + ms
        self.steps += 1

    @property
    def mean_ms(self) -> float:
        """Recent mean milliseconds of a step."""
        return self.ms / float(self.terms[0])


def on_the_mean(model: StepModel, steps: Sequence[tuple[Work, float]]) -> StepModel:
    """Scales the model so that its total time over the newest `steps` matches the measured total. steps: (work,
    milliseconds), the newest last.

    A fit of relative errors is below the mean if times scatter upwards, as on a shared machine. A request takes the sum
    of a hundred steps, so its time follows the mean. The terms of decode rows are corrected first, then those of
    prompts.
    """
    without = [each for each in steps if not each[0].prompt][-LATELY:]
    beside = [each for each in steps if each[0].prompt][-LATELY:]
    if len(without) >= LEAST_LATELY:
        times = _times(sum(ms for _, ms in without), sum(model.step_ms(work) for work, _ in without))
        model = msgspec.structs.replace(
            model,
            base=times * model.base,
            experts=times * model.experts,
            row=times * model.row,
            context=times * model.context,
        )
    if len(beside) >= LEAST_LATELY:
        other = msgspec.structs.replace(model, prompt=0.0, pair=0.0, expand=0.0)
        took_ms = sum(ms - other.step_ms(work) for work, ms in beside)
        times = _times(took_ms, sum(model.step_ms(work) - other.step_ms(work) for work, _ in beside))
        model = msgspec.structs.replace(
            model, prompt=times * model.prompt, pair=times * model.pair, expand=times * model.expand
        )
    return model


def _times(took_ms: float, expected_ms: float) -> float:
    return min(max(took_ms / expected_ms, 1 / FARTHEST), FARTHEST) if expected_ms > 0 else 1.0


def _not_negative(a: _Array, b: _Array) -> _Array:
    """The x >= 0 that minimizes x'ax / 2 - b'x (active sets of Lawson and Hanson, on normal equations)."""
    x = np.zeros(len(b))
    free = np.zeros(len(b), dtype=bool)
    for _ in range(3 * len(b)):
        slope = np.where(free, -np.inf, b - a @ x)
        best = int(np.argmax(slope))
        if slope[best] <= 1e-10:
            break
        free[best] = True
        while True:
            tried = np.zeros(len(b))
            tried[free] = np.linalg.solve(a[np.ix_(free, free)], b[free])
            if (tried[free] > 0).all():
                x = tried
                break
            low = free & (tried <= 0)
            step = float(np.min(x[low] / np.maximum(x[low] - tried[low], 1e-300)))
            x = x + step * (tried - x)
            free &= x > 1e-14
            x[~free] = 0.0
    return x
