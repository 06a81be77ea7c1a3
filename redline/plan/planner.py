"""Decides what runs next. Holds no tensor.

A step is planned from what has been launched, not from what has been settled: a row continues where the last one will
have ended. What only a result can tell (a stop id, an error) is learnt late, and the rows launched meanwhile are
dropped when they settle.

No job starves. Jobs are admitted in the order in which they came; every step gives one row to each running job that
generates, and what is left of the budget to prompts, the oldest first. There are at least as many tokens in a step as
there are slots, so a prompt always gets something. When pages run out, the youngest running job is pre-empted and
waits in front of all others. So the oldest job always advances, and every job becomes the oldest.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from redline.errors import ConfigError
from redline.plan.active import ActiveJob, pages_for
from redline.plan.admit import may_enter, refusal, token_limit
from redline.plan.pages import Holder, PagePool
from redline.plan.prefix import PrefixCache
from redline.wire.delta import Delta, Finish
from redline.wire.job import PAGE_TOKENS, Job, JobId, PageHash, PageId
from redline.wire.news import Load
from redline.wire.step import Begin, Row, RowResult, Step, StepResult, TokenLogprobs

HashPage = Callable[[PageHash | None, tuple[int, ...]], PageHash]
"""A page's hash from the hash before it (None: the first page, of a job without salt) and its PAGE_TOKENS tokens."""


@dataclass(frozen=True)
class PlanConfig:
    """Raises ConfigError when the numbers cannot work together."""

    step_tokens: int = 512  # positions computed in one step, at most
    max_running: int = 64  # slots
    max_waiting: int = 1024  # jobs beyond those that free slots can take
    ahead: int = 1  # steps that may be unsettled while the next is planned

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.step_tokens:
            raise ConfigError(
                f"max_running is {self.max_running} and step_tokens {self.step_tokens}: "
                "a step needs a token for each running job"
            )
        if self.max_waiting < 0 or self.ahead < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting} and ahead {self.ahead}: neither can be negative")


class _Flight(NamedTuple):
    step: Step
    jobs: list[ActiveJob]  # one for each row


class Planner:
    """Owns pages, slots and queues of one worker.

    Steps are settled in the order in which they were planned. `submit`, `abort` and `settle` give what the clients must
    be told; a job's last delta, and no other, has a finish.
    """

    def __init__(self, pages: int, config: PlanConfig, max_model_len: int, hash_page: HashPage) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._hash_page = hash_page
        self._pool = PagePool(pages)
        self._cache = PrefixCache(self._pool)
        self._jobs: dict[JobId, ActiveJob] = {}  # all that have not ended
        self._waiting: deque[ActiveJob] = deque()
        self._running: list[ActiveJob] = []  # in the order of arrival, which is that of admission
        self._draining: set[ActiveJob] = set()  # ended, with steps in flight: they still hold slot and pages
        self._flights: deque[_Flight] = deque()
        self._free_slots = list(reversed(range(config.max_running)))
        self._arrivals = 0
        self._steps = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._prompt_tokens_cached = 0
        self._generation_tokens = 0

    @property
    def idle(self) -> bool:
        """Nothing to plan and nothing to settle."""
        return not self._jobs and not self._flights

    def submit(self, job: Job) -> list[Delta]:
        """Queues a job. One that can never run, or finds the queue full, ends at once with an error."""
        assert job.id not in self._jobs, f"job {job.id} is submitted twice"
        reason = refusal(job, max_model_len=self._max_model_len, total_pages=self._pool.total)
        if reason is None and len(self._waiting) >= self._config.max_waiting + len(self._free_slots):
            reason = f"the queue is full: {len(self._waiting)} jobs wait; try again later"
        if reason is not None:
            return [Delta(job=job.id, finish="error", error=reason)]
        active = ActiveJob(job, self._arrivals, token_limit(job, self._max_model_len))
        self._arrivals += 1
        self._jobs[job.id] = active
        self._waiting.append(active)
        return []

    def abort(self, id: JobId) -> list[Delta]:
        """Ends a job now. One that has ended already is no mistake: the message crossed its last delta."""
        job = self._jobs.get(id)
        if job is None:
            return []
        self._end(job, "aborted")
        return [Delta(job=id, finish="aborted", cached_tokens=job.cached_tokens)]

    def abort_all(self) -> list[Delta]:
        return [delta for id in list(self._jobs) for delta in self.abort(id)]

    def next_step(self) -> Step | None:
        """The next step to launch; None when nothing can be planned before another step is settled.

        A step never has two rows of one slot, and a Begin always comes with a row.
        """
        if len(self._flights) > self._config.ahead:
            return None
        rows: list[Row] = []
        jobs: list[ActiveJob] = []
        prompts: list[ActiveJob] = []
        held_back: ActiveJob | None = None  # to be pre-empted once its steps in flight have settled
        budget = self._config.step_tokens
        for job in self._running:
            planned = job.planned
            if planned >= job.target or job is held_back:
                continue
            if planned < job.prompt or planned < job.length - 1:
                prompts.append(job)
                continue
            if planned >= len(job.pages) * PAGE_TOKENS:
                held_back = self._grow(job)
                if planned >= len(job.pages) * PAGE_TOKENS:
                    continue
            rows.append(self._row(job, 1))
            jobs.append(job)
            budget -= 1
        for job in prompts:
            if not budget:
                break
            rows.append(self._row(job, job.next_count(budget)))
            jobs.append(job)
            budget -= rows[-1].count
        begins: list[Begin] = []
        while budget and self._waiting and self._free_slots:
            begin = self._admit(self._waiting[0])
            if begin is None:
                break
            begins.append(begin)
            job = self._running[-1]
            rows.append(self._row(job, job.next_count(budget)))
            jobs.append(job)
            budget -= rows[-1].count
        if not rows:
            assert self._flights or not self._jobs, f"{len(self._jobs)} jobs, and none of them can go on"
            return None
        self._steps += 1
        step = Step(number=self._steps, begins=tuple(begins), rows=tuple(rows))
        self._flights.append(_Flight(step, jobs))
        return step

    def settle(self, step: Step, result: StepResult) -> list[Delta]:
        """Takes in what a step gave. Rows of jobs that have ended meanwhile are dropped."""
        flight = self._flights.popleft()
        assert step.number == flight.step.number == result.number, (
            f"step {step.number} is settled with the result of {result.number}; {flight.step.number} is next"
        )
        deltas: list[Delta] = []
        for job, row, outcome in zip(flight.jobs, flight.step.rows, result.rows, strict=True):
            job.flights -= 1
            if job.finish is None:
                delta = self._settle_row(job, row, outcome)
                if delta is not None:
                    deltas.append(delta)
            elif not job.flights:
                self._draining.remove(job)
                self._release(job)
        return deltas

    def load(self) -> Load:
        """Counters and gauges. Used, cached (held by the cache alone) and free pages make up the total."""
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            pages_used=self._pool.used,
            pages_cached=self._pool.idle,
            pages_total=self._pool.total,
            steps=self._steps,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
            generation_tokens=self._generation_tokens,
        )

    def check(self) -> None:
        """Raises AssertionError unless every page and slot is where the books say, and nobody has overtaken."""
        holding = [*self._running, *self._draining]
        self._pool.check(
            {Holder.CACHE: self._cache.pages(), Holder.JOBS: [page for job in holding for page in job.pages]}
        )
        self._cache.check()
        slots = sorted([*self._free_slots, *(job.slot for job in holding if job.slot is not None)])
        assert slots == list(range(self._config.max_running)), f"slots {slots} are free or taken"
        flights = [job for flight in self._flights for job in flight.jobs]
        for job in {*holding, *flights, *self._waiting}:
            assert job.flights == flights.count(job), f"job {job.job.id}: {job.flights} steps in flight counted"
        assert all(job.finish and job.flights for job in self._draining), "a drained job still holds its pages"
        assert not any(job.pages or job.slot is not None for job in self._waiting), "a waiting job holds pages"
        alive = [*self._running, *self._waiting]
        assert {job.job.id: job for job in alive} == self._jobs, "a job is neither running nor waiting"
        arrivals = [job.arrival for job in alive]
        assert arrivals == sorted(arrivals), f"order of arrival {arrivals} is broken"

    def _row(self, job: ActiveJob, count: int) -> Row:
        """Plans the next `count` positions of a running job, for which it has pages."""
        start = job.planned
        end = job.planned = start + count
        samples = end == job.length and end < job.limit
        if samples:
            job.length += 1
        job.flights += 1
        slot = job.slot
        assert slot is not None
        if end <= job.sent * PAGE_TOKENS:
            return Row(slot=slot, start=start, count=count, samples=samples)
        needed = pages_for(end)
        new_pages = tuple(job.pages[job.sent : needed])
        job.sent = needed
        return Row(slot=slot, start=start, count=count, new_pages=new_pages, samples=samples)

    def _grow(self, job: ActiveJob) -> ActiveJob | None:
        """Gives the job one page more. When there is none, the youngest running job, perhaps this one, is pre-empted;
        one that has steps in flight is returned instead, to be held back until they have settled."""
        while not self._pool.free + self._pool.idle:
            victim = self._running[-1]
            if victim.flights:
                return victim
            self._preempt(victim)
            if victim is job:
                return None
        job.pages += self._take(1)
        return None

    def _take(self, count: int) -> list[PageId]:
        self._cache.evict(max(0, count - self._pool.free))
        return self._pool.take(count)

    def _admit(self, job: ActiveJob) -> Begin | None:
        """Gives the first waiting job slot and pages; None when there is no room."""
        matched = self._match(job)
        need = pages_for(job.known) - len(matched)
        matched_idle = sum(1 for page in matched if self._pool.is_idle(page))
        free, idle = self._pool.free, self._pool.idle
        if not may_enter(need=need, matched_idle=matched_idle, free=free, idle=idle, running=len(self._running)):
            return None
        self._cache.use(matched, of_tokens=job.known)
        job.pages = matched + self._take(need)
        job.slot = self._free_slots.pop()
        job.sent = job.kept = len(matched)
        job.planned = job.computed = len(matched) * PAGE_TOKENS
        if not job.generated:
            job.exact = all(self._cache.is_exact(page) for page in matched)
            job.cached_tokens = job.planned
        self._waiting.popleft()
        self._running.append(job)
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
            limit=job.limit,
        )

    def _match(self, job: ActiveJob) -> list[PageId]:
        """Cached pages that the job can begin from. Its last token is always computed, since its row samples.

        Behind the prompt nothing is taken from the cache: a job that resumes must find what it had, and only computing
        those positions again in the same form is sure to give the same bits. For the same reason it takes pages that
        are not those of a prefill only if it began from such pages.
        """
        if job.job.sampling.prompt_logprobs is not None:
            return []  # every prompt position must be computed
        usable = min((job.known - 1) // PAGE_TOKENS, len(job.job.pages))
        return self._cache.match(job.hashes[:usable], exact=bool(job.generated) and job.exact)

    def _preempt(self, job: ActiveJob) -> None:
        assert self._running.pop() is job, f"job {job.job.id} is not the youngest"
        self._release(job)
        job.leave()
        self._waiting.appendleft(job)
        self._preemptions += 1

    def _release(self, job: ActiveJob) -> None:
        """Gives back slot and pages of a job that no step in flight names."""
        assert not job.flights, f"job {job.job.id} gives back its pages with {job.flights} steps in flight"
        assert job.slot is not None
        for page in job.pages:
            self._cache.release(page)
        self._free_slots.append(job.slot)

    def _settle_row(self, job: ActiveJob, row: Row, outcome: RowResult) -> Delta | None:
        if outcome.error is not None:
            self._end(job, "error")
            return Delta(job=job.job.id, finish="error", cached_tokens=job.cached_tokens, error=outcome.error)
        if outcome.prompt_logprobs and not job.generated:
            job.prompt_logprobs += outcome.prompt_logprobs
        computed = job.computed = row.start + row.count - row.drafts + outcome.accepted
        tokens, finish = self._accept(job, outcome.tokens)
        if computed >= (job.kept + 1) * PAGE_TOKENS:
            self._remember(job)
        if finish is None and computed >= job.prompt and job.known >= job.limit:
            finish = "length"
        if not tokens and finish is None:
            return None
        if finish is not None:
            self._end(job, finish)
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if job.prompt_logprobs:
            prompt_logprobs = tuple(job.prompt_logprobs)
            job.prompt_logprobs.clear()
        return Delta(
            job=job.job.id,
            tokens=tokens,
            finish=finish,
            cached_tokens=job.cached_tokens,
            logprobs=outcome.logprobs[: len(tokens)],
            prompt_logprobs=prompt_logprobs,
        )

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
            self._cache.insert(hashes[index], job.pages[index], previous, exact=job.exact and end <= job.prompt)
            job.kept = index + 1

    def _end(self, job: ActiveJob, finish: Finish) -> None:
        """The job's last word. Slot and pages return now, or with its last step in flight."""
        job.finish = finish
        del self._jobs[job.job.id]
        if job.slot is None:
            self._waiting.remove(job)
            return
        self._running.remove(job)
        if job.flights:
            self._draining.add(job)
        else:
            self._release(job)
