"""Chooses the worker for a job: the one that adds the least SLO-weighted latency, in seconds over all affected
requests.

    queue       = prompt tokens queued there x seconds per token in full steps
    prompt      = time of this prompt's prefill steps there, with the decode rows of the answers there
    own         = extra time of these steps, compared with decode-only steps
    first token = queue + prompt + one decode step of the answers there
    computing   = strain(first token + prompt for requests queued after it) + seconds to recompute evicted tokens
    between     = a decode step with one more answer / (1 - share of its time that the worker spends on prefill)
    answer      = tokens x (strain(between) + increase of the same for each answer there)
    held up     = tokens x increase of strain(between) by own / tokens of an answer, for each answer there and for
                  those that overlap with it because it takes longer

Step times come from the step model (`policy/steps.py`), which is fitted to the steps that workers report
(`latency_model.py`). `strain` weights seconds by the share of the SLO target that they use up (`policy/targets.py`).
The total time allowed for an answer has the same weight as the time allowed for a first token. The number of requests
after a prompt is that of a queue with this utilization: 1 / (1 - share). A delayed answer stays longer, and makes steps
longer for others: if each of r answers adds s to a step of t, a delay counts 1 / (1 - r s / t) times. So a conversation
returns to the worker with its cached pages, but is not bound to it: if the queue there is long enough, or decode is
slow, the prompt is recomputed on another worker.

There are two separate questions. Among mixed workers, which prefill and decode a job, an answer that misses its SLO
target anyway gets no further weight, so that others do not miss theirs. Between prefill on the decode worker and on a
prefill worker, late answers may still meet their target if nothing delays them, and each delayed answer delays later
ones. Therefore they have the weight of an answer that is close to its target. A KV transfer occupies a prompt's pages
twice, so it is not chosen if both workers have no free pages. Pure functions of the workers' state.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from redline.policy.targets import HEAVY, Targets, strain
from redline.router.latency_model import LatencyModel

NO_TARGETS = Targets()
BROUGHT_SHARE = 0.05  # time of the KV transfer of a prompt, as a share of its prefill time
# Weight of a second of an answer compared with one before the first token, unless both have an SLO target: a reader
# of an answer has time to spare, a client without a first token has none.
HELD_UP = 0.5
CLOSE = 0.01  # relative difference below which costs count as equal: times are not measured more precisely
# Upper limit on the assumed share of prefill in a worker's time; also on the share that answers add to their own steps.
MOST_BUSY = 0.9


class PlacementCandidate(NamedTuple):
    """State of a worker when a job arrives."""

    worker: str
    cached: int  # tokens of the prompt in its prefix cache, or about to be
    queue: int  # prompt tokens that it has to compute first
    answers: int  # running answers, and those that are about to arrive (`beside`)
    free: int  # tokens that fit without an eviction
    busy: float = 0.0  # share of its time that it spends on prefill
    room: float = math.inf  # tokens that fit into its free pages now, in addition to its current jobs


class PredictedPlacement(NamedTuple):
    """Prediction for one job on one worker. Costs are SLO-weighted seconds (see above).

    own_s: prefill time of its prompt, in excess of decode-only steps. computing_cost_s: of prefill there.
    answer_cost_s: of decode there. held_up_cost_s: of the delay of the answers there and of its own, if prefill is done
    there too; care_cost_s: the same, with full weight for answers that are late. bringing_s: time of the KV transfer,
    if prefill is done on another worker.
    """

    worker: str
    cached_tokens: int  # of the prompt
    uncached_tokens: int  # of the prompt
    queue_tokens: int  # of other prompts, before this one
    forgotten_tokens: int  # cached tokens of other prompts that have to be evicted
    answers: int
    busy: float
    own_s: float
    first_token_s: float
    between_s: float  # time between two tokens of its answer
    computing_cost_s: float
    answer_cost_s: float
    held_up_cost_s: float
    care_cost_s: float
    bringing_s: float
    fits: bool  # it has free pages for the prompt now

    @property
    def cost_s(self) -> float:
        """Of prefill and decode there, compared with other mixed workers."""
        return self.computing_cost_s + self.answer_cost_s + self.held_up_cost_s

    @property
    def beside_cost_s(self) -> float:
        """Of prefill and decode there, compared with prefill on another worker."""
        return self.computing_cost_s + self.answer_cost_s + self.care_cost_s

    @property
    def brought_cost_s(self) -> float:
        """Of decode there, with prefill on another worker."""
        return self.answer_cost_s + self.bringing_s


def predict(
    tokens: int,
    candidates: Sequence[PlacementCandidate],
    pace: LatencyModel,
    of: str = "",
    targets: Targets = NO_TARGETS,
) -> list[PredictedPlacement]:
    """Predictions for a prompt of `tokens` tokens on each candidate. of: the job's class; targets: SLO targets of
    the class."""
    output, context, model, chunk = pace.output(of), pace.context, pace.model, pace.step_tokens
    token_s, rate = pace.token_s(model), pace.steps_a_token / 1e3
    ttft_s, itl_s = targets
    both = ttft_s < math.inf and itl_s < math.inf
    # Tokens, times the weight of a second of the answer.
    all = output * (ttft_s / (output * itl_s) if both else HELD_UP)
    found: list[PredictedPlacement] = []
    for worker, cached, queue, answers, free, busy, room in candidates:
        uncached = tokens - cached
        step_ms = model.decode_ms(answers, context) if answers else 0.0
        beside_ms = model.prompt_ms(cached, uncached, chunk, answers, context)
        alone_ms = model.prompt_ms(cached, uncached, chunk) if answers else beside_ms
        own_s = max(0.0, beside_ms - step_ms * -(-uncached // chunk)) / 1e3
        first_s = queue * token_s + (beside_ms + step_ms) / 1e3
        forgotten = max(0, uncached - free)
        free_share = 1 - min(MOST_BUSY, busy)
        computing = strain(first_s + alone_ms / 1e3 / free_share, ttft_s) + forgotten * token_s
        slower = rate / free_share
        between_s = model.decode_ms(answers + 1, context) * slower
        strained = strain(between_s, itl_s)
        answer = all * (strained + answers * (strained - strain(step_ms * slower, itl_s)))
        # At least one answer is delayed: one may arrive during the prefill.
        grows = 1 - answers * (between_s - step_ms * slower) / between_s if between_s else 1.0
        those, held_s = all * max(answers, 1) / max(grows, 1 - MOST_BUSY), between_s + own_s / output
        held_up = those * (strain(held_s, itl_s) - strained)
        care = those * (strain(held_s, itl_s, HEAVY) - strain(between_s, itl_s, HEAVY))
        found.append(
            PredictedPlacement(
                worker, cached, uncached, queue, forgotten, answers, busy, own_s, first_s, between_s,
                computing, answer, held_up, care, own_s * BROUGHT_SHARE, uncached <= room,
            )
        )  # fmt: skip
    return found


def beside(writing: int, awaited: int, answer_s: float, waits_s: float) -> int:
    """Number of answers at a worker, including those that come from prefill workers.

    awaited: jobs in prefill on another worker. answer_s: duration of an answer. waits_s: queueing time at the prefill
    workers. If it is longer than an answer, only the share answer_s / waits_s of the awaited answers runs at the same
    time: a long prefill queue does not mean many answers on the decode worker.
    """
    return writing + round(awaited * min(1.0, answer_s / waits_s) if waits_s > 0 else awaited)


def apart(here: Sequence[PredictedPlacement], there: Sequence[PredictedPlacement]) -> tuple[int, int | None]:
    """(index in `here` of the decode worker, index in `there` of the prefill worker; None: no separate prefill worker).

    A prompt with pages that fit neither on a decode worker nor on a prefill worker is computed on its decode worker. On
    a prefill worker it would wait for pages, be computed, and hold its pages until there are free ones on the decode
    worker; they are given up if other jobs need them, and the prompt is then computed on the decode worker after all.
    """
    if not there:
        return cheapest(here), None
    alone = _least(here, [each.beside_cost_s for each in here])
    some_fit = any(each.fits for each in here)
    if not some_fit and not any(each.fits for each in there):
        return alone, None
    computes = _least(there, [each.computing_cost_s if each.fits or some_fit else math.inf for each in there])
    fits = there[computes].fits
    joined = _least(here, [each.brought_cost_s if each.fits or fits else math.inf for each in here])
    if here[alone].beside_cost_s < there[computes].computing_cost_s + here[joined].brought_cost_s:
        return alone, None
    return joined, computes


def cheapest(predicted: Sequence[PredictedPlacement]) -> int:
    """Index of the prediction with the least cost (`_least`). Raises ValueError for an empty list."""
    return _least(predicted, [each.cost_s for each in predicted])


def _least(predicted: Sequence[PredictedPlacement], costs: Sequence[float]) -> int:
    """Index of the least cost. Among costs close to it, the worker with the fewest uncached tokens of the prompt; among
    those the one with the least cost, then the one with the fewest answers, then the first.

    A fit to few steps, or to similar prompts, may give a cost of zero per prompt token. Cached pages save work even
    then.
    """
    limit = min(costs) * (1 + CLOSE)
    close = (place for place, cost in enumerate(costs) if cost <= limit)
    return min(close, key=lambda place: (predicted[place].uncached_tokens, costs[place], predicted[place].answers))
