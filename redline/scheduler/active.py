"""The scheduler's state of one job. Private to the scheduler.

The scheduler runs ahead of the results: `planned` and `length` describe launched steps, `generated` and `computed`
settled ones. The difference is in the steps in flight. Draft tokens in flight are counted as accepted, so `planned` and
`length` are upper bounds; `slack` is the number of draft tokens that may still be rejected.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from redline.messages.delta import Brought, Encoded, Finish, Note
from redline.messages.job import PAGE_TOKENS, Job, PageHash, PageId
from redline.scheduler.notes import Pause, Rounds


class Computed(NamedTuple):
    """Progress of a prefill for another worker."""

    positions: int  # [0, positions) are computed
    pages: tuple[PageId, ...]
    exact: bool  # the pages are bit-equal to those of a prefill
    drafting: bool  # the drafter has read all computed positions


class ActiveJob:
    """A job that has not ended, or has ended and still has steps in flight.

    arrival: index in the order of arrival. limit: maximum number of tokens, prompt and generated.
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
        "encoded",
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
        self.arrival = arrival  # index among all jobs that have arrived
        self.entry: int | None = None  # index among all jobs that have started; None before the first start
        self.came = 0.0  # arrival time, by the planner's clock
        self.came_at_s = 0.0  # arrival time, in seconds of settled steps
        self.queued_s: float | None = None  # from arrival to the first step
        # Positions to compute, as of arrival; the queue compares jobs by it.
        self.work = len(job.tokens) + len(job.answer)
        # Whether its grammar is compiled; the reference keeps the grammar until the job ends. None: no grammar to
        # compile.
        self.compiled: Callable[[], bool] | None = None
        self.passed = 0  # positions of jobs that started while this job was next
        self.prompt = len(job.tokens)
        self.limit = limit
        # Number of positions to compute. The position of the last token is not computed, because its result is not
        # needed.
        self.target = max(limit - 1, self.prompt)
        self.stop_ids = frozenset(job.sampling.stop_ids)

        self.slot: int | None = None
        self.pages: list[PageId] = []  # the page table, followed by pages that no row has needed yet
        self.sent = 0  # number of pages in the slot's page table on the device
        self.planned = 0  # positions [0, planned) are launched or cached
        # Maximum number of tokens in the slot after every launched step has run.
        self.length = self.prompt + len(job.answer)
        self.slack = 0  # draft tokens in flight
        self.proposed = 0  # maximum number of draft tokens in the slot for the next row
        self.waiting = True  # the slot may have draft tokens for the next row; False: the last result had none
        self.forced = 0  # tokens that it will have in any case: the known ones, and those that its grammar forces next
        self.drafting = False  # the learned drafter has read all launched positions, and follows the job
        self.flights = 0  # launched steps with a row of this job that are not settled

        self.generated = list(job.answer)
        self.computed = 0  # positions [0, computed) are settled or cached
        self.read = 0  # end of the last row that the learned drafter has read
        self.hashes: list[PageHash] = list(job.pages)
        # Whether the planner may hash pages after the prompt's own. Their hash chain must include the salt, which is
        # part of the prompt's first hash, and every image, which only the prompt's own hashes include.
        tail = len(job.pages) * PAGE_TOKENS
        media_in_tail = any(span.start + span.tokens > tail for span in job.media)
        self.hashable = not media_in_tail and bool(job.pages or not job.salt)
        self.kept = 0  # pages [0, kept) have been inserted into the prefix cache
        self.exact = True  # the cached pages that the answer started from are bit-equal to a prefill
        self.cached_tokens = 0
        self.counted = False  # its prompt is included in the planner's counters
        self.scored = job.scored  # prompt tokens for which log probabilities have been sent
        self.lends = False  # prefill for another worker: its pages are lent when it ends
        self.finish: Finish | None = None  # set when it has ended; steps may still be in flight
        self.brought: Brought | None = None  # pages from an offload tier, until the note is sent
        self.encoded: Encoded | None = None  # its images, until the note is sent
        self.pause: Pause | None = None  # the current preemption, until the note of its end is sent
        self.rounds: Rounds | None = None  # timed steps with draft tokens of this job

    @property
    def known(self) -> int:
        """Number of tokens known to the host: prompt and generated."""
        return self.prompt + len(self.generated)

    @property
    def usable(self) -> int:
        """Maximum number of the prompt's pages to take from the prefix cache. The last known token is sampled from,
        so its page must be computed; if the prompt's log probabilities are requested, every page must be."""
        if self.job.sampling.prompt_logprobs is not None:
            return 0
        return min((self.known - 1) // PAGE_TOKENS, len(self.job.pages))

    @property
    def decodes(self) -> bool:
        """Whether every token but the last is launched, so that the next row is a decode row."""
        return self.planned >= self.prompt and self.planned == self.length - 1

    @property
    def room(self) -> int:
        """Maximum number of tokens that further rows can add before the job reaches its limit."""
        return self.limit - (self.length - self.slack)

    def next_count(self, budget: int) -> int:
        """Number of positions, at most `budget`, of the next row over known tokens.

        A row never crosses the end of the prompt: later positions were computed by the decode kernel of attention, and
        are recomputed by it when a preempted job resumes.
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
        """The notes to send with a delta that has these tokens, or this finish."""
        if self.brought is None and self.encoded is None and self.pause is None and self.rounds is None:  # usually
            return ()
        notes: list[Note] = []
        if self.brought is not None and (tokens or finish):
            notes.append(self.brought)
            self.brought = None
        if self.encoded is not None and (tokens or finish):
            notes.append(self.encoded)
            self.encoded = None
        if self.pause is not None and tokens:
            notes.append(self.pause.resumed())
            self.pause = None
        if self.rounds is not None and (finish or self.rounds.due):
            notes.append(self.rounds.told())
        return tuple(notes)

    def accept(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], Finish | None]:
        """Append new tokens up to the limit or to a stop id, which is the last token."""
        accepted = tuple(tokens[: self.limit - self.known])
        finish: Finish | None = None
        if not self.stop_ids.isdisjoint(accepted):
            first = next(n for n, token in enumerate(accepted, 1) if token in self.stop_ids)
            accepted, finish = accepted[:first], "stop"
        self.generated += accepted
        return accepted, finish

    def completed_by(self, tokens: Sequence[int]) -> bool:
        """Whether the answer ends with these tokens: then an error of its grammar after them (it took too long) is
        ignored, because it delays no other job."""
        return bool(tokens) and (self.known + len(tokens) >= self.limit or not self.stop_ids.isdisjoint(tokens))

    @property
    def is_compiled(self) -> bool:
        """Whether no grammar has to be compiled before the job can start."""
        return self.compiled is None or self.compiled()

    def progress(self) -> Computed:
        """What exists of a prefill for another worker."""
        read = self.drafting and self.read >= self.computed
        return Computed(min(self.computed, self.prompt), tuple(self.pages), self.exact, read)

    def leave(self) -> None:
        """Clear slot and pages, which the caller has released: the job will restart from its known tokens.

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
    """Number of pages for positions [0, tokens)."""
    return -(-tokens // PAGE_TOKENS)
