"""Which worker a job goes to: the one where it costs least, in seconds of all whom it concerns.

    first token = (prompt tokens that wait there + those of this prompt that are not cached there) x seconds a token,
                  and a step of the answers there
    prompt      = strain(first token), and that of one who comes behind; those for which others are forgotten
    between     = (a step + what a row adds x answers there) / (1 - share of its time that it computes prompts)
    answer      = tokens x strain(between two of them), and what that is more for each answer there
    beside      = answer + what the seconds of the prompt are more, for each answer there

`strain` weighs seconds by how much of what is promised they take (`tune/targets.py`). All seconds that are promised for
an answer count as much as those for a first token. So a conversation returns to the worker that has its pages, without
being bound to it: where enough waits there, or answers there are slow, it is computed anew elsewhere. Pure functions
over what is known of the workers.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from redline.route.pace import Pace
from redline.tune.targets import Targets, strain

NO_TARGETS = Targets()
BROUGHT_SHARE = 0.05  # of the time that computing a prompt takes: to bring its pages from another worker
HELD_UP = 0.5  # where not both are promised, what a second of an answer counts beside one of a first token: it has time
# to spare, where who waits for a first token has none
MOST_BUSY = 0.9  # of a worker's time, that prompts are taken to leave a tenth of to answers


class Candidate(NamedTuple):
    """What is known of a worker when a job comes."""

    worker: str
    cached: int  # tokens of the prompt in its prefix cache, or about to be
    queue: int  # prompt tokens that it has to compute before
    answers: int  # that it is writing
    free: int  # tokens for which nothing cached has to be forgotten
    busy: float = 0.0  # share of its time that it computes prompts


class Predicted(NamedTuple):
    """What is expected of a worker for one job. Costs are seconds as heavy as they weigh (see above).

    prompt_cost_s: of computing the prompt there. beside_cost_s: of writing the answer there, where the prompt is
    computed there too. brought_cost_s: where it is computed elsewhere, of bringing it and of writing the answer.
    """

    worker: str
    cached_tokens: int  # of the prompt
    uncached_tokens: int  # likewise
    queue_tokens: int  # of other prompts, before
    forgotten_tokens: int  # of others, for which there is no room beside them
    answers: int
    busy: float
    token_s: float
    first_token_s: float
    between_s: float  # two tokens of its answer
    prompt_cost_s: float
    beside_cost_s: float
    brought_cost_s: float

    @property
    def cost_s(self) -> float:
        """Of prompt and answer there."""
        return self.prompt_cost_s + self.beside_cost_s


def predict(
    tokens: int, candidates: Sequence[Candidate], pace: Pace, of: str = "", targets: Targets = NO_TARGETS
) -> list[Predicted]:
    """What is expected of each for a prompt of so many tokens. of: the job's class; targets: what that is promised."""
    token_s, output = pace.token_s, pace.output(of)
    step_s, row_s = pace.between()
    ttft_s, itl_s = targets
    both = ttft_s < math.inf and itl_s < math.inf
    all = output * (ttft_s / (output * itl_s) if both else HELD_UP)  # tokens, by what a second of the answer counts
    found: list[Predicted] = []
    for worker, cached, queue, answers, free, busy in candidates:
        uncached = tokens - cached
        own_s = uncached * token_s
        first_s = queue * token_s + own_s + (step_s + row_s * answers if answers else 0.0)
        forgotten = max(0, uncached - free)
        prompt = strain(first_s + own_s, ttft_s) + forgotten * token_s  # what it adds to who comes behind is in it
        slower = 1 / (1 - min(MOST_BUSY, busy))
        before_s = (step_s + row_s * answers) * slower
        between_s = before_s + row_s * slower
        strained = strain(between_s, itl_s)
        answer = all * (strained + answers * (strained - strain(before_s, itl_s)))
        # At least one is held up, that may come meanwhile.
        held_up = all * max(answers, 1) * (strain(between_s + own_s / output, itl_s) - strained)
        found.append(
            Predicted(
                worker, cached, uncached, queue, forgotten, answers, busy, token_s, first_s, between_s,
                prompt, answer + held_up, answer + own_s * BROUGHT_SHARE,
            )
        )  # fmt: skip
    return found


def apart(here: Sequence[Predicted], there: Sequence[Predicted]) -> tuple[int, int | None]:
    """(who of `here` answers, who of `there` computes the prompt; None: whoever answers)."""
    alone = cheapest(here)
    if not there:
        return alone, None
    joined = min(range(len(here)), key=lambda place: (here[place].brought_cost_s, here[place].answers))
    computes = min(range(len(there)), key=lambda place: there[place].prompt_cost_s)
    if here[alone].cost_s < there[computes].prompt_cost_s + here[joined].brought_cost_s:
        return alone, None
    return joined, computes


def cheapest(predicted: Sequence[Predicted]) -> int:
    """The place of the one with the least cost; of several the one with fewest answers, and of those the first. Raises
    ValueError where there is none."""
    return min(range(len(predicted)), key=lambda place: (predicted[place].cost_s, predicted[place].answers))
