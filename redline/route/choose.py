"""Which worker a job goes to: the one where it costs least.

    first token = (prompt tokens that wait there + those of this prompt that are not cached there) x seconds a token
    cost = first token + (those that are not cached + those for which others are forgotten) x seconds a token

An answer that is being written beside a prompt lengthens it, and is lengthened by it: it counts as ANSWER_TOKENS more.
What is not cached counts twice, since whoever comes behind waits for it too, and once more where there is no free page
for it: then something else will be computed again. So a conversation returns to the worker
that has its pages, without being bound to it: where enough waits there, it is computed anew elsewhere. Pure functions
over what is known of the workers.
"""

from collections.abc import Sequence
from typing import NamedTuple

ANSWER_TOKENS = 64  # prompt tokens that an answer beside counts as
FRESH_TOKEN_S = 1e-4  # where nothing has been computed yet; any other number chooses the same
BROUGHT_SHARE = 0.05  # of the time that computing a prompt takes: to bring its pages from another worker
HELD_UP = (
    0.5  # of an answer, what holding it up counts: it has time to spare, where who waits for a first token has none
)
PACE_MEMORY = 0.9  # share of what has been measured that stays when a prompt's time is added


class Pace:
    """Seconds for a prompt token, from the prompts that were computed lately.

    Of all workers together: one that had a slow moment would be avoided, and so never be measured again.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """A prompt of which so many tokens were not cached has had its first token after so many seconds of work."""
        self._seconds = PACE_MEMORY * self._seconds + seconds
        self._tokens = PACE_MEMORY * self._tokens + tokens

    @property
    def token_s(self) -> float:
        """Seconds a token."""
        return self._seconds / self._tokens if self._tokens else FRESH_TOKEN_S


class Candidate(NamedTuple):
    """What is known of a worker when a job comes."""

    worker: str
    cached: int  # tokens of the prompt in its prefix cache, or about to be
    queue: int  # prompt tokens that it has to compute before
    answers: int  # that it is writing
    free: int  # tokens for which nothing cached has to be forgotten


class Predicted(NamedTuple):
    """What is expected of a worker for one job."""

    worker: str
    cached_tokens: int  # of the prompt
    uncached_tokens: int  # likewise
    queue_tokens: int  # of other prompts, before
    forgotten_tokens: int  # of others, for which there is no room beside them
    answers: int
    token_s: float
    first_token_s: float

    @property
    def cost_s(self) -> float:
        """Seconds: its own first token, and what is computed for it, now or later."""
        return self.first_token_s + (self.uncached_tokens + self.forgotten_tokens) * self.token_s


def predict(tokens: int, candidates: Sequence[Candidate], token_s: float) -> list[Predicted]:
    """What is expected of each for a prompt of so many tokens, at so many seconds a token."""
    found: list[Predicted] = []
    for each in candidates:
        uncached = tokens - each.cached
        first_token_s = (each.queue + uncached + each.answers * ANSWER_TOKENS) * token_s
        forgotten = max(0, uncached - each.free)
        found.append(
            Predicted(each.worker, each.cached, uncached, each.queue, forgotten, each.answers, token_s, first_token_s)
        )
    return found


def apart(here: Sequence[Predicted], there: Sequence[Predicted]) -> tuple[int, int | None]:
    """(who of `here` answers, who of `there` computes the prompt; None: whoever answers).

    A prompt that is computed where its answer is holds up every answer that is written there, and counts HELD_UP more
    for each; at least once more, for those that may come. One that is computed elsewhere has its pages brought.
    """

    def alone_s(each: Predicted) -> float:
        return each.cost_s * (1 + max(1.0, HELD_UP * each.answers))

    def brought_s(each: Predicted) -> float:
        return (each.uncached_tokens * BROUGHT_SHARE + each.answers * ANSWER_TOKENS) * each.token_s

    alone, joined = (min(range(len(here)), key=lambda place: cost(here[place])) for cost in (alone_s, brought_s))
    if not there:
        return cheapest(here), None
    computes = cheapest(there)
    if alone_s(here[alone]) < there[computes].cost_s + brought_s(here[joined]):
        return alone, None
    return joined, computes


def cheapest(predicted: Sequence[Predicted]) -> int:
    """The place of the one with the least cost; of several, the first. Raises ValueError where there is none."""
    return min(range(len(predicted)), key=lambda place: predicted[place].cost_s)
