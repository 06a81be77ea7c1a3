"""The scheduler of a worker: continuous batching with chunked prefill and speculative decoding. Holds no tensor.

A step is scheduled on top of the launched steps, before their results are known: a row continues where the last one
will have ended, and draft tokens in flight are counted as accepted. Results are handled late: after a stop id or an
error, rows that were launched in between are dropped when they settle; positions counted for rejected draft tokens are
taken back.

No job starves. The queue admits jobs round-robin between tenants (`queue`); every step gives one decode row to each
running job that generates. The rest of the token budget goes to prefill and to draft tokens, which get at most half of
it while prompts wait. If the step time is bounded, the prefill budget of a mixed step is reduced, but never to zero
(`prefill_budget`). Up to half of the prefill budget goes to prompts with less to compute than the oldest, and the
rest to the oldest first. The token budget is not smaller than the number of slots, so the oldest prompt always gets
some. When no page is free, the running job that started last is preempted and requeued in front of the waiting jobs. So
the oldest job always advances, and every job becomes the oldest.

For throughput, when time to first token does not matter, waiting jobs can be admitted in groups (`admit_together`),
with whole prompts if they fit: fewer steps contain prefill.
"""

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from redline.errors import ConfigError
from redline.messages.delta import Brought, Delta, Fault, Finish, Preempted
from redline.messages.handoff import PrefillDone
from redline.messages.job import PAGE_TOKENS, Grammar, Job, JobId, PageHash, PageId
from redline.messages.news import STEP_SIZES, Cached, Load, TimedStep
from redline.messages.step import Begin, CapturedShapes, Row, RowResult, Shape, Step, StepResult, TokenLogprobs
from redline.policy.costs import StepCosts
from redline.policy.floor import StepFloor
from redline.scheduler.active import ActiveJob, pages_for
from redline.scheduler.admit import refusal, short_pages, token_limit
from redline.scheduler.kv_tier import Fetch, Kept, KvTier, Lack, TierReads
from redline.scheduler.notes import Pause, Rounds
from redline.scheduler.pages import Holder, PagePool
from redline.scheduler.prefill_budget import Forecast, PrefillBudget
from redline.scheduler.prefix import Changed, Content, PrefixCache
from redline.scheduler.queue import Queue
from redline.scheduler.recorded import RecordedShapes
from redline.scheduler.speculation import Speculation
from redline.scheduler.timed import TimedSteps

HashPage = Callable[[PageHash | None, tuple[int, ...]], PageHash]
"""A page's hash from the previous page's hash (None: the first page, of a job without salt) and its PAGE_TOKENS
tokens."""

Hold = Callable[[Grammar], Callable[[], bool]]
"""Starts to compile a grammar. The result returns whether it is compiled, so that no step waits for it; while the
result is referenced, the grammar is kept."""


WORTH_A_STEP = 8  # shared pages of two prompts that justify an extra step instead of computing them twice
MOST_STEP_TOKENS = 1 << 16  # log probabilities of this many prompt tokens, with 20 alternatives each, take 23 MB


@dataclass(frozen=True)
class PlanConfig:
    """Limits on a planner's steps and queues. Raises ConfigError for values that contradict each other."""

    step_tokens: int = 512  # maximum number of positions of a step
    step_ms: float | None = None  # limit on the predicted time of a step that mixes prefill and decode; None: no limit
    max_running: int = 64  # maximum number of running jobs, each in a slot
    max_waiting: int = 1024  # maximum number of queued jobs, not counting those that free slots can take
    admit_together: int = 1  # waiting jobs are admitted when this many slots are free, or enough for all of them
    ahead: int = 1  # maximum number of unsettled steps while the next is scheduled
    draft_tokens: int = 0  # maximum number of draft tokens per row; 0 disables speculative decoding
    learned: bool = False  # a learned drafter is loaded; otherwise draft tokens are suffix matches

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.step_tokens:
            raise ConfigError(
                f"max_running is {self.max_running} and step_tokens {self.step_tokens}: "
                "a step needs a token for each running job"
            )
        if self.step_tokens > MOST_STEP_TOKENS:
            raise ConfigError(f"step_tokens is {self.step_tokens:,}; the maximum is {MOST_STEP_TOKENS:,}")
        if not 1 <= self.admit_together <= self.max_running:
            raise ConfigError(
                f"admit_together is {self.admit_together}; expected 1 to max_running, which is {self.max_running}"
            )
        if self.step_ms is not None and not 0 < self.step_ms < math.inf:
            raise ConfigError(f"step_ms is {self.step_ms:g}; expected a time in milliseconds, greater than 0")
        if self.max_waiting < 0 or self.ahead < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting} and ahead {self.ahead}: neither can be negative")
        if not 0 <= self.draft_tokens <= PAGE_TOKENS:
            raise ConfigError(f"draft_tokens is {self.draft_tokens}; expected 0 to {PAGE_TOKENS}")


class _Part(NamedTuple):
    """A row that is being scheduled: the next positions of a job. In a decode row all but the first are draft
    tokens."""

    job: ActiveJob
    positions: int
    decodes: bool

    @property
    def samples(self) -> bool:
        job = self.job
        return self.decodes or (job.planned + self.positions == job.length < job.limit)


class _PlannedStep(NamedTuple):
    step: Step
    jobs: list[ActiveJob]  # one for each row


class Computed(NamedTuple):
    """Progress of a prefill for another worker."""

    positions: int  # [0, positions) are computed
    pages: tuple[PageId, ...]
    exact: bool  # the pages are bit-equal to those of a prefill
    drafting: bool  # the drafter has read all computed positions


class Planner:
    """The scheduler. Owns pages, slots and queues of one worker.

    Steps are settled in the order in which they were scheduled. `submit`, `abort` and `settle` return deltas for the
    clients; a job's last delta, and no other, has a finish.
    """

    def __init__(
        self,
        pages: int,
        config: PlanConfig,
        max_model_len: int,
        hash_page: HashPage,
        costs: StepCosts | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """pages: number of pages. max_model_len: maximum tokens of one job, prompt and answer.

        costs: measured step costs of this machine; None: not measured, and rows get the maximum number of draft tokens.
        clock: returns seconds; used only to report how long jobs waited; None: waiting times are not reported.
        """
        self._config = config
        self._clock = clock
        self._max_model_len = max_model_len
        self._hash_page = hash_page
        self._pool = PagePool(pages)
        self._cache = PrefixCache(self._pool)
        self._below: KvTier | None = None
        self._fetches = TierReads(self._pool, self._cache)
        self._recorded = RecordedShapes()
        self._speculation = Speculation(config.draft_tokens, config.learned, costs or StepCosts())
        self._jobs: dict[JobId, ActiveJob] = {}  # all that have not ended
        self._waiting = Queue()
        self._hold: Hold | None = None
        # Jobs that wait for their grammar to be compiled before they are queued.
        self._compiling: dict[JobId, ActiveJob] = {}
        self._running: list[ActiveJob] = []  # in the order in which they first started
        # Jobs that wait for a KV transfer from a prefill worker or an offload tier.
        self._arriving: dict[JobId, ActiveJob] = {}
        self._landed: deque[ActiveJob] = deque()  # jobs with a complete KV transfer that wait for a slot
        self._lent: dict[JobId, Computed] = {}  # by ended prefill job: pages that still have to be transferred
        self._draining: set[ActiveJob] = set()  # ended jobs with steps in flight: they still hold slot and pages
        self._flights: deque[_PlannedStep] = deque()
        self._free_slots = list(reversed(range(config.max_running)))
        self._admitting = False  # until the queue is empty or no slot is free
        self._arrivals = 0
        self._entries = 0
        self._steps = 0
        self._replayed = 0
        self._led = 0
        self._step_sizes = [0] * (len(STEP_SIZES) + 1)
        self._step_positions = 0
        self._timed = TimedSteps(clock)
        self._beside = PrefillBudget(config.step_ms)
        self._cached_told = 0  # number of `Cached` messages
        self._preemptions = 0
        self._untold: list[Delta] = []  # notes of preempted jobs, to be sent
        self._prompt_tokens = 0
        self._prompt_tokens_cached = 0
        self._generation_tokens = 0

    def stand_beside(self, floor: StepFloor) -> None:
        """From now on add up the times of timed steps and their floors (minimum times on this machine)."""
        self._timed.floor = floor

    def watch_steps(self, watch: Callable[[TimedStep, float, int], object]) -> None:
        """From now on time every step, and call `watch` as described in `TimedSteps`, in the loop's thread."""
        self._timed.watch = watch

    def foresee(self, forecast: Forecast) -> None:
        """From now on limit the prefill budget of mixed steps by `step_ms` of the config, using this forecast. The
        forecast is updated with every timed step."""
        self._beside.forecast = forecast
        self._timed.hears = forecast.took

    def compile_with(self, hold: Hold) -> None:
        """From now on a job is scheduled only when its grammar is compiled. It keeps the grammar until it ends."""
        self._hold = hold

    @property
    def compiling(self) -> bool:
        """Whether jobs may be waiting for their grammars."""
        return bool(self._compiling or self._landed)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to schedule and nothing to settle until another message arrives."""
        return len(self._arriving) == len(self._jobs) and not self._flights

    @property
    def done(self) -> tuple[int, int]:
        """Number of scheduled steps, and number of settled steps."""
        return self._steps, self._replayed + self._led

    @property
    def starved(self) -> bool:
        """Whether jobs wait for pages and no running job can free any: KV transfers hold them."""
        return bool(self._waiting) and not (self._running or self._draining)

    @property
    def ahead(self) -> bool:
        """Whether a step may be scheduled while another is not settled."""
        return self._config.ahead > 0

    def submit(self, job: Job, *, lends: bool = False) -> list[Delta]:
        """Queue a job. If the job can never run, or the queue is full, it ends at once with an error delta.

        lends: prefill for another worker: the job's pages are kept after its end, until `give_back`. Raises
        AssertionError for a job with a known id.
        """
        active = self._take_in(job)
        if isinstance(active, Delta):
            return [active]
        active.lends = lends
        if self._below is not None and self._below.awaits(job.id, self._lack(active)):
            self._arriving[job.id] = active
        else:
            self._wait(active)
        return []

    def expect(self, job: Job) -> list[Delta]:
        """Add a job for which a prefill worker computes the prompt: it waits, without blocking later jobs, for
        `open`, and then for `land` or `compute_here`. Otherwise as `submit`."""
        active = self._take_in(job)
        if isinstance(active, Delta):
            return [active]
        self._arriving[job.id] = active
        return []

    def open(self, id: JobId) -> tuple[int, tuple[PageId, ...]] | None:
        """Allocate the pages of an expected job's prompt: returns the number of cached positions, and the pages.
        None if there is no room now. Raises KeyError for a job that is not expected, or has its pages already."""
        job = self._arriving[id]
        if job.pages:
            raise KeyError(id)
        if self._waiting and (self._waiting.again or self._waiting.due().arrival < job.arrival):
            return None  # an older job in the queue waits for pages
        if not self._give_pages(job, self._match(job)):
            return None
        return job.planned, tuple(job.pages)

    def land(self, handed: PrefillDone) -> list[Delta]:
        """The KV transfer of an expected job is complete. Returns a delta with the first token; the job resumes as
        soon as a slot is free. Raises KeyError for a job without pages from `open`."""
        job = self._arriving[handed.job]
        if not job.pages:
            raise KeyError(handed.job)
        del self._arriving[handed.job]
        job.exact = job.exact and handed.exact
        job.drafting = job.drafting and handed.drafting
        job.planned = job.computed = job.prompt
        job.read = job.prompt if job.drafting else 0
        job.cached_tokens = max(job.kept * PAGE_TOKENS, handed.cached_tokens)
        job.counted = True  # by the prefill worker
        job.scored = len(handed.prompt_logprobs)
        tokens, finish = self._accept(job, handed.tokens)
        job.length = job.known
        if finish is None and job.known >= job.limit:
            finish = "length"
        self._landed.append(job)
        if finish is not None:
            self._remember(job)
            self._end(job, finish)
        return [
            Delta(
                job=handed.job,
                tokens=tokens,
                finish=finish,
                queued_s=handed.queued_s,
                cached_tokens=job.cached_tokens,
                logprobs=handed.logprobs[: len(tokens)],
                prompt_logprobs=handed.prompt_logprobs,
                noted=handed.noted,
            )
        ]

    def compute_here(self, id: JobId, brought: Brought | None = None) -> None:
        """No prefill worker computes the prompt of an expected job: release its pages and queue it as any other job.
        Nothing may write to these pages afterwards. brought: note on pages that the prefix cache got from an offload
        tier for this job. Raises KeyError for a job that is not expected."""
        job = self._arriving.pop(id)
        job.brought = brought
        self._unopen(job)
        self._wait(job)

    def attach(self, below: KvTier) -> None:
        """From now on evicted pages are offered to the KV offload tiers, and jobs may wait for pages from there."""
        self._below = below
        self._cache.forgets = below.forgets

    def lack(self, id: JobId) -> Lack | None:
        """The pages of an expected job that the prefix cache does not have; None if the job is no longer expected."""
        job = self._arriving.get(id)
        return None if job is None else self._lack(job)

    def comes_next(self, id: JobId) -> bool:
        """Whether no queued job is older than an expected one. Raises KeyError for a job that is not expected."""
        waiting, job = self._waiting, self._arriving[id]
        return not waiting or not (waiting.again or waiting.due().arrival < job.arrival)

    def fetch(self, id: JobId, count: int) -> Fetch | None:
        """Allocate pages for the first `count` pages that an expected job lacks; None if it has no room to start
        now. The fetch holds them until `fetched`, even if the job ends. Raises KeyError for a job that is not
        expected."""
        job = self._arriving[id]
        if not self.comes_next(id):
            return None  # an older job in the queue waits for pages
        matched = self._match(job)
        if not self._has_room(job, matched):
            return None
        previous = job.hashes[len(matched) - 1] if matched else None
        wanted = range(len(matched), len(matched) + count) if self._cache.log is not None and not job.job.media else ()
        contents = tuple(self._content(job, index) for index in wanted)
        return self._fetches.begin(self._lack(job), count, matched, previous, contents)

    def fetched(self, fetch: Fetch, kept: Sequence[Kept]) -> None:
        """End a fetch: nothing writes to its pages any more. The first len(kept) pages are valid."""
        self._fetches.end(fetch, kept)

    def forget_idle(self) -> None:
        """Evict every page that no job holds."""
        self._cache.evict(self._pool.idle)

    def computed(self, id: JobId) -> Computed | None:
        """Progress of a prefill for another worker; None if nothing of it exists or ever will."""
        job = self._jobs.get(id)
        if job is None:
            return self._lent.get(id)
        return self._computed(job)

    def computing(self, id: JobId) -> tuple[int, int] | None:
        """Positions [first, end) of a job's prompt in the next step to be settled; None if it has none there, or the
        job has ended. Its pages do not change until then."""
        job = self._jobs.get(id)
        if job is None or not job.flights:
            return None
        planned, jobs = self._flights[0]
        for row, of in zip(planned.rows, jobs, strict=True):
            if of is job and row.start is not None:
                return row.start, row.start + row.count
        return None

    def give_back(self, id: JobId) -> None:
        """Release the pages of an ended prefill job: they were transferred, or are no longer wanted. Raises KeyError
        if none are lent."""
        for page in self._lent.pop(id).pages:
            self._cache.release(page, Holder.LENT)

    def _take_in(self, job: Job) -> ActiveJob | Delta:
        assert job.id not in self._jobs, f"job {job.id} is submitted twice"
        reason = refusal(job, max_model_len=self._max_model_len, total_pages=self._pool.total)
        if reason is not None:
            return _error(job.id, reason, "refused")
        waiting = len(self._waiting) + len(self._compiling) + len(self._arriving) + len(self._landed)
        if waiting >= self._config.max_waiting + len(self._free_slots):
            return _error(job.id, f"the queue is full: {waiting} jobs wait; try again later", "overloaded")
        active = ActiveJob(job, self._arrivals, token_limit(job, self._max_model_len))
        self._arrivals += 1
        active.came_at_s = self._beside.spent_s
        if self._clock is not None:
            active.came = self._clock()
        self._jobs[job.id] = active
        grammar = job.sampling.grammar
        if self._hold is not None and grammar is not None and grammar.text:
            active.compiled = self._hold(grammar)  # start now, possibly during the KV transfer of its prompt
        return active

    def _lack(self, job: ActiveJob) -> Lack:
        first, exact = len(self._match(job)), bool(job.generated) and job.exact
        return Lack(first, job.known, tuple(job.hashes[first : job.usable]), exact, self._speculation.follows)

    def _wait(self, job: ActiveJob) -> None:
        job.work = job.known - PAGE_TOKENS * len(self._cache.match(job.hashes[: job.usable]))
        if _is_compiled(job):
            self._waiting.add(job)
        else:
            self._compiling[job.job.id] = job

    def _take_compiled(self) -> None:
        """Queue the jobs with a grammar that is compiled by now."""
        for job in [job for job in self._compiling.values() if _is_compiled(job)]:
            del self._compiling[job.job.id]
            self._waiting.add(job)

    def _unopen(self, job: ActiveJob) -> None:
        """Release the pages of a job that has no slot."""
        for page in job.pages:
            self._cache.release(page)
        job.leave()

    def _computed(self, job: ActiveJob) -> Computed:
        read = job.drafting and job.read >= job.computed
        return Computed(min(job.computed, job.prompt), tuple(job.pages), job.exact, read)

    def report(self, recorded: CapturedShapes) -> None:
        """Set the CUDA graphs that a rank has captured, so that decode steps can replay them."""
        self._recorded.report(recorded)

    def abort(self, id: JobId) -> list[Delta]:
        """End a job now, with one delta. A job that has already ended gives none: the abort crossed its last delta."""
        job = self._jobs.get(id)
        if job is None:
            return []
        self._end(job, "aborted")
        return [Delta(job=id, finish="aborted", cached_tokens=job.cached_tokens)]

    def lose_all(self, reason: str) -> list[Delta]:
        """End every job because the worker is shutting down; each gets an error delta with `reason` and the fault
        "lost"."""
        ended: list[Delta] = []
        for job in list(self._jobs.values()):
            self._end(job, "error")
            ended.append(_error(job.job.id, reason, "lost", job.cached_tokens))
        return ended

    def abort_all(self) -> list[Delta]:
        """End every job that has not ended; each gets one delta with the finish "aborted"."""
        return [delta for id in list(self._jobs) for delta in self.abort(id)]

    def next_step(self) -> Step | None:
        """The next step to launch; None if nothing can be scheduled before another step is settled.

        A step never has two rows of one slot, and a Begin always comes with a row. Decode rows come before all others.
        """
        if len(self._flights) > self._config.ahead:
            return None
        self._take_compiled()
        decoding, prompts = self._ready()
        begins = self._begin_landed(decoding)
        budget = self._config.step_tokens - len(decoding)
        spare = budget // 2 if prompts or (self._waiting and self._free_slots) else budget
        parts: list[_Part] = []
        forced = self._forced(decoding)
        for job in decoding:
            # Suffix matches come in runs: if the last known row had no match, none is expected now.
            drafts = min(max(job.proposed if job.drafting or job.waiting else 0, forced.get(job, 0)), spare)
            if drafts:
                drafts = self._paged(job, job.planned + 1 + job.drafting, drafts)
            parts.append(_Part(job, 1 + drafts, decodes=True))
            spare -= drafts
            budget -= drafts
        budget = self._beside.tokens(budget, decoding, prompts, self._waiting, enter=bool(self._free_slots))
        quick = self._quick(prompts, begins, budget // 2)
        parts += quick
        budget -= sum(part.positions for part in quick)
        first = {part.job for part in quick}
        for job in prompts:
            if not budget:
                break
            if job not in first:
                parts.append(_Part(job, job.next_count(budget), decodes=False))
                budget -= parts[-1].positions
        enough = min(self._config.admit_together, len(self._waiting))
        self._admitting = self._admitting or bool(prompts) or len(self._free_slots) >= enough
        while self._admitting and budget and self._waiting and self._free_slots:
            due = self._waiting.due()
            if begins and self._config.admit_together > 1 and due.known > budget:
                break  # split in two chunks it would take two steps
            begin = self._admit(due)
            if begin is None:
                break
            begins.append(begin)
            job = due
            parts.append(_Part(job, job.next_count(budget), decodes=False))
            budget -= parts[-1].positions
        self._admitting = self._admitting and bool(self._waiting and self._free_slots)
        self._beside.left(budget)
        if not parts:
            # These may hold the missing pages, or wait for their grammars.
            elsewhere = self._arriving or self._lent or self._fetches or self._compiling or self._landed
            assert self._flights or elsewhere or not self._jobs, (
                f"{len(self._jobs)} jobs, and none of them can be scheduled"
            )
            return None
        self._steps += 1
        rows = self._rows(parts)
        step = Step(number=self._steps, begins=tuple(begins), rows=rows, shape=self._shape(parts[: len(decoding)]))
        self._flights.append(_PlannedStep(step, [part.job for part in parts]))
        return step

    def _begin_landed(self, decoding: list[ActiveJob]) -> list[Begin]:
        """Start jobs with a complete KV transfer in the free slots, in the order in which the transfers completed.
        Each gets a decode row in this step, and is added to `decoding`. Preempted jobs go first, unless only the
        landed jobs hold pages."""
        begins: list[Begin] = []
        while self._landed and self._free_slots and not (self._waiting and self._waiting.again and self._running):
            job = next((job for job in self._landed if _is_compiled(job)), None)
            if job is None:
                break
            if min(job.planned + 1 + job.drafting, job.target) > len(job.pages) * PAGE_TOKENS:
                if not self._pool.free + self._pool.idle:
                    break
                job.pages += self._take(1)
            self._landed.remove(job)
            decoding.append(job)
            job.slot = self._free_slots.pop()
            job.sent = len(job.pages)
            self._enter(job)
            begins.append(
                Begin(
                    slot=job.slot,
                    tokens=job.tokens(0, job.known),
                    prompt=job.prompt,
                    pages=tuple(job.pages),
                    sampling=job.job.sampling,
                    limit=job.limit,
                    drafting=job.drafting,
                    computed=job.computed,
                )
            )
        return begins

    def _enter(self, job: ActiveJob) -> None:
        """Add the job to the running ones, after those that first started before it."""
        if job.entry is None:
            self._entries += 1
            job.entry = self._entries
            if self._clock is not None:
                job.queued_s = self._clock() - job.came
        insort(self._running, job, key=lambda one: one.entry or 0)

    def _forced(self, decoding: Sequence[ActiveJob]) -> dict[ActiveJob, int]:
        """Number of draft tokens in the next row, for each job with forced tokens (by its grammar) there."""
        # Draft tokens in flight are counted as accepted; if some are rejected, more tokens are forced than requested
        # here.
        left = {job: job.forced - job.length for job in decoding if job.forced > job.length}
        if not left:
            return left
        depth = self._speculation.forced(len(decoding), list(left.values()), self._recorded.drafts(len(decoding)))
        anyway = max((job.proposed for job in decoding if job.drafting or job.waiting), default=0)
        return {job: min(count, max(depth, anyway)) for job, count in left.items()}

    def _quick(self, prompts: Sequence[ActiveJob], begins: list[Begin], share: int) -> list[_Part]:
        """Rows for prompts with less to compute than the oldest (or the next waiting job), out of `share` tokens of
        the step, shortest first; waiting jobs are started, and added to `begins`. Returns none if jobs are admitted
        in groups: then time to first token does not matter, and the oldest prompt gets the share."""
        parts: list[_Part] = []
        if self._config.admit_together > 1 or not (len(prompts) > 1 or self._waiting):
            return parts
        oldest = prompts[0].known - prompts[0].planned if prompts else self._waiting.due().work
        short = [(job.known - job.planned, job.entry or 0, job) for job in prompts[1:]]
        heapq.heapify(short)
        while share:
            least = short[0][0] if short else oldest
            waiting = self._waiting.quick(min(least, oldest)) if self._waiting and self._free_slots else None
            if waiting is not None:
                begin = self._admit(waiting)
                if begin is None:
                    break
                begins.append(begin)
                job = waiting
            elif least < oldest:
                job = heapq.heappop(short)[2]
            else:
                break
            parts.append(_Part(job, job.next_count(share), decodes=False))
            share -= parts[-1].positions
        return parts

    def _shape(self, decoding: Sequence[_Part]) -> Shape | None:
        """The CUDA graph for these decode rows, once their pages are sent."""
        if not decoding:
            return None
        positions = max(part.positions for part in decoding)
        return self._recorded.choose(len(decoding), positions, PAGE_TOKENS * max(part.job.sent for part in decoding))

    def _ready(self) -> tuple[list[ActiveJob], list[ActiveJob]]:
        """Running jobs that can have a row now: those in decode, each with a page for its next position, and those
        with known tokens to compute (prefill)."""
        decoding: list[ActiveJob] = []
        prompts: list[ActiveJob] = []
        held_back: ActiveJob | None = None  # to be preempted once its steps in flight have settled
        for job in self._running:
            if job is held_back:
                continue
            if not job.decodes:
                if job.planned < job.target:
                    prompts.append(job)
                continue
            if job.room <= 0:
                continue
            # The drafter's row of the next token is at the next position.
            end = min(job.planned + 1 + job.drafting, job.target)
            if end > len(job.pages) * PAGE_TOKENS:
                held_back = self._grow(job)
                if end > len(job.pages) * PAGE_TOKENS:
                    continue
            decoding.append(job)
        return decoding, prompts

    def settle(self, step: Step, result: StepResult, seconds: float | None = None) -> list[Delta]:
        """Apply the result of a step; returns the deltas of its jobs. Rows of jobs that have ended in between are
        dropped.

        seconds: duration of the step on the machine; None: unknown. Raises AssertionError if another step is next.
        """
        flight = self._flights.popleft()
        assert step.number == flight.step.number == result.number, (
            f"step {step.number} is settled with the result of {result.number}; {flight.step.number} is next"
        )
        self._replayed += result.replayed
        self._led += not result.replayed
        positions = sum(row.count for row in step.rows)
        self._step_sizes[bisect_left(STEP_SIZES, positions)] += 1
        self._step_positions += positions
        deltas, delivered = self._notes(), 0
        drafts_ms = None if seconds is None else self._speculation.predicted_ms(step, result)
        for job, row, outcome in zip(flight.jobs, flight.step.rows, result.rows, strict=True):
            job.flights -= 1
            job.slack -= row.drafts
            if job.finish is None:
                if drafts_ms is not None and seconds is not None and outcome.proposed:
                    job.rounds = job.rounds or Rounds()
                    job.rounds.add(seconds, *drafts_ms)
                delta = self._settle_row(job, row, outcome)
                if delta is not None:
                    deltas.append(delta)
                    delivered += len(delta.tokens) if row.start is None else 0
            elif not job.flights:
                self._draining.remove(job)
                self._release(job)
        if seconds is not None:
            self._beside.spent_s += seconds
            self._speculation.took(step, result, seconds)
            self._timed.took(step, flight.jobs, result, seconds, delivered)
            if self._below is not None:
                self._below.took(step, seconds)
        return deltas

    def cached(self, *, whole: bool = False) -> Cached | None:
        """The next `Cached` message: changes of the prefix cache since the last call; its complete content on the
        first call and with `whole`. None if nothing has changed."""
        whole = whole or not self._cached_told
        stored, removed = self._cache.changes(whole=whole)
        if not (stored or removed or whole):
            return None
        self._cached_told += 1
        return Cached(number=self._cached_told, stored=tuple(stored), removed=tuple(removed), whole=whole)

    def log_pages(self) -> None:
        """From now on record insertions into the prefix cache and evictions, for `page_changes`."""
        self._cache.log = []

    def page_changes(self) -> list[Changed]:
        """Insertions and evictions since the last call, in order, with the content of the pages. Pages of prompts
        with images are omitted. Empty if `log_pages` was not called."""
        changes = self._cache.log
        if not changes:
            return []
        self._cache.log = []
        return changes

    def load(self) -> Load:
        """Counters and gauges. Used, cached (held only by the prefix cache) and free pages add up to the total."""
        return Load(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._compiling),
            pages_used=self._pool.used,
            pages_cached=self._pool.idle,
            pages_total=self._pool.total,
            steps=self._steps,
            replayed=self._replayed,
            led=self._led,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
            generation_tokens=self._generation_tokens,
            drafts=self._speculation.drafts,
            draft_tokens=self._speculation.draft_tokens,
            accepted_tokens=self._speculation.accepted_tokens,
            suffix_draft_tokens=self._speculation.suffix_draft_tokens,
            suffix_accepted_tokens=self._speculation.suffix_accepted_tokens,
            grammar_draft_tokens=self._speculation.grammar_draft_tokens,
            grammar_accepted_tokens=self._speculation.grammar_accepted_tokens,
            accepted_per_pos=tuple(self._speculation.accepted_per_pos),
            step_sizes=tuple(self._step_sizes),
            step_positions=self._step_positions,
            bounded=self._beside.bounded,
            timed=self._timed.newest,
            step_times=self._timed.sums,
        )

    def check(self) -> None:
        """Raises AssertionError unless every page and slot is accounted for, and the scheduling order is kept."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[None]:
        """Like `check`, a slice of pages between two yields, for a caller with other work to do. Nothing may change
        until it is exhausted; after a change, start again."""
        expected = [*self._arriving.values(), *self._landed]
        holding = [*self._running, *self._draining]
        yield from self._pool.checks(
            {
                Holder.CACHE: self._cache.pages(),
                Holder.JOBS: [page for job in (*holding, *expected) for page in job.pages],
                Holder.LENT: [page for lent in self._lent.values() for page in lent.pages],
                Holder.FETCHES: self._fetches.held(),
            }
        )
        yield from self._cache.checks()
        slots = sorted([*self._free_slots, *(job.slot for job in holding if job.slot is not None)])
        assert slots == list(range(self._config.max_running)), f"slots {slots} are free or taken"
        flights = [job for flight in self._flights for job in flight.jobs]
        for job in {*holding, *flights, *self._waiting}:
            assert job.flights == flights.count(job), f"job {job.job.id}: {job.flights} steps in flight counted"
        for job in self._running:
            self._check_lengths(job)
        assert all(job.finish and job.flights for job in self._draining), "a drained job still holds its pages"
        assert all(job.passed <= job.work for job in self._jobs.values()), (
            "too many positions were started before a waiting job"
        )
        queued = [*self._waiting, *self._compiling.values()]
        assert not any(job.pages or job.slot is not None for job in queued), "a waiting job holds pages"
        assert not any(job.slot is not None or job.flights for job in expected), "an expected job is already running"
        alive = [*self._running, *queued, *expected]
        assert {job.job.id: job for job in alive} == self._jobs, "a job is neither running nor waiting nor expected"
        for those in (self._running, self._waiting.again):
            entries = [job.entry or 0 for job in those]
            assert entries == sorted(entries), f"jobs are not in the order of their start: {entries}"

    def _check_lengths(self, job: ActiveJob) -> None:
        """Raises AssertionError unless the planned positions of a running job are settled or in flight, and have
        pages."""
        rows = [
            row for flight in self._flights for of, row in zip(flight.jobs, flight.step.rows, strict=True) if of is job
        ]
        name, decoding = f"job {job.job.id}", [row for row in rows if row.start is None]
        drafts, new = sum(row.drafts for row in rows), sum(1 for row in rows if row.samples)
        assert job.slack == drafts, f"{name}: {job.slack} drafts counted, {drafts} are in flight"
        assert job.length == job.known + new + drafts, f"{name}: {job.length} tokens counted; {job.known} are known"
        assert job.planned == job.computed + sum(row.count for row in rows), f"{name}: {job.planned} positions planned"
        assert not decoding or job.decodes, f"{name} decodes with known tokens that are not computed"
        assert job.sent <= len(job.pages), f"{name}: {job.sent} of {len(job.pages)} pages are sent"
        assert min(job.planned, job.target) <= job.sent * PAGE_TOKENS, f"{name}: planned beyond its pages"
        assert job.read <= job.computed, f"{name}: the drafter has read positions that are not computed"

    def _rows(self, parts: Sequence[_Part]) -> tuple[Row, ...]:
        """Schedule these rows. The draft tokens proposed fit into the next step."""
        sampling = [part.samples for part in parts]
        jobs = [part.job for part in itertools.compress(parts, sampling)]
        lengths = iter(self._speculation.lengths(jobs, self._recorded.drafts(len(jobs))))
        spare, follows = self._config.step_tokens - len(self._running), self._speculation.follows
        rows: list[Row] = []
        for part, samples in zip(parts, sampling, strict=True):
            job = part.job
            job.drafting = job.drafting and follows
            propose = min(next(lengths), spare) if samples else 0
            if propose or (samples and job.drafting):
                # The drafter's row of the token that this row samples is at the next position.
                propose = min(propose, self._paged(job, job.planned + part.positions, max(1, propose)))
                spare -= propose
            rows.append(self._row(part, samples, propose))
        return tuple(rows)

    def _row(self, part: _Part, samples: bool, propose: int) -> Row:
        job, count, decodes = part
        drafts = count - 1 if decodes else 0
        start, end = job.planned, job.planned + count
        job.planned = end
        if samples:
            job.length += 1 + drafts
        job.slack += drafts
        job.flights += 1
        job.proposed = propose
        slot = job.slot
        assert slot is not None
        new_pages: tuple[PageId, ...] = ()
        end = min(end + max(propose, samples and job.drafting), job.target)
        if end > job.sent * PAGE_TOKENS:
            needed = min(pages_for(end), len(job.pages))
            new_pages = tuple(job.pages[job.sent : needed])
            job.sent = needed
        return Row(
            slot=slot,
            start=None if decodes else start,
            count=count,
            drafts=drafts,
            propose=propose,
            drafting=job.drafting,
            new_pages=new_pages,
            samples=samples,
        )

    def _paged(self, job: ActiveJob, end: int, extra: int) -> int:
        """How many of `extra` positions after [0, end), which has pages, can have pages too. Allocates free or idle
        pages; no job is preempted for a draft token."""
        if end + extra <= len(job.pages) * PAGE_TOKENS:  # the usual case
            return extra
        wanted = min(end + extra, job.target)
        while wanted > len(job.pages) * PAGE_TOKENS and self._pool.free + self._pool.idle:
            job.pages += self._take(1)
        paged = len(job.pages) * PAGE_TOKENS
        return extra if wanted <= paged else max(0, paged - end)

    def _grow(self, job: ActiveJob) -> ActiveJob | None:
        """Give the job one more page. If no page is available, preempt the running job that started last, possibly
        this one; if that job has steps in flight, it is returned instead, to be held back until they have settled."""
        while not self._pool.free + self._pool.idle:
            victim = self._running[-1]
            if victim.flights:
                return victim
            self._preempt(victim, job)
            if victim is job:
                return None
        job.pages += self._take(1)
        return None

    def _take(self, count: int) -> list[PageId]:
        self._cache.evict(max(0, count - self._pool.free))
        return self._pool.take(count)

    def _admit(self, job: ActiveJob) -> Begin | None:
        """Give a waiting job slot and pages; None if there is no room, or if waiting pays."""
        matched = self._match(job)
        if self._is_coming(job, len(matched)):
            return None
        if not self._give_pages(job, matched):
            return None
        job.slot = self._free_slots.pop()
        if not job.counted:
            job.cached_tokens = job.planned
        self._waiting.begins(job)
        self._enter(job)
        if job.pause is not None:
            job.pause.ends(job.planned)
        if not job.counted:
            job.counted = True
            self._prompt_tokens += job.prompt
            self._prompt_tokens_cached += job.planned
        return Begin(
            slot=job.slot,
            tokens=job.tokens(0, job.known),
            prompt=job.prompt,
            pages=tuple(matched),
            sampling=job.job.sampling,
            limit=job.limit + job.lends,  # the drafter's row of the first token is transferred to the other worker
            drafting=job.drafting,
        )

    def _give_pages(self, job: ActiveJob, matched: list[PageId]) -> bool:
        """Give a job these cached pages and new pages after them. False, without a change, if there is no room."""
        if not self._has_room(job, matched):
            return False
        self._cache.use(matched, of_tokens=job.known)
        job.pages = matched + self._take(pages_for(job.known) - len(matched))
        job.sent = job.kept = len(matched)
        job.planned = job.computed = len(matched) * PAGE_TOKENS
        job.drafting = self._speculation.follows and all(self._cache.is_drafted(page) for page in matched)
        job.read = job.computed if job.drafting else 0
        if not job.generated:
            job.exact = all(self._cache.is_exact(page) for page in matched)
        return True

    def _has_room(self, job: ActiveJob, matched: Sequence[PageId]) -> bool:
        """Whether there are pages for the positions that a job has to compute after these cached pages."""
        return not self._short_pages(job, matched)

    def _short_pages(self, job: ActiveJob, matched: Sequence[PageId]) -> int:
        """Number of missing pages for the positions that a job has to compute after these cached pages."""
        need = pages_for(job.known) - len(matched)
        matched_idle = sum(1 for page in matched if self._pool.is_idle(page))
        free, idle = self._pool.free, self._pool.idle
        return short_pages(need=need, matched_idle=matched_idle, free=free, idle=idle, running=len(self._running))

    def _match(self, job: ActiveJob) -> list[PageId]:
        """Cached pages that the job can start from. Its last token is always computed, because its row samples.

        Only pages of the prompt are taken from the cache: a resumed job must get the same results as before, and only
        recomputing the positions of the answer in the same form guarantees the same bits. For the same reason it takes
        pages that are not bit-equal to a prefill only if it started from such pages.

        With pages that the learned drafter has not read, the job cannot use the drafter. If one step is enough to
        recompute them, they are recomputed, and the cache then keeps the new pages.
        """
        hashes, exact = job.hashes[: job.usable], bool(job.generated) and job.exact
        matched = self._cache.match(hashes, exact=exact)
        if self._speculation.follows:
            drafted = self._cache.match(hashes, exact=exact, drafted=True)
            if (len(matched) - len(drafted)) * PAGE_TOKENS <= self._config.step_tokens:
                return drafted
        return matched

    def _is_coming(self, job: ActiveJob, index: int) -> bool:
        """Whether a running job is computing page `index` of this job's prompt: then this job waits, and shares the
        page.

        So the n choices of one request, and requests with a common prefix that arrive together, compute the prefix
        once; all but the first start from its last full page. The wait is finite: the older job settles the page and it
        is cached, or the job ends. Later jobs lose nothing: fewer positions are computed before theirs.

        If jobs are admitted in groups, the aim is fewer steps with prefill: a job waits only for WORTH_A_STEP pages or
        more.
        """
        last = index if self._config.admit_together == 1 else index + WORTH_A_STEP - 1
        if last >= job.usable:
            return False
        hash, exact = job.hashes[last], bool(job.generated) and job.exact
        return any(
            other.kept <= index
            and last < len(other.job.pages)
            and other.hashes[last] == hash
            and (other.exact or not exact)
            and (other.drafting or not self._speculation.follows)
            for other in self._running
        )

    def _preempt(self, job: ActiveJob, by: ActiveJob) -> None:
        """Preempt a running job. by: the job that needs the page."""
        assert self._running.pop() is job, f"job {job.job.id} is not the youngest"
        lost = job.computed
        self._release(job)
        job.leave()
        self._waiting.put_back(job)
        self._preemptions += 1
        job.pause = Pause(lost, self._clock)
        matched = self._match(job)
        note = Preempted(
            by=by.job.id,
            running=len(self._running),
            pages=self._pool.total,
            lost_tokens=lost,
            again_tokens=max(0, lost - PAGE_TOKENS * len(matched)),
            short_pages=self._short_pages(job, matched),
        )
        self._untold.append(Delta(job=job.job.id, cached_tokens=job.cached_tokens, noted=(note,)))

    def _notes(self) -> list[Delta]:
        """Deltas with the notes of preempted jobs that have not ended since."""
        notes, self._untold = self._untold, []
        return [delta for delta in notes if delta.job in self._jobs]

    def _release(self, job: ActiveJob) -> None:
        """Release slot and pages of a job without steps in flight."""
        assert not job.flights, f"job {job.job.id} releases its pages with {job.flights} steps in flight"
        assert job.slot is not None
        for page in job.pages:
            self._cache.release(page)
        self._free_slots.append(job.slot)

    def _settle_row(self, job: ActiveJob, row: Row, outcome: RowResult) -> Delta | None:
        if outcome.error is not None and not self._completes(job, outcome.tokens):
            self._end(job, "error")
            fault: Fault = "refused" if outcome.refused else "failed"
            return _error(job.job.id, outcome.error, fault, job.cached_tokens)
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if row.start is None:
            rejected = row.count - len(outcome.tokens)
            job.planned -= rejected
            job.length -= rejected
            job.computed += len(outcome.tokens)
            self._speculation.settled(outcome)
            job.waiting = outcome.waiting != 0
        else:
            job.computed = row.start + row.count
            # A resumed job has sent some already.
            prompt_logprobs = outcome.prompt_logprobs[max(0, job.scored - row.start) :]
            job.scored += len(prompt_logprobs)
        computed = job.computed
        if row.drafting:
            job.read = computed
        tokens, finish = self._accept(job, outcome.tokens)
        job.forced = min(job.known + outcome.forced, job.limit - 1)  # the last token is never a draft token
        if computed >= (job.kept + 1) * PAGE_TOKENS:
            self._remember(job)
        at_limit = computed >= job.prompt and job.known >= job.limit
        if finish is None and (at_limit or (row.start is None and not tokens)):
            finish = "length"
        if not tokens and finish is None and not prompt_logprobs:
            return None
        noted = job.noted(tokens, finish)
        if finish is not None:
            self._end(job, finish)
        return Delta(
            job=job.job.id,
            tokens=tokens,
            finish=finish,
            queued_s=job.queued_s if tokens and len(tokens) == len(job.generated) - len(job.job.answer) else None,
            cached_tokens=job.cached_tokens,
            logprobs=outcome.logprobs[: len(tokens)],
            prompt_logprobs=prompt_logprobs,
            proposed=outcome.proposed,
            accepted=outcome.accepted,
            by=outcome.by,
            noted=noted,
        )

    def _completes(self, job: ActiveJob, tokens: Sequence[int]) -> bool:
        """Whether the answer ends with these tokens: then an error of its grammar after them (it took too long) is
        ignored, because it delays no other job."""
        return bool(tokens) and (job.known + len(tokens) >= job.limit or not job.stop_ids.isdisjoint(tokens))

    def _accept(self, job: ActiveJob, tokens: Sequence[int]) -> tuple[tuple[int, ...], Finish | None]:
        """Append new tokens up to the limit or to a stop id, which is the last token."""
        accepted = tuple(tokens[: job.limit - job.known])
        finish: Finish | None = None
        if not job.stop_ids.isdisjoint(accepted):
            first = next(n for n, token in enumerate(accepted, 1) if token in job.stop_ids)
            accepted, finish = accepted[:first], "stop"
        job.generated += accepted
        self._generation_tokens += len(accepted)
        return accepted, finish

    def _remember(self, job: ActiveJob) -> None:
        """Insert every page that has become full into the prefix cache."""
        full = min(job.computed, job.known) // PAGE_TOKENS
        hashes = job.hashes
        for index in range(job.kept, full):
            previous = hashes[index - 1] if index else None
            end = (index + 1) * PAGE_TOKENS
            if index == len(hashes):
                if not job.hashable:
                    return
                hashes.append(self._hash_page(previous, job.tokens(end - PAGE_TOKENS, end)))
            exact, drafted = job.exact and end <= job.prompt, end <= job.read
            content = self._content(job, index) if self._cache.log is not None and not job.job.media else None
            self._cache.insert(hashes[index], job.pages[index], previous, exact=exact, drafted=drafted, content=content)
            job.kept = index + 1

    def _content(self, job: ActiveJob, index: int) -> Content:
        """Content of page `index` of a job."""
        return Content(job.tokens(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS), job.job.salt)

    def _end(self, job: ActiveJob, finish: Finish) -> None:
        """End the job. Its slot and pages are released now, or when its last step in flight is settled."""
        job.finish = finish
        job.compiled = None
        del self._jobs[job.job.id]
        if job.lends and finish in ("stop", "length"):
            lent = self._computed(job)._replace(pages=tuple(job.pages[: pages_for(job.prompt)]))
            self._lent[job.job.id] = lent
            for page in lent.pages:
                self._pool.share(page, Holder.LENT)
        if job.slot is None:
            if job.job.id in self._arriving:
                del self._arriving[job.job.id]
                self._unopen(job)
            elif job in self._landed:
                self._landed.remove(job)
                self._unopen(job)
            elif self._compiling.pop(job.job.id, None) is None:
                self._waiting.remove(job)
            return
        self._running.remove(job)
        if job.flights:
            self._draining.add(job)
        else:
            self._release(job)


def _is_compiled(job: ActiveJob) -> bool:
    return job.compiled is None or job.compiled()


def _error(id: JobId, reason: str, fault: Fault, cached_tokens: int = 0) -> Delta:
    return Delta(job=id, finish="error", cached_tokens=cached_tokens, error=reason, fault=fault)
