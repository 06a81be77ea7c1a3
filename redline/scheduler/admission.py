"""Admission of jobs: which are refused, when a waiting job can start, and the `Begin` that puts it into a slot.

The order of waiting jobs is decided in `queue`. A job starts when a slot is free and there are pages for all known
tokens that it has to compute, plus one page for each running job, so that it is not preempted at once. A job whose
grammar is not compiled, or whose images are not encoded, does not start.
"""

from collections.abc import Callable, Sequence

from redline.messages.delta import Delta, Fault
from redline.messages.job import PAGE_TOKENS, Grammar, Job, JobId, PageId
from redline.messages.step import Begin
from redline.scheduler.active import ActiveJob, pages_for
from redline.scheduler.config import PlanConfig
from redline.scheduler.counters import PlanCounters
from redline.scheduler.job_pages import JobPages
from redline.scheduler.job_table import JobTable
from redline.scheduler.speculation import Speculation

Hold = Callable[[Grammar], Callable[[], bool]]
"""Starts to compile a grammar. The result returns whether it is compiled, so that no step waits for it; while the
result is referenced, the grammar is kept."""

WORTH_A_STEP = 8  # shared pages of two prompts that justify an extra step instead of computing them twice


class Admission:
    """Takes jobs in, queues them, and starts them. hold: compiles grammars; None: jobs do not wait for theirs."""

    def __init__(
        self,
        config: PlanConfig,
        max_model_len: int,
        table: JobTable,
        pages: JobPages,
        speculation: Speculation,
        counters: PlanCounters,
        clock: Callable[[], float] | None,
    ) -> None:
        """max_model_len: maximum tokens of one job, prompt and answer. clock: as in `JobTable`."""
        self.hold: Hold | None = None
        self._config = config
        self._max_model_len = max_model_len
        self._table = table
        self._pages = pages
        self._speculation = speculation
        self._counters = counters
        self._clock = clock
        self._arrivals = 0

    def take_in(self, job: Job, spent_s: float) -> ActiveJob | Delta:
        """The state of a new job, which still has to be queued; a delta with an error if it can never run, or if the
        queue is full. spent_s: sum of the durations of all settled steps. Raises AssertionError for a job with a known
        id."""
        assert job.id not in self._table.jobs, f"job {job.id} is submitted twice"
        reason = refusal(job, max_model_len=self._max_model_len, total_pages=self._pages.pool.total)
        if reason is None and job.media:
            features = self._table.features
            reason = "the model reads no images" if features is None else features.refusal(job.media)
        if reason is not None:
            return error_delta(job.id, reason, "refused")
        waiting = self._table.queued
        if waiting >= self._config.max_waiting + len(self._table.free_slots):
            return error_delta(job.id, f"the queue is full: {waiting} jobs wait; try again later", "overloaded")
        active = ActiveJob(job, self._arrivals, token_limit(job, self._max_model_len))
        self._arrivals += 1
        active.came_at_s = spent_s
        if self._clock is not None:
            active.came = self._clock()
        self._table.jobs[job.id] = active
        grammar = job.sampling.grammar
        if self.hold is not None and grammar is not None and grammar.text:
            active.compiled = self.hold(grammar)  # start now, possibly during the KV transfer of its prompt
        return active

    def wait(self, job: ActiveJob) -> None:
        """Queue a job, or let it wait for its grammar and its images."""
        cached = PAGE_TOKENS * len(self._pages.cache.match(job.hashes[: job.usable]))
        job.work = job.known - cached
        if self._table.has_features(job, cached) and job.is_compiled:
            self._table.waiting.add(job)
        else:
            self._table.compiling[job.job.id] = job

    def take_compiled(self) -> None:
        """Queue the jobs whose grammar is compiled and whose images are encoded by now."""
        for job in list(self._table.compiling.values()):
            cached = PAGE_TOKENS * len(self._pages.cache.match(job.hashes[: job.usable])) if job.job.media else 0
            if job.is_compiled and self._table.has_features(job, cached):
                del self._table.compiling[job.job.id]
                self._table.waiting.add(job)

    def admit(self, job: ActiveJob) -> Begin | None:
        """Give a waiting job slot and pages; None if there is no room, or if waiting pays."""
        matched = self._pages.match(job)
        if self._is_coming(job, len(matched)):
            return None
        if not self._table.has_features(job, PAGE_TOKENS * len(matched)):
            return None  # pages with its images were evicted since it was queued
        if not self.give_pages(job, matched):
            return None
        if not job.counted:
            job.cached_tokens = job.planned
        self._table.waiting.begins(job)
        slot = self._table.start(job)
        if job.pause is not None:
            job.pause.ends(job.planned)
        if not job.counted:
            job.counted = True
            if self._table.features is not None:
                job.encoded = self._table.features.encoded_for(job)
            self._counters.prompt_tokens += job.prompt
            self._counters.prompt_tokens_cached += job.planned
        return Begin(
            slot=slot,
            tokens=job.tokens(0, job.known),
            prompt=job.prompt,
            pages=tuple(matched),
            sampling=job.job.sampling,
            limit=job.limit + job.lends,  # the drafter's row of the first token is transferred to the other worker
            drafting=job.drafting,
            features=self._table.features.features(job) if self._table.features is not None else (),
        )

    def begin_landed(self, decoding: list[ActiveJob]) -> list[Begin]:
        """Start jobs with a complete KV transfer in the free slots, in the order in which the transfers completed.
        Each gets a decode row in this step, and is added to `decoding`. Preempted jobs go first, unless only the
        landed jobs hold pages."""
        begins, table = list[Begin](), self._table
        while table.landed and table.free_slots and not (table.waiting and table.waiting.again and table.running):
            job = next((job for job in table.landed if job.is_compiled), None)
            if job is None:
                break
            if min(job.planned + 1 + job.drafting, job.target) > len(job.pages) * PAGE_TOKENS:
                if not self._pages.obtainable:
                    break
                job.pages += self._pages.take(1)
            table.landed.remove(job)
            decoding.append(job)
            job.sent = len(job.pages)
            slot = table.start(job)
            begins.append(
                Begin(
                    slot=slot,
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

    def give_pages(self, job: ActiveJob, matched: list[PageId]) -> bool:
        """Give a job these cached pages and new pages after them. False, without a change, if there is no room."""
        if not self.has_room(job, matched):
            return False
        self._pages.give(job, matched)
        return True

    def has_room(self, job: ActiveJob, matched: Sequence[PageId]) -> bool:
        """Whether there are pages for the positions that a job has to compute after these cached pages."""
        return not self.short_pages(job, matched)

    def short_pages(self, job: ActiveJob, matched: Sequence[PageId]) -> int:
        """Number of missing pages for the positions that a job has to compute after these cached pages."""
        need = pages_for(job.known) - len(matched)
        matched_idle = sum(1 for page in matched if self._pages.pool.is_idle(page))
        free, idle = self._pages.pool.free, self._pages.pool.idle
        return short_pages(need=need, matched_idle=matched_idle, free=free, idle=idle, running=len(self._table.running))

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
            for other in self._table.running
        )


def token_limit(job: Job, max_model_len: int) -> int:
    """Maximum number of tokens, prompt and generated, of the job."""
    return min(len(job.tokens) + job.sampling.max_tokens, max_model_len)


def refusal(job: Job, *, max_model_len: int, total_pages: int) -> str | None:
    """Why the job can never run, in one line; None if it can. total_pages: all pages of the KV cache, free or not."""
    prompt = len(job.tokens)
    if not prompt:
        return "the prompt is empty"
    if prompt + min(1, job.sampling.max_tokens) > max_model_len:
        return f"the prompt has {prompt} tokens; prompt and answer may have {max_model_len} together"
    if len(job.pages) != prompt // PAGE_TOKENS:
        return f"the job has {len(job.pages)} page hashes; a prompt of {prompt} tokens has {prompt // PAGE_TOKENS}"
    if len(job.answer) >= job.sampling.max_tokens > 0:
        return f"{len(job.answer)} tokens of the answer were already generated; max_tokens is {job.sampling.max_tokens}"
    pages = pages_for(max(token_limit(job, max_model_len) - 1, prompt))
    if pages > total_pages:
        return f"prompt and answer need {pages} pages of KV memory; there are {total_pages}"
    return None


def short_pages(*, need: int, matched_idle: int, free: int, idle: int, running: int) -> int:
    """How many more pages must become free before a job that needs `need` new pages can start. All arguments are
    numbers of pages, except `running`, a number of jobs.

    matched_idle: those of the job's cached pages that only the cache holds; they count as idle until the job starts.
    """
    return max(0, need + matched_idle + running - free - idle)


def error_delta(id: JobId, reason: str, fault: Fault, cached_tokens: int = 0) -> Delta:
    return Delta(job=id, finish="error", cached_tokens=cached_tokens, error=reason, fault=fault)
