"""Decides what runs next. Holds no tensor.

A step is planned from what has been launched, not from what has been settled: a row continues where the last one will
have ended, and drafts in flight count as if they held. What only a result can tell is learnt late: after a stop id or
an error, the rows that were launched meanwhile are dropped when they settle; what rejected drafts were counted for is
taken back.

No job starves. Jobs are admitted in turns (`queue`); every step gives one row to each running job that generates. What
is left of the budget goes to prompts and to drafts, which leave half of it to the prompts. Where a step's time is
bounded, prompts beside answers get less of it, but never nothing (`beside`). Of what prompts get, half may go to those
that have less to compute than the oldest, and the rest goes to the oldest first. There are at least as many tokens in a
step as there are slots, so the oldest always gets something. When pages run out, the running job that began last is
pre-empted and waits in front of all others. So the oldest job always advances, and every job becomes the oldest.

Where throughput counts and nobody waits for a first token, waiting jobs are admitted several at once
(`admit_together`), each prompt whole where it fits: fewer steps have prompts.
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
from redline.plan.active import ActiveJob, pages_for
from redline.plan.admit import refusal, short_pages, token_limit
from redline.plan.below import Below, Fetch, Fetches, Kept, Lack
from redline.plan.beside import Beside, Forecast
from redline.plan.notes import Pause, Rounds
from redline.plan.pages import Holder, PagePool
from redline.plan.prefix import Changed, Content, PrefixCache
from redline.plan.queue import Queue
from redline.plan.recorded import RecordedShapes
from redline.plan.speculation import Speculation
from redline.plan.timed import TimedSteps
from redline.tune.costs import StepCosts
from redline.tune.floor import StepFloor
from redline.wire.delta import Brought, Delta, Fault, Finish, Preempted
from redline.wire.handoff import Handed
from redline.wire.job import PAGE_TOKENS, Grammar, Job, JobId, PageHash, PageId
from redline.wire.news import STEP_SIZES, Cached, Load, TimedStep
from redline.wire.step import Begin, Recorded, Row, RowResult, Shape, Step, StepResult, TokenLogprobs

HashPage = Callable[[PageHash | None, tuple[int, ...]], PageHash]
"""A page's hash from the hash before it (None: the first page, of a job without salt) and its PAGE_TOKENS tokens."""

Hold = Callable[[Grammar], Callable[[], bool]]
"""Starts to compile a grammar. The result tells whether it is compiled, so that no step waits for it; as long as it is
referenced, the grammar is not forgotten."""


WORTH_A_STEP = 8  # pages that two prompts share, for which a step is made instead of computing them twice
MOST_STEP_TOKENS = 1 << 16  # the log probabilities of so many prompt tokens, with 20 alternatives each, are 23 MB


@dataclass(frozen=True)
class PlanConfig:
    """What bounds a planner's steps and queues. Raises ConfigError when the numbers cannot work together."""

    step_tokens: int = 512  # positions computed in one step, at most
    step_ms: float | None = None  # that a step may take with prompts beside answers, by prediction; None: what it does
    max_running: int = 64  # jobs at once, each in a slot
    max_waiting: int = 1024  # jobs beyond those that free slots can take
    admit_together: int = 1  # waiting jobs are admitted once so many slots are free, or as many as jobs wait
    ahead: int = 1  # steps that may be unsettled while the next is planned
    draft_tokens: int = 0  # drafts of one row, at most; 0: no speculation
    learned: bool = False  # a learned drafter is loaded; otherwise drafts are suffix matches

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.step_tokens:
            raise ConfigError(
                f"max_running is {self.max_running} and step_tokens {self.step_tokens}: "
                "a step needs a token for each running job"
            )
        if self.step_tokens > MOST_STEP_TOKENS:
            raise ConfigError(f"step_tokens is {self.step_tokens:,}; a step computes {MOST_STEP_TOKENS:,} at most")
        if not 1 <= self.admit_together <= self.max_running:
            raise ConfigError(
                f"admit_together is {self.admit_together}; expected 1 to max_running, which is {self.max_running}"
            )
        if self.step_ms is not None and not 0 < self.step_ms < math.inf:
            raise ConfigError(f"step_ms is {self.step_ms:g}; expected milliseconds that a step may take, more than 0")
        if self.max_waiting < 0 or self.ahead < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting} and ahead {self.ahead}: neither can be negative")
        if not 0 <= self.draft_tokens <= PAGE_TOKENS:
            raise ConfigError(f"draft_tokens is {self.draft_tokens}; a row drafts between 0 and {PAGE_TOKENS} tokens")


class _Part(NamedTuple):
    """A row that is being planned: the next positions of a job. In a decode row all but the first are drafts."""

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
    """How far the prompt of a job is whose pages are for another worker."""

    positions: int  # [0, positions) are computed
    pages: tuple[PageId, ...]
    exact: bool  # they are those of a prefill, to the bit
    drafting: bool  # the drafter has read all of them


class Planner:
    """Owns pages, slots and queues of one worker.

    Steps are settled in the order in which they were planned. `submit`, `abort` and `settle` give what the clients must
    be told; a job's last delta, and no other, has a finish.
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
        """pages: how many there are. max_model_len: tokens of one job, prompt and answer.

        costs: of steps on this machine; None: nothing was measured, and rows draft as much as they may. clock: tells
        seconds, by which it is told how long jobs waited, and nothing else; None: that is not told.
        """
        self._config = config
        self._clock = clock
        self._max_model_len = max_model_len
        self._hash_page = hash_page
        self._pool = PagePool(pages)
        self._cache = PrefixCache(self._pool)
        self._below: Below | None = None
        self._fetches = Fetches(self._pool, self._cache)
        self._recorded = RecordedShapes()
        self._speculation = Speculation(config.draft_tokens, config.learned, costs or StepCosts())
        self._jobs: dict[JobId, ActiveJob] = {}  # all that have not ended
        self._waiting = Queue()
        self._hold: Hold | None = None
        self._compiling: dict[JobId, ActiveJob] = {}  # that would wait, and whose grammar is not compiled
        self._running: list[ActiveJob] = []  # in the order in which they first began
        self._arriving: dict[JobId, ActiveJob] = {}  # whose prompt is computed elsewhere
        self._landed: deque[ActiveJob] = deque()  # of those, which are whole and have no slot yet
        self._lent: dict[JobId, Computed] = {}  # of jobs that have ended, and whose pages are still to be handed over
        self._draining: set[ActiveJob] = set()  # ended, with steps in flight: they still hold slot and pages
        self._flights: deque[_PlannedStep] = deque()
        self._free_slots = list(reversed(range(config.max_running)))
        self._admitting = False  # until nobody waits or no slot is free
        self._arrivals = 0
        self._entries = 0
        self._steps = 0
        self._replayed = 0
        self._led = 0
        self._step_sizes = [0] * (len(STEP_SIZES) + 1)
        self._step_positions = 0
        self._timed = TimedSteps(clock)
        self._beside = Beside(config.step_ms)
        self._cached_told = 0  # how often
        self._preemptions = 0
        self._untold: list[Delta] = []  # notes of jobs that have lost their pages
        self._prompt_tokens = 0
        self._prompt_tokens_cached = 0
        self._generation_tokens = 0

    def stand_beside(self, floor: StepFloor) -> None:
        """From now on steps that are timed are added up beside the least that they can take."""
        self._timed.floor = floor

    def watch_steps(self, watch: Callable[[TimedStep, float, int], object]) -> None:
        """From now on every step is timed, and `watch` is called as `TimedSteps` has it, in the loop's thread."""
        self._timed.watch = watch

    def foresee(self, forecast: Forecast) -> None:
        """From now on steps with prompts beside answers are bounded by the config's `step_ms`, as far as a forecast
        tells. It is told of steps that are timed."""
        self._beside.forecast = forecast
        self._timed.hears = forecast.took

    def compile_with(self, hold: Hold) -> None:
        """From now on a job takes part in steps once its grammar is compiled. It holds the grammar until it ends."""
        self._hold = hold

    @property
    def compiling(self) -> bool:
        """Whether jobs may wait for their grammars."""
        return bool(self._compiling or self._landed)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to plan and nothing to settle, nor will be without another message."""
        return len(self._arriving) == len(self._jobs) and not self._flights

    @property
    def done(self) -> tuple[int, int]:
        """Steps that were planned, and those that have settled."""
        return self._steps, self._replayed + self._led

    @property
    def starved(self) -> bool:
        """Whether jobs wait for pages, and none runs whose end would bring them: handoffs have them."""
        return bool(self._waiting) and not (self._running or self._draining)

    @property
    def ahead(self) -> bool:
        """Whether a step may be planned while another is not settled."""
        return self._config.ahead > 0

    def submit(self, job: Job, *, lends: bool = False) -> list[Delta]:
        """Queues a job. One that can never run, or finds the queue full, ends at once with an error delta.

        lends: its pages are for another worker: they stay, when it has ended, until `give_back`. Raises AssertionError
        for a job whose id is here already.
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
        """Takes in a job whose prompt is computed elsewhere: it waits, and nobody behind it, for `open`, and then for
        `land` or `compute_here`. Else as `submit`."""
        active = self._take_in(job)
        if isinstance(active, Delta):
            return [active]
        self._arriving[job.id] = active
        return []

    def open(self, id: JobId) -> tuple[int, tuple[PageId, ...]] | None:
        """Gives an expected job the pages of its prompt: how many positions of them are cached, and the pages. None
        where there is no room for it now. Raises KeyError for a job that is not expected, or has its pages."""
        job = self._arriving[id]
        if job.pages:
            raise KeyError(id)
        if self._waiting and (self._waiting.again or self._waiting.due().arrival < job.arrival):
            return None  # who waits for pages here waits for these
        if not self._give_pages(job, self._match(job)):
            return None
        return job.planned, tuple(job.pages)

    def land(self, handed: Handed) -> list[Delta]:
        """All pages of an expected job are there, and the first token of its answer, which is told now; it goes on from
        there as soon as a slot is free. Raises KeyError for a job that has no pages of `open`."""
        job = self._arriving[handed.job]
        if not job.pages:
            raise KeyError(handed.job)
        del self._arriving[handed.job]
        job.exact = job.exact and handed.exact
        job.drafting = job.drafting and handed.drafting
        job.planned = job.computed = job.prompt
        job.read = job.prompt if job.drafting else 0
        job.cached_tokens = max(job.kept * PAGE_TOKENS, handed.cached_tokens)
        job.counted = True  # by whoever has computed it
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
        """Nobody computes the prompt of an expected job: it is queued as any other. Its pages are given back; nobody
        may write into them any more. brought: what the cache has got for it from below. Raises KeyError for a job that
        is not expected."""
        job = self._arriving.pop(id)
        job.brought = brought
        self._unopen(job)
        self._wait(job)

    def attach(self, below: Below) -> None:
        """From now on pages that the cache forgets go to memory below it, and jobs may wait for pages from there."""
        self._below = below
        self._cache.forgets = below.forgets

    def lack(self, id: JobId) -> Lack | None:
        """What an expected job could begin from and the cache has not; None where it is expected no more."""
        job = self._arriving.get(id)
        return None if job is None else self._lack(job)

    def comes_next(self, id: JobId) -> bool:
        """Whether no job waits that came before an expected one. Raises KeyError for one that is not expected."""
        waiting, job = self._waiting, self._arriving[id]
        return not waiting or not (waiting.again or waiting.due().arrival < job.arrival)

    def fetch(self, id: JobId, count: int) -> Fetch | None:
        """Takes pages for the first `count` that an expected job lacks; None where it has no room to begin now. They
        are the fetch's until `fetched`, whatever becomes of the job. Raises KeyError for one that is not expected."""
        job = self._arriving[id]
        if not self.comes_next(id):
            return None  # who waits for pages here waits for these
        matched = self._match(job)
        if not self._has_room(job, matched):
            return None
        previous = job.hashes[len(matched) - 1] if matched else None
        wanted = range(len(matched), len(matched) + count) if self._cache.log is not None and not job.job.media else ()
        contents = tuple(self._content(job, index) for index in wanted)
        return self._fetches.begin(self._lack(job), count, matched, previous, contents)

    def fetched(self, fetch: Fetch, kept: Sequence[Kept]) -> None:
        """Nothing writes to the pages of a fetch any more. So many as `kept` tells of, from the first on, are whole."""
        self._fetches.end(fetch, kept)

    def forget_idle(self) -> None:
        """The cache forgets every page that no job holds."""
        self._cache.evict(self._pool.idle)

    def computed(self, id: JobId) -> Computed | None:
        """How far a job is that lends its pages; None where nothing of it is there, nor will be."""
        job = self._jobs.get(id)
        if job is None:
            return self._lent.get(id)
        return self._computed(job)

    def computing(self, id: JobId) -> tuple[int, int] | None:
        """Positions [first, end) of a job's prompt that the step computes which is to be settled next; None where it
        has none of them, or the job has ended. Its pages stay where they are until then."""
        job = self._jobs.get(id)
        if job is None or not job.flights:
            return None
        planned, jobs = self._flights[0]
        for row, of in zip(planned.rows, jobs, strict=True):
            if of is job and row.start is not None:
                return row.start, row.start + row.count
        return None

    def give_back(self, id: JobId) -> None:
        """The pages of a job that has ended are handed over, or wanted no more. Raises KeyError where none are lent."""
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
            active.compiled = self._hold(grammar)  # begins now, while its prompt may still be on its way
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
        """Jobs whose grammar is compiled by now wait for a slot as all others do."""
        for job in [job for job in self._compiling.values() if _is_compiled(job)]:
            del self._compiling[job.job.id]
            self._waiting.add(job)

    def _unopen(self, job: ActiveJob) -> None:
        """Gives back the pages of a job that has no slot."""
        for page in job.pages:
            self._cache.release(page)
        job.leave()

    def _computed(self, job: ActiveJob) -> Computed:
        read = job.drafting and job.read >= job.computed
        return Computed(min(job.computed, job.prompt), tuple(job.pages), job.exact, read)

    def report(self, recorded: Recorded) -> None:
        """Takes in which shapes of decode steps can be replayed from now on."""
        self._recorded.report(recorded)

    def abort(self, id: JobId) -> list[Delta]:
        """Ends a job now, with one delta. One that has ended already is no mistake, and gives none: the message crossed
        its last delta."""
        job = self._jobs.get(id)
        if job is None:
            return []
        self._end(job, "aborted")
        return [Delta(job=id, finish="aborted", cached_tokens=job.cached_tokens)]

    def lose_all(self, reason: str) -> list[Delta]:
        """Ends every job because the worker ends; each has an error delta with `reason` and the fault "lost"."""
        ended: list[Delta] = []
        for job in list(self._jobs.values()):
            self._end(job, "error")
            ended.append(_error(job.job.id, reason, "lost", job.cached_tokens))
        return ended

    def abort_all(self) -> list[Delta]:
        """Ends every job that has not ended; each has one delta, whose finish is "aborted"."""
        return [delta for id in list(self._jobs) for delta in self.abort(id)]

    def next_step(self) -> Step | None:
        """The next step to launch; None when nothing can be planned before another step is settled.

        A step never has two rows of one slot, and a Begin always comes with a row. Decode rows stand before all others.
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
            # Matches of the text's own past come in runs: where the last row that is known had none, none is awaited.
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
                break  # in two parts it would cost two steps
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
            # They may have the pages that are missing, or wait for their grammars.
            elsewhere = self._arriving or self._lent or self._fetches or self._compiling or self._landed
            assert self._flights or elsewhere or not self._jobs, f"{len(self._jobs)} jobs, and none of them can go on"
            return None
        self._steps += 1
        rows = self._rows(parts)
        step = Step(number=self._steps, begins=tuple(begins), rows=rows, shape=self._shape(parts[: len(decoding)]))
        self._flights.append(_PlannedStep(step, [part.job for part in parts]))
        return step

    def _begin_landed(self, decoding: list[ActiveJob]) -> list[Begin]:
        """Jobs whose prompt was computed elsewhere take the free slots, in the order in which they became whole. Each
        has a decode row in this step, and is added to `decoding`: its prompt is there. Those that have lost their pages
        come first, unless it is the landed ones that have them."""
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
        """The job runs, behind those that first began before it."""
        if job.entry is None:
            self._entries += 1
            job.entry = self._entries
            if self._clock is not None:
                job.queued_s = self._clock() - job.came
        insort(self._running, job, key=lambda one: one.entry or 0)

    def _forced(self, decoding: Sequence[ActiveJob]) -> dict[ActiveJob, int]:
        """How many drafts the next rows of jobs verify whose grammar is known to force tokens there."""
        # Drafts in flight count as if they held: where they do not, more is forced than is asked for here.
        left = {job: job.forced - job.length for job in decoding if job.forced > job.length}
        if not left:
            return left
        depth = self._speculation.forced(len(decoding), list(left.values()), self._recorded.drafts(len(decoding)))
        anyway = max((job.proposed for job in decoding if job.drafting or job.waiting), default=0)
        return {job: min(count, max(depth, anyway)) for job, count in left.items()}

    def _quick(self, prompts: Sequence[ActiveJob], begins: list[Begin], share: int) -> list[_Part]:
        """Prompts with less to compute than the oldest has, or the one whose turn it is, get this share of the step,
        those with least first; waiting ones begin, and are added to `begins`. Where jobs are admitted together nobody
        waits for a first token, and the share stays with the oldest."""
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
        """What these decode rows replay, once their pages are sent."""
        if not decoding:
            return None
        positions = max(part.positions for part in decoding)
        return self._recorded.choose(len(decoding), positions, PAGE_TOKENS * max(part.job.sent for part in decoding))

    def _ready(self) -> tuple[list[ActiveJob], list[ActiveJob]]:
        """Running jobs that can have a row now: those that decode, each with a page for its next position, and those
        that have known tokens to compute."""
        decoding: list[ActiveJob] = []
        prompts: list[ActiveJob] = []
        held_back: ActiveJob | None = None  # to be pre-empted once its steps in flight have settled
        for job in self._running:
            if job is held_back:
                continue
            if not job.decodes:
                if job.planned < job.target:
                    prompts.append(job)
                continue
            if job.room <= 0:
                continue
            # A drafter's row of the token that comes lies at the next place.
            end = min(job.planned + 1 + job.drafting, job.target)
            if end > len(job.pages) * PAGE_TOKENS:
                held_back = self._grow(job)
                if end > len(job.pages) * PAGE_TOKENS:
                    continue
            decoding.append(job)
        return decoding, prompts

    def settle(self, step: Step, result: StepResult, seconds: float | None = None) -> list[Delta]:
        """Takes in what a step gave: the deltas of its jobs. Rows of jobs that have ended meanwhile are dropped.

        seconds: what the machine took for it; None: that is not known. Raises AssertionError where another step is due.
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
        """What to tell of the prefix cache: what has changed since the last call, with the first call and with `whole`
        all that is there. None where nothing has changed."""
        whole = whole or not self._cached_told
        stored, removed = self._cache.changes(whole=whole)
        if not (stored or removed or whole):
            return None
        self._cached_told += 1
        return Cached(number=self._cached_told, stored=tuple(stored), removed=tuple(removed), whole=whole)

    def log_pages(self) -> None:
        """From now on `page_changes` tells what comes into the prefix cache and what leaves it."""
        self._cache.log = []

    def page_changes(self) -> list[Changed]:
        """What has come and gone since the last call, in order, with what it is of. Pages of prompts with images are
        left out. Nothing where `log_pages` was not called."""
        changes = self._cache.log
        if not changes:
            return []
        self._cache.log = []
        return changes

    def load(self) -> Load:
        """Counters and gauges. Used, cached (held by the cache alone) and free pages make up the total."""
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
        """Raises AssertionError unless every page and slot is where the books say, and nobody has overtaken."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[None]:
        """The same as `check`, a slice of pages between two yields, for a caller that may have something better to do.
        Nothing may change until it is exhausted; after a change it is to be begun anew."""
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
        assert all(job.passed <= job.work for job in self._jobs.values()), "too much has begun before a job"
        queued = [*self._waiting, *self._compiling.values()]
        assert not any(job.pages or job.slot is not None for job in queued), "a waiting job holds pages"
        assert not any(job.slot is not None or job.flights for job in expected), "a job that is expected runs already"
        alive = [*self._running, *queued, *expected]
        assert {job.job.id: job for job in alive} == self._jobs, "a job is neither running nor waiting nor expected"
        for those in (self._running, self._waiting.again):
            entries = [job.entry or 0 for job in those]
            assert entries == sorted(entries), f"the order {entries} in which jobs began is broken"

    def _check_lengths(self, job: ActiveJob) -> None:
        """Raises AssertionError unless what is planned of a running job is settled or in flight, and has its pages."""
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
        assert job.read <= job.computed, f"{name}: drafts are read of what is not computed"

    def _rows(self, parts: Sequence[_Part]) -> tuple[Row, ...]:
        """Plans these rows. Nothing is proposed that the next step would have no place for."""
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
                # The drafter's row of the token that this row gives lies at the next place.
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
        """How many of `extra` positions behind [0, end), which has pages, have pages too. Takes pages that are free or
        idle; nobody is pre-empted for a draft."""
        if end + extra <= len(job.pages) * PAGE_TOKENS:  # nearly always
            return extra
        wanted = min(end + extra, job.target)
        while wanted > len(job.pages) * PAGE_TOKENS and self._pool.free + self._pool.idle:
            job.pages += self._take(1)
        paged = len(job.pages) * PAGE_TOKENS
        return extra if wanted <= paged else max(0, paged - end)

    def _grow(self, job: ActiveJob) -> ActiveJob | None:
        """Gives the job one page more. When there is none, the youngest running job, perhaps this one, is pre-empted;
        one that has steps in flight is returned instead, to be held back until they have settled."""
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
        """Gives a waiting job slot and pages; None when there is no room, or when it pays to wait."""
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
            limit=job.limit + job.lends,  # the drafter's row of the first token goes to the other worker
            drafting=job.drafting,
        )

    def _give_pages(self, job: ActiveJob, matched: list[PageId]) -> bool:
        """Gives a job these cached pages and fresh ones behind them. False, and nothing given, without room."""
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
        """Whether there are pages for what a job has to compute behind these cached ones."""
        return not self._short_pages(job, matched)

    def _short_pages(self, job: ActiveJob, matched: Sequence[PageId]) -> int:
        """How many pages are missing for what a job has to compute behind these cached ones."""
        need = pages_for(job.known) - len(matched)
        matched_idle = sum(1 for page in matched if self._pool.is_idle(page))
        free, idle = self._pool.free, self._pool.idle
        return short_pages(need=need, matched_idle=matched_idle, free=free, idle=idle, running=len(self._running))

    def _match(self, job: ActiveJob) -> list[PageId]:
        """Cached pages that the job can begin from. Its last token is always computed, since its row samples.

        Behind the prompt nothing is taken from the cache: a job that resumes must find what it had, and only computing
        those positions again in the same form is sure to give the same bits. For the same reason it takes pages that
        are not those of a prefill only if it began from such pages.

        Pages that the learned drafter has not read lose it for the job. Where one step is enough to compute them again,
        that is done, and the cache has the better pages from then on.
        """
        hashes, exact = job.hashes[: job.usable], bool(job.generated) and job.exact
        matched = self._cache.match(hashes, exact=exact)
        if self._speculation.follows:
            drafted = self._cache.match(hashes, exact=exact, drafted=True)
            if (len(matched) - len(drafted)) * PAGE_TOKENS <= self._config.step_tokens:
                return drafted
        return matched

    def _is_coming(self, job: ActiveJob, index: int) -> bool:
        """Whether a running job is computing page `index` of this job's prompt: so it waits, and shares that page.

        So the n choices of one request, and requests that begin alike and come together, compute what they share once,
        each but the first only from its last full page on. Nobody waits for ever: the older job settles the page, and
        the cache has it, or it leaves. Who stands behind loses nothing: fewer positions come before its own.

        Where jobs are admitted together, steps with prompts are what is to be saved: only WORTH_A_STEP pages or more
        are waited for.
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
        """by: for whose page."""
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
        """What is to be told of jobs that have lost their pages, and that have not ended since."""
        notes, self._untold = self._untold, []
        return [delta for delta in notes if delta.job in self._jobs]

    def _release(self, job: ActiveJob) -> None:
        """Gives back slot and pages of a job that no step in flight names."""
        assert not job.flights, f"job {job.job.id} gives back its pages with {job.flights} steps in flight"
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
            prompt_logprobs = outcome.prompt_logprobs[max(0, job.scored - row.start) :]  # a resumed job was told some
            job.scored += len(prompt_logprobs)
        computed = job.computed
        if row.drafting:
            job.read = computed
        tokens, finish = self._accept(job, outcome.tokens)
        job.forced = min(job.known + outcome.forced, job.limit - 1)  # the last token is a row's own
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
        """Whether the answer ends with these tokens: then what its grammar took too long for delays no other job."""
        return bool(tokens) and (job.known + len(tokens) >= job.limit or not job.stop_ids.isdisjoint(tokens))

    def _accept(self, job: ActiveJob, tokens: Sequence[int]) -> tuple[tuple[int, ...], Finish | None]:
        """Appends new tokens up to the limit or a stop id, which is the last."""
        accepted = tuple(tokens[: job.limit - job.known])
        finish: Finish | None = None
        if not job.stop_ids.isdisjoint(accepted):
            first = next(n for n, token in enumerate(accepted, 1) if token in job.stop_ids)
            accepted, finish = accepted[:first], "stop"
        job.generated += accepted
        self._generation_tokens += len(accepted)
        return accepted, finish

    def _remember(self, job: ActiveJob) -> None:
        """Shows the prefix cache every page that has become full."""
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
        """What page `index` of a job is of."""
        return Content(job.tokens(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS), job.job.salt)

    def _end(self, job: ActiveJob, finish: Finish) -> None:
        """Ends the job. Its slot and pages return now, or with its last step in flight."""
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
