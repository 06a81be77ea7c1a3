"""Jobs whose pages come from elsewhere, and pages that go elsewhere: the scheduler's side of KV transfer and offload.

A job whose prompt a prefill worker computes, or whose pages an offload tier has, waits here and delays no other job. It
holds at most its own pages. Pages that are being filled belong to their fetch, and pages of an ended prefill are lent
to the transfer: both return to the pool when it ends, whatever has become of the job.
"""

from collections.abc import Sequence

from redline.messages.delta import Brought, Delta
from redline.messages.handoff import PrefillDone
from redline.messages.job import PAGE_TOKENS, Job, JobId, PageId
from redline.scheduler.active import ActiveJob, Computed
from redline.scheduler.admission import Admission
from redline.scheduler.counters import PlanCounters
from redline.scheduler.job_pages import JobPages
from redline.scheduler.job_table import JobTable
from redline.scheduler.kv_tier import Fetch, KvTier, Lack, PageFlags, TierReads
from redline.scheduler.page_counts import Holder
from redline.scheduler.prefill_budget import PrefillBudget
from redline.scheduler.speculation import Speculation


class JobTransfers:
    """tier: the offload tiers; None: there are none. fetches: those in progress."""

    def __init__(
        self,
        table: JobTable,
        pages: JobPages,
        admission: Admission,
        speculation: Speculation,
        counters: PlanCounters,
        beside: PrefillBudget,
    ) -> None:
        self.tier: KvTier | None = None
        self.fetches = TierReads(pages.pool, pages.cache)
        self._table = table
        self._pages = pages
        self._admission = admission
        self._speculation = speculation
        self._counters = counters
        self._beside = beside

    @property
    def starved(self) -> bool:
        """Whether jobs wait for pages and no running job can free any: KV transfers hold them."""
        table = self._table
        return bool(table.waiting) and not (table.running or table.draining)

    def expect(self, job: Job) -> list[Delta]:
        """Add a job for which a prefill worker computes the prompt: it waits, without blocking later jobs, for
        `open`, and then for `land` or `compute_here`. Otherwise as `Planner.submit`."""
        active = self._admission.take_in(job, self._beside.spent_s)
        if isinstance(active, Delta):
            return [active]
        self._table.arriving[job.id] = active
        return []

    def open(self, id: JobId) -> tuple[int, tuple[PageId, ...]] | None:
        """Allocate the pages of an expected job's prompt: returns the number of cached positions, and the pages.
        None if there is no room now. Raises KeyError for a job that is not expected, or has its pages already."""
        job = self._table.arriving[id]
        if job.pages:
            raise KeyError(id)
        if not self.comes_next(id):
            return None  # an older job in the queue waits for pages
        if not self._admission.give_pages(job, self._pages.match(job)):
            return None
        return job.planned, tuple(job.pages)

    def land(self, handed: PrefillDone) -> list[Delta]:
        """The KV transfer of an expected job is complete. Returns a delta with the first token; the job resumes as
        soon as a slot is free. Raises KeyError for a job without pages from `open`."""
        job = self._table.arriving[handed.job]
        if not job.pages:
            raise KeyError(handed.job)
        del self._table.arriving[handed.job]
        job.exact = job.exact and handed.exact
        job.drafting = job.drafting and handed.drafting
        job.planned = job.computed = job.prompt
        job.read = job.prompt if job.drafting else 0
        job.cached_tokens = max(job.kept * PAGE_TOKENS, handed.cached_tokens)
        job.counted = True  # by the prefill worker
        job.scored = len(handed.prompt_logprobs)
        tokens, finish = job.accept(handed.tokens)
        self._counters.generation_tokens += len(tokens)
        job.length = job.known
        if finish is None and job.known >= job.limit:
            finish = "length"
        self._table.landed.append(job)
        if finish is not None:
            self._pages.remember(job)
            self._table.end(job, finish)
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
        job = self._table.arriving.pop(id)
        job.brought = brought
        self._table.unopen(job)
        self._admission.wait(job)

    def attach(self, below: KvTier) -> None:
        """From now on evicted pages are offered to the KV offload tiers, and jobs may wait for pages from there."""
        self.tier = below
        self._pages.cache.forgets = below.forgets

    def lack(self, id: JobId) -> Lack | None:
        """The pages of an expected job that the prefix cache does not have; None if the job is no longer expected."""
        job = self._table.arriving.get(id)
        return None if job is None else self._lack(job)

    def comes_next(self, id: JobId) -> bool:
        """Whether no queued job is older than an expected one. Raises KeyError for a job that is not expected."""
        waiting, job = self._table.waiting, self._table.arriving[id]
        return not waiting or not (waiting.again or waiting.due().arrival < job.arrival)

    def awaits(self, job: ActiveJob) -> bool:
        """Whether a new job waits for pages from the offload tiers; if so, it is an expected job from now on."""
        if self.tier is None or not self.tier.awaits(job.job.id, self._lack(job)):
            return False
        self._table.arriving[job.job.id] = job
        return True

    def fetch(self, id: JobId, count: int) -> Fetch | None:
        """Allocate pages for the first `count` pages that an expected job lacks; None if it has no room to start
        now. The fetch holds them until `fetched`, even if the job ends. Raises KeyError for a job that is not
        expected."""
        job = self._table.arriving[id]
        if not self.comes_next(id):
            return None  # an older job in the queue waits for pages
        matched = self._pages.match(job)
        if not self._admission.has_room(job, matched):
            return None
        previous = job.hashes[len(matched) - 1] if matched else None
        logged = self._pages.cache.log is not None and not job.job.media
        wanted = range(len(matched), len(matched) + count) if logged else ()
        contents = tuple(self._pages.content(job, index) for index in wanted)
        return self.fetches.begin(self._lack(job), count, matched, previous, contents)

    def fetched(self, fetch: Fetch, kept: Sequence[PageFlags]) -> None:
        """End a fetch: nothing writes to its pages any more. The first len(kept) pages are valid."""
        self.fetches.end(fetch, kept)

    def computed(self, id: JobId) -> Computed | None:
        """Progress of a prefill for another worker; None if nothing of it exists or ever will."""
        job = self._table.jobs.get(id)
        if job is None:
            return self._table.lent.get(id)
        return job.progress()

    def computing(self, id: JobId) -> tuple[int, int] | None:
        """Positions [first, end) of a job's prompt in the next step to be settled; None if it has none there, or the
        job has ended. Its pages do not change until then."""
        job = self._table.jobs.get(id)
        if job is None or not job.flights:
            return None
        planned, jobs = self._table.flights[0]
        for row, of in zip(planned.rows, jobs, strict=True):
            if of is job and row.start is not None:
                return row.start, row.start + row.count
        return None

    def give_back(self, id: JobId) -> None:
        """Release the pages of an ended prefill job: they were transferred, or are no longer wanted. Raises KeyError
        if none are lent."""
        for page in self._table.lent.pop(id).pages:
            self._pages.cache.release(page, Holder.LENT)

    def _lack(self, job: ActiveJob) -> Lack:
        first, exact = len(self._pages.match(job)), bool(job.generated) and job.exact
        return Lack(first, job.known, tuple(job.hashes[first : job.usable]), exact, self._speculation.follows)
