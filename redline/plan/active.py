"""A job in flight, as the planner sees it. Private to plan.

The planner runs ahead of the results: `planned` and `length` say what has been launched, `generated` and `computed`
what has been settled. Between the two lie the steps in flight. Their drafts count as if all of them held, so `planned`
and `length` are the most that it can come to; `slack` says by how much less it may be.
"""

from collections.abc import Callable, Sequence

from redline.plan.notes import Pause, Rounds
from redline.wire.delta import Brought, Finish, Note
from redline.wire.job import PAGE_TOKENS, Job, PageHash, PageId


class ActiveJob:
    """One job that has not ended, or that has and still has steps in flight.

    arrival: its place in the order in which jobs came. limit: the most tokens, prompt and generated, that it may have.
    """

    __slots__ = (
        "arrival",
        "brought",
        "cached_tokens",
        "came",
        "came_at_s",
        "compiled",
        "computed",
        "counted",
        "drafting",
        "entry",
        "exact",
        "finish",
        "flights",
        "forced",
        "generated",
        "hashable",
        "hashes",
        "job",
        "kept",
        "lends",
        "length",
        "limit",
        "pages",
        "passed",
        "pause",
        "planned",
        "prompt",
        "proposed",
        "queued_s",
        "read",
        "rounds",
        "scored",
        "sent",
        "slack",
        "slot",
        "stop_ids",
        "target",
        "waiting",
        "work",
    )

    def __init__(self, job: Job, arrival: int, limit: int) -> None:
        self.job = job
        self.arrival = arrival  # its place among all jobs that have come
        self.entry: int | None = None  # its place among all that have begun
        self.came = 0.0  # when, by the planner's clock
        self.came_at_s = 0.0  # when, in seconds of steps that had settled
        self.queued_s: float | None = None  # from then to its first step
        self.work = len(job.tokens) + len(
            job.answer
        )  # positions that it had to compute when it came; in the queue it is ranked by them
        # Whether its grammar is compiled; it holds the grammar until the job ends. None: there is nothing to compile.
        self.compiled: Callable[[], bool] | None = None
        self.passed = 0  # positions of jobs that began while it was this one's turn
        self.prompt = len(job.tokens)
        self.limit = limit
        # Positions that must be computed: the last token's own position never is, nobody reads what it would give.
        self.target = max(limit - 1, self.prompt)
        self.stop_ids = frozenset(job.sampling.stop_ids)

        self.slot: int | None = None
        self.pages: list[PageId] = []  # the page table, and behind it pages that no row has needed yet
        self.sent = 0  # pages that the slot's table on the device holds
        self.planned = 0  # positions [0, planned) are launched or cached
        self.length = self.prompt + len(
            job.answer
        )  # tokens that the slot holds when every launched step has run, at most
        self.slack = 0  # drafts in flight
        self.proposed = 0  # drafts that the slot may hold for the next row
        self.waiting = True  # for all that is known, drafts wait for the next row
        self.forced = 0  # tokens that it comes to in any case: those that are known, and what its grammar forces then
        self.drafting = False  # the learned drafter has read all that was launched, and follows on
        self.flights = 0  # launched steps with a row of this job that are not settled

        self.generated = list(job.answer)
        self.computed = 0  # positions [0, computed) are settled or cached
        self.read = 0  # where the last row ended that the learned drafter has read
        self.hashes: list[PageHash] = list(job.pages)
        # Whether the planner may hash pages behind the prompt's own. Their chain must carry the salt, which is in the
        # prompt's first hash, and every image, which only the prompt's own hashes know.
        tail = len(job.pages) * PAGE_TOKENS
        media_in_tail = any(span.start + span.tokens > tail for span in job.media)
        self.hashable = not media_in_tail and bool(job.pages or not job.salt)
        self.kept = 0  # pages [0, kept) have been shown to the prefix cache
        self.exact = True  # the cached pages that the answer began from are bit-equal to a prefill
        self.cached_tokens = 0
        self.counted = False  # its prompt is in the planner's counters
        self.scored = job.scored  # prompt tokens whose log probabilities have been told
        self.lends = False  # its pages are for another worker: they are lent when it ends
        self.finish: Finish | None = None  # set when it has ended; steps may still be in flight
        self.brought: Brought | None = None  # from below the prefix cache, until it is told
        self.pause: Pause | None = None  # since when it was pre-empted, until that is over and told
        self.rounds: Rounds | None = None  # with drafts of it

    @property
    def known(self) -> int:
        """Tokens that the host knows: prompt and generated."""
        return self.prompt + len(self.generated)

    @property
    def usable(self) -> int:
        """How many pages of the prompt may come from the cache. The last known token is sampled from, so its page must
        be computed; where the prompt's log probabilities are asked for, every page must be."""
        if self.job.sampling.prompt_logprobs is not None:
            return 0
        return min((self.known - 1) // PAGE_TOKENS, len(self.job.pages))

    @property
    def decodes(self) -> bool:
        """Whether every token but the last is launched, so that the next row is a decode row."""
        return self.planned >= self.prompt and self.planned == self.length - 1

    @property
    def room(self) -> int:
        """Tokens, at most, that rows yet to be launched can add before the job is at its limit."""
        return self.limit - (self.length - self.slack)

    def next_count(self, budget: int) -> int:
        """Positions, at most `budget`, of the next row over known tokens.

        It never crosses the end of the prompt: what lies behind was computed by the decode form of attention, and is
        computed by it again when a pre-empted job resumes.
        """
        border = self.prompt if self.planned < self.prompt else self.length
        return min(budget, border - self.planned)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """The ids of the known tokens at positions [start, stop)."""
        prompt = self.prompt
        if stop <= prompt:
            return self.job.tokens[start:stop]
        return self.job.tokens[start:] + tuple(self.generated[max(0, start - prompt) : stop - prompt])

    def noted(self, tokens: Sequence[int], finish: Finish | None) -> tuple[Note, ...]:
        """What is to be told with a delta that has these tokens, or this end."""
        if self.brought is None and self.pause is None and self.rounds is None:  # nearly always
            return ()
        notes: list[Note] = []
        if self.brought is not None and (tokens or finish):
            notes.append(self.brought)
            self.brought = None
        if self.pause is not None and tokens:
            notes.append(self.pause.resumed())
            self.pause = None
        if self.rounds is not None and (finish or self.rounds.due):
            notes.append(self.rounds.told())
        return tuple(notes)

    def leave(self) -> None:
        """Forgets slot and pages, which have been given back: the job will begin anew from what is known.

        Raises AssertionError while it has steps in flight.
        """
        assert not self.flights, f"job {self.job.id} leaves with {self.flights} steps in flight"
        self.slot = None
        self.pages = []
        self.sent = self.planned = self.computed = self.kept = self.read = self.proposed = 0
        self.drafting = False
        self.waiting = True
        self.forced = 0
        self.length = self.known


def pages_for(tokens: int) -> int:
    """Pages that hold positions [0, tokens)."""
    return -(-tokens // PAGE_TOKENS)
