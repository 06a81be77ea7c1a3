"""Which worker a job goes to: the one where it costs least, in seconds of all whom it concerns.

    queue       = prompt tokens that wait there x seconds a token of full steps
    prompt      = what the steps of this prompt take there, beside the answers there
    own         = what these steps take longer than steps of the answers alone
    first token = queue + prompt, and a step of the answers there
    computing   = strain(first token + prompt for those who come behind) + seconds of those that are forgotten for it
    between     = a step of one answer more / (1 - share of its time that it computes prompts)
    answer      = tokens x (strain(between) + for each answer there what it is more than before)
    held up     = tokens x what own, over the tokens of an answer, adds to strain(between), for each answer there and
                  for those that meet it because it stays longer

What steps take is said by the step model (`tune/steps.py`) that is fitted to those that workers tell of (`pace.py`).
`strain` weighs seconds by how much of what is promised they take (`tune/targets.py`). All seconds that are promised for
an answer count as much as those for a first token. Behind a prompt come as many as a queue has that is busy for such a
share of the time: 1 / (1 - share). An answer that is held up is there for longer, and makes steps longer for others:
of r answers each adds s to a step of t, so what holds them up counts 1 / (1 - r s / t). So a conversation returns to
the worker that has its pages, without being bound to it: where enough waits there, or answers there are slow, it is
computed anew elsewhere.

Which of several workers takes prompt and answer together is one question: there an answer that is late anyway is not
cared for, so that the others are not late too. Whether a prompt is computed beside answers or by who computes prompts
is another: answers that are late may yet be in time if nothing holds them up, and each that is held up holds up those
that come. There they weigh as much as one that is nearly late. A KV transfer takes a prompt's pages twice, so it is not
chosen where both workers have none free. Pure functions over what is known of the workers.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from redline.route.pace import Pace
from redline.tune.targets import HEAVY, Targets, strain

NO_TARGETS = Targets()
BROUGHT_SHARE = 0.05  # of the time that computing a prompt takes: to bring its pages from another worker
HELD_UP = 0.5  # where not both are promised, what a second of an answer counts beside one of a first token: it has time
# to spare, where who waits for a first token has none
CLOSE = 0.01  # costs that differ by no more than this share of the least count as equal: times are not measured better
MOST_BUSY = 0.9  # of a worker's time, that prompts are taken to leave a tenth of to answers; of what answers add to
# their own steps likewise


class Candidate(NamedTuple):
    """What is known of a worker when a job comes."""

    worker: str
    cached: int  # tokens of the prompt in its prefix cache, or about to be
    queue: int  # prompt tokens that it has to compute before
    answers: int  # that it is writing, and those that are about to come (`beside`)
    free: int  # tokens for which nothing cached has to be forgotten
    busy: float = 0.0  # share of its time that it computes prompts
    room: float = math.inf  # tokens whose pages it can have now, beside those of the jobs that it has been sent


class Predicted(NamedTuple):
    """What is expected of a worker for one job. Costs are seconds as heavy as they weigh (see above).

    own_s: of computing its prompt, what is not a step of answers anyway. computing_cost_s: of computing the prompt
    there. answer_cost_s: of writing the answer. held_up_cost_s: of the answers beside it and of itself, where the
    prompt is computed there too, and care_cost_s the same where answers that are late are cared for. bringing_s: of the
    prompt, where it is computed elsewhere.
    """

    worker: str
    cached_tokens: int  # of the prompt
    uncached_tokens: int  # likewise
    queue_tokens: int  # of other prompts, before
    forgotten_tokens: int  # of others, for which there is no room beside them
    answers: int
    busy: float
    own_s: float
    first_token_s: float
    between_s: float  # two tokens of its answer
    computing_cost_s: float
    answer_cost_s: float
    held_up_cost_s: float
    care_cost_s: float
    bringing_s: float
    fits: bool  # it has room for the prompt's pages now

    @property
    def cost_s(self) -> float:
        """Of prompt and answer there, among others that do both."""
        return self.computing_cost_s + self.answer_cost_s + self.held_up_cost_s

    @property
    def beside_cost_s(self) -> float:
        """Of prompt and answer there, where the prompt could be computed elsewhere."""
        return self.computing_cost_s + self.answer_cost_s + self.care_cost_s

    @property
    def brought_cost_s(self) -> float:
        """Of the answer there, where the prompt is computed elsewhere."""
        return self.answer_cost_s + self.bringing_s


def predict(
    tokens: int, candidates: Sequence[Candidate], pace: Pace, of: str = "", targets: Targets = NO_TARGETS
) -> list[Predicted]:
    """What is expected of each for a prompt of so many tokens. of: the job's class; targets: what that is promised."""
    output, context, model, chunk = pace.output(of), pace.context, pace.model, pace.step_tokens
    token_s, rate = pace.token_s(model), pace.steps_a_token / 1e3
    ttft_s, itl_s = targets
    both = ttft_s < math.inf and itl_s < math.inf
    all = output * (ttft_s / (output * itl_s) if both else HELD_UP)  # tokens, by what a second of the answer counts
    found: list[Predicted] = []
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
        # At least one is held up, that may come meanwhile.
        grows = 1 - answers * (between_s - step_ms * slower) / between_s if between_s else 1.0
        those, held_s = all * max(answers, 1) / max(grows, 1 - MOST_BUSY), between_s + own_s / output
        held_up = those * (strain(held_s, itl_s) - strained)
        care = those * (strain(held_s, itl_s, HEAVY) - strain(between_s, itl_s, HEAVY))
        found.append(
            Predicted(
                worker, cached, uncached, queue, forgotten, answers, busy, own_s, first_s, between_s,
                computing, answer, held_up, care, own_s * BROUGHT_SHARE, uncached <= room,
            )
        )  # fmt: skip
    return found


def beside(writing: int, awaited: int, answer_s: float, waits_s: float) -> int:
    """Answers at a worker, those counted that come from a worker for prompts.

    awaited: whose prompts are computed elsewhere. answer_s: how long one is written. waits_s: how long prompts wait
    there. Where that is longer than an answer, of those that are awaited only so many are ever there at once: a queue
    for prompts is no crowd where answers are.
    """
    return writing + round(awaited * min(1.0, answer_s / waits_s) if waits_s > 0 else awaited)


def apart(here: Sequence[Predicted], there: Sequence[Predicted]) -> tuple[int, int | None]:
    """(who of `here` answers, who of `there` computes the prompt; None: whoever answers).

    A prompt whose pages fit neither here nor there is computed where it is answered. There it would wait for pages, be
    computed, and hold its pages until some are free here; they are given up when others need them, and the prompt is
    computed here after all.
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


def cheapest(predicted: Sequence[Predicted]) -> int:
    """The place of the one with the least cost (`_least`). Raises ValueError where there is none."""
    return _least(predicted, [each.cost_s for each in predicted])


def _least(predicted: Sequence[Predicted], costs: Sequence[float]) -> int:
    """The place of the least cost. Of costs that are close to it, the one of the worker that has the fewest tokens of
    the prompt to compute; of those the least, then the one with the fewest answers, then the first.

    A fit to few steps, or to prompts that are all alike, may find that a token of a prompt costs nothing. Pages in a
    cache still save work.
    """
    limit = min(costs) * (1 + CLOSE)
    close = (place for place, cost in enumerate(costs) if cost <= limit)
    return min(close, key=lambda place: (predicted[place].uncached_tokens, costs[place], predicted[place].answers))
