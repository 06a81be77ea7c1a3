"""What a worker's step takes, by what is in it, and what a prompt takes; fitted from steps that happened.

    ms = base + experts x share of them that are read + row x rows + context x their contexts
              + prompt x prompt tokens + pair x (prompt tokens x positions that each attends to)
              + expand x positions whose keys and values are expanded for these tokens

`StepModel` is the sum, `StepFit` finds its coefficients: none negative, relative errors counted, outliers nearly not. A
window of each kind of step is kept, so hours of decoding do not forget what prompts cost. So a fit says what a step
usually takes; `on_the_mean` makes of it what many take together, which is more where some take much longer.
`StepSums` finds both at once from sums that fade, for who asks at every request: a fit takes milliseconds, this tenths.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from redline.tune.pairs import Work, chosen_share, expanded_of, pairs_of
from redline.wire.base import Record

KEPT = 24  # newest steps of a kind
KINDS = 512  # that are kept; beyond, the one that was met longest ago is forgotten
PRIOR_STEPS = 4  # as many steps as a prior counts for
TURNS = 8  # of weighing steps anew by how far they are off
OUTLIER = 2.5  # times the typical error: what is further off counts in inverse proportion to it
LEAST_ERROR = 0.01  # a typical error below it is luck
LATELY = 96  # newest steps, with prompts and without, whose mean counts: some seconds of a busy fleet
LEAST_LATELY = 4  # of fewer a mean says nothing
FARTHEST = 8.0  # times what is usual, or one part in so many, that the mean may be
FADING = 0.99  # share of the sums over steps of a sort that stays when another is added
FADING_PACE = 0.95  # likewise of those that say how fast all of it is just now
ADDED = 8  # steps, before the sums are solved again
UNUSUAL = 32.0  # times the mean: what takes longer, as while kernels are compiled, is no pace
UNSEEN = (
    1e-3  # how far, in parts of what is known, `pair` and `expand` are held at nothing. Where all prompts are alike
)
# their times are not to be told from those of tokens, and cached tokens would seem to cost as much as others

_Array = NDArray[np.float64]


class StepModel(Record, frozen=True):
    """Milliseconds of a step: one coefficient for each term, none negative.

    experts_of, experts_chosen: of a layer, how many there are and how many a token chooses; 0: all weights are read
    by every step, and `experts` counts for nothing.
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
        """Of a layer's experts, those that so many positions choose, each on its own: 1 - (1 - k / E)^T."""
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
        """Milliseconds of a step of `rows` rows alone, of so many tokens of context each. Rows may be a mean."""
        return self.base + self.experts * self.share(rows) + rows * (self.row + self.context * context)

    def prompt_ms(self, cached: int, uncached: int, chunk: int, rows: float = 0.0, context: float = 0.0) -> float:
        """Milliseconds of all steps that a prompt takes, `chunk` of its tokens in each but the last.

        rows, context: that decode in each of these steps, and the tokens of context of each.
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


class StepFit:
    """Coefficients from (work, milliseconds) of steps, kept up to date. Adding is cheap; `model` takes milliseconds.

    prior: what is believed before anything was measured, and stays of what is never measured.
    """

    def __init__(self, prior: StepModel | None = None, *, experts_of: int = 0, experts_chosen: int = 0) -> None:
        """experts_of, experts_chosen: as in `StepModel`; where there is a prior its own count."""
        self._prior = prior or StepModel(base=0.0, experts_of=experts_of, experts_chosen=experts_chosen)
        self._kinds: OrderedDict[tuple[int, ...], deque[tuple[Work, float]]] = OrderedDict()
        self._has_prior = prior is not None

    def __len__(self) -> int:
        """Steps that are kept."""
        return sum(map(len, self._kinds.values()))

    def add(self, work: Work, ms: float) -> None:
        """A step has taken so many milliseconds. What is no time (0, or not finite) is left out."""
        if not 0 < ms < math.inf:
            return
        kind = tuple(int(each).bit_length() for each in work)
        self._kinds.setdefault(kind, deque(maxlen=KEPT)).append((work, ms))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > KINDS:
            self._kinds.popitem(last=False)

    def model(self) -> StepModel:
        """The coefficients that err least on what is kept; the prior's where nothing is."""
        if not self._kinds:
            return self._prior
        # A kind counts as the root of how often it was met: neither do the many drown the few, nor one step all others.
        kept = [(work, ms, len(kind) ** -0.5) for kind in self._kinds.values() for work, ms in kind]
        took = np.array([ms for _, ms, _ in kept])
        terms = np.array([self._terms(work) for work, _, _ in kept]) / took[:, None]  # to be mixed so that all give 1
        kinds = np.array([weight for _, _, weight in kept])
        mixed, weights = self._before(), kinds
        for _ in range(TURNS):
            mixed = self._solve(terms, weights)
            off = np.abs(terms @ mixed - 1.0)
            typical = max(LEAST_ERROR, 1.4826 * float(np.median(off)))  # of a normal error, its deviation
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
    """What the coefficients are multiplied with. share: of experts that are read."""
    return 1.0, share, work.rows, work.context, work.prompt, work.pairs, work.expanded


def _solved(a: _Array, b: _Array, pull: _Array, before: _Array) -> _Array:
    """The coefficients, none negative, of the normal equations, each pulled so far to what it was before."""
    scale = np.sqrt(np.diagonal(a))  # so that each term weighs alike
    scale = np.where(scale == 0, 1.0, scale)
    return _not_negative(a / np.outer(scale, scale) + np.diag(pull), b / scale + pull * before * scale) / scale


class StepSums:
    """A `StepModel` on the mean of what steps took lately, from sums over steps with prompts and over others."""

    def __init__(self) -> None:
        self.experts_of = self.experts_chosen = 0  # as in `StepModel`; to be said before steps are added
        self._sums = [_Sums(), _Sums()]  # over steps without prompts, and with
        self._model: StepModel | None = None
        self._added = 0  # since it was found

    def add(self, work: Work, ms: float) -> None:
        """A step has taken so many milliseconds. What is no time (0, or not finite) is left out."""
        if not 0 < ms < math.inf:
            return
        sums = self._sums[work.prompt > 0]
        if sums.steps >= ADDED:
            ms = min(ms, UNUSUAL * sums.mean_ms)
        share = chosen_share(self.experts_of, self.experts_chosen, work.prompt + work.rows)
        sums.add(np.array(_terms(work, share)), ms)
        self._added += 1

    def model(self) -> StepModel | None:
        """None: no step was added. It is found anew once so many have been added as count."""
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


class _Sums:
    """Over steps of a sort, the newest counting most. a, b: of the equations by relative errors; terms, ms: as is."""

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
        """Of a step lately."""
        return self.ms / float(self.terms[0])


def on_the_mean(model: StepModel, steps: Sequence[tuple[Work, float]]) -> StepModel:
    """The model whose steps take together what the newest of `steps` did: (work, milliseconds), the newest last.

    A fit by relative errors lies below the mean where times scatter upwards, as on a machine that others use. An
    answer is a sum of a hundred steps, and so is the time that it takes. What answers take is put right first, then
    what prompts add.
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
    """The x >= 0 that makes x'ax / 2 - b'x least (Lawson and Hanson's active sets, over normal equations)."""
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
