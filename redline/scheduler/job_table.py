"""The jobs of a worker by their state, the slots of running jobs, and the launched steps that are not settled.

A job that has not ended is in exactly one of `waiting`, `compiling`, `arriving`, `landed` and `running`. Every slot is
free, or belongs to one job that runs or drains. Only these, and jobs whose pages come from elsewhere (`arriving`,
`landed`), hold pages. `checks` proves all of it.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from redline.messages.delta import Finish
from redline.messages.job import PAGE_TOKENS, JobId, PageId
from redline.messages.step import Step
from redline.scheduler.active import ActiveJob, Computed, pages_for
from redline.scheduler.features import FeatureCache
from redline.scheduler.job_pages import JobPages
from redline.scheduler.page_counts import Holder
from redline.scheduler.queue import Queue


class PlannedStep(NamedTuple):
    """A launched step that is not settled, with the job of each of its rows."""

    step: Step
    jobs: list[ActiveJob]


class JobTable:
    """Moves jobs between their states.

    jobs: all that have not ended. waiting: the queue. compiling: jobs that wait for their grammar to be compiled, or
    for their images to be encoded, before they are queued. running: in the order in which they first started. arriving:
    jobs that wait for pages from a prefill worker or an offload tier. landed: jobs with a complete KV transfer that
    wait for a slot. lent: by ended prefill job, the pages that still have to be transferred. draining: ended jobs with
    steps in flight; they still hold slot and pages. flights: in the order of their launches.
    """

    def __init__(self, slots: int, pages: JobPages, clock: Callable[[], float] | None) -> None:
        """clock: returns seconds; None: waiting times are not measured."""
        self.jobs: dict[JobId, ActiveJob] = {}
        self.waiting = Queue()
        self.compiling: dict[JobId, ActiveJob] = {}
        self.running: list[ActiveJob] = []
        self.arriving: dict[JobId, ActiveJob] = {}
        self.landed: deque[ActiveJob] = deque()
        self.lent: dict[JobId, Computed] = {}
        self.draining: set[ActiveJob] = set()
        self.flights: deque[PlannedStep] = deque()
        self.features: FeatureCache | None = None  # None: the model reads no images
        self.free_slots = list(reversed(range(slots)))
        self._slots = slots
        self._pages = pages
        self._clock = clock
        self._entries = 0

    @property
    def queued(self) -> int:
        """Number of jobs without a slot."""
        return len(self.waiting) + len(self.compiling) + len(self.arriving) + len(self.landed)

    def has_features(self, job: ActiveJob, start: int) -> bool:
        """Whether a job's images that end after position `start` are encoded; takes them for the job if there is room
        (`FeatureCache.acquire`)."""
        return self.features is None or not job.job.media or self.features.acquire(job, start)

    def start(self, job: ActiveJob) -> int:
        """Give a job, which has its pages, a free slot, and add it to the running jobs, after those that first started
        before it. -> the slot."""
        job.slot = self.free_slots.pop()
        if job.entry is None:
            self._entries += 1
            job.entry = self._entries
            if self._clock is not None:
                job.queued_s = self._clock() - job.came
        insort(self.running, job, key=lambda one: one.entry or 0)
        return job.slot

    def put_back(self, job: ActiveJob) -> None:
        """Queue the running job that started last again; its slot and pages are released."""
        assert self.running.pop() is job, f"job {job.job.id} is not the youngest"
        self._release(job)
        job.leave()
        self.waiting.put_back(job)

    def unopen(self, job: ActiveJob) -> None:
        """Release the pages of a job that has no slot."""
        self._pages.release(job)
        job.leave()

    def drained(self, job: ActiveJob) -> None:
        """The last step in flight of an ended job has settled: release its slot and pages."""
        self.draining.remove(job)
        self._release(job)

    def end(self, job: ActiveJob, finish: Finish) -> None:
        """End the job. Its slot and pages are released now, or when its last step in flight is settled."""
        job.finish = finish
        job.compiled = None
        del self.jobs[job.job.id]
        if self.features is not None:
            self.features.release(job)
        if job.lends and finish in ("stop", "length"):
            lent = job.progress()._replace(pages=tuple(job.pages[: pages_for(job.prompt)]))
            self.lent[job.job.id] = lent
            for page in lent.pages:
                self._pages.pool.share(page, Holder.LENT)
        if job.slot is None:
            if job.job.id in self.arriving:
                del self.arriving[job.job.id]
                self.unopen(job)
            elif job in self.landed:
                self.landed.remove(job)
                self.unopen(job)
            elif self.compiling.pop(job.job.id, None) is None:
                self.waiting.remove(job)
            return
        self.running.remove(job)
        if job.flights:
            self.draining.add(job)
        else:
            self._release(job)

    def _release(self, job: ActiveJob) -> None:
        """Release slot and pages of a job without steps in flight."""
        assert not job.flights, f"job {job.job.id} releases its pages with {job.flights} steps in flight"
        assert job.slot is not None
        self._pages.release(job)
        self.free_slots.append(job.slot)

    def checks(self, fetched: Iterable[PageId]) -> Iterator[None]:
        """As `Planner.checks`. fetched: every page that a fetch from an offload tier holds."""
        expected = [*self.arriving.values(), *self.landed]
        holding = [*self.running, *self.draining]
        yield from self._pages.pool.checks(
            {
                Holder.CACHE: self._pages.cache.pages(),
                Holder.JOBS: [page for job in (*holding, *expected) for page in job.pages],
                Holder.LENT: [page for lent in self.lent.values() for page in lent.pages],
                Holder.FETCHES: fetched,
            }
        )
        yield from self._pages.cache.checks()
        if self.features is not None:
            self.features.check(self.jobs)
        slots = sorted([*self.free_slots, *(job.slot for job in holding if job.slot is not None)])
        assert slots == list(range(self._slots)), f"slots {slots} are free or taken"
        flights = [job for flight in self.flights for job in flight.jobs]
        for job in {*holding, *flights, *self.waiting}:
            assert job.flights == flights.count(job), f"job {job.job.id}: {job.flights} steps in flight counted"
        for job in self.running:
            self._check_lengths(job)
        assert all(job.finish and job.flights for job in self.draining), "a drained job still holds its pages"
        assert all(job.passed <= job.work for job in self.jobs.values()), (
            "too many positions were started before a waiting job"
        )
        queued = [*self.waiting, *self.compiling.values()]
        assert not any(job.pages or job.slot is not None for job in queued), "a waiting job holds pages"
        assert not any(job.slot is not None or job.flights for job in expected), "an expected job is already running"
        alive = [*self.running, *queued, *expected]
        assert {job.job.id: job for job in alive} == self.jobs, "a job is neither running nor waiting nor expected"
        for those in (self.running, self.waiting.again):
            entries = [job.entry or 0 for job in those]
            assert entries == sorted(entries), f"jobs are not in the order of their start: {entries}"

    def _check_lengths(self, job: ActiveJob) -> None:
        """Raises AssertionError unless the planned positions of a running job are settled or in flight, and have
        pages."""
        rows = [
            row for flight in self.flights for of, row in zip(flight.jobs, flight.step.rows, strict=True) if of is job
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
