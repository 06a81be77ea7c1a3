"""KV offload tiers between the planner and the page store: saves evicted pages, and prefetches pages for new jobs.

Pages that the prefix cache evicts are saved. If the prompt of a new job continues in saved pages, the job waits for
them if reading them is predicted to take less time than computing them; both predictions are learnt from earlier
measurements. Jobs after it do not wait. The job is queued once the pages have been read, or the read has timed out, or
there has been no room for the pages: then it computes the missing part, as it would without tiers.

All of this runs in the loop's thread between two steps, and takes microseconds; the store's own thread reads the pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from redline import clock
from redline.messages.delta import Brought
from redline.messages.job import PAGE_TOKENS, JobId, PageHash
from redline.messages.news import Load, TierLoad
from redline.messages.step import Step
from redline.policy.tiers import FetchChoice, PrefillTimes, ReadTimes, choose
from redline.run.tiers.store import Saved, Store
from redline.run.tiers.tables import Found, Tier, TierRead
from redline.scheduler.kv_tier import Fetch, Lack, PageFlags
from redline.scheduler.planner import Planner
from redline.scheduler.prefix_cache import Forgotten
from redline.worker.service import Service

# Timeout of a job's read: READ_S seconds plus LATE times the predicted time. Pages that have arrived by then are used.
READ_S, LATE = 5.0, 2.0
ROOM_S = 2.0  # timeout, in seconds, for free pages, counted from when no earlier job waits
FLUSH_S = 5.0  # time limit, in seconds, for writing host memory's pages to disk when the worker ends
BEGIN_S = 0.001  # first guess for the fixed time of a read, in seconds, until it is measured
SOON_S = 0.0005  # polling interval, in seconds, of reads in progress
TIERS: tuple[Tier, ...] = ("host", "disk")

# Share of the store thread's time for reads while steps run. CPU kernels use every core; with a GPU the host is idle.
SHARE = {"cpu": 0.25, "cuda": 1.0}


@dataclass(eq=False)
class _Coming:
    """A read of pages in progress."""

    fetch: Fetch
    reading: TierRead
    choice: FetchChoice
    began: float  # start time in seconds, before pages were evicted to make room
    ahead_s: float  # predicted wait for earlier reads, in seconds
    saved: int  # number of pages that were saved to make room
    room_s: float  # predicted part of its time for saving them, in seconds
    busy: bool  # whether steps ran when it was chosen
    owner: JobId  # the job for which the pages are read
    jobs: set[JobId]  # the jobs that wait for the pages, including the owner


@dataclass(eq=False)
class _WaitingJob:
    """A job that waits for pages."""

    since: float  # since when no earlier job waits
    coming: _Coming | None = None


@dataclass
class _Tally:
    """Counters of one tier."""

    hit_tokens: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    predicted_s: float = 0.0
    error_s: float = 0.0
    saved_s: float = 0.0
    lost_s: float = 0.0


class Tiers(Service):
    """The KV offload tiers of one worker (`scheduler.kv_tier.KvTier`). Only the loop's thread may use it."""

    def __init__(
        self,
        planner: Planner,
        store: Store,
        *,
        step_tokens: int,
        experts: tuple[int, int] = (0, 0),
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """step_tokens: most positions of a step. experts: number of experts per layer and of experts per token; 0:
        every step reads all weights."""
        self._changes = 0
        self.store = store
        self.prefills = PrefillTimes(*experts)
        self._planner, self._clock, self._step_tokens = planner, clock, step_tokens
        self._jobs: dict[JobId, _WaitingJob] = {}  # in order of arrival
        self._coming: list[_Coming] = []
        self._tallies = {tier: _Tally() for tier in TIERS}
        self._of_prefills = _Tally()
        page_s, share = [store.page_s[tier] for tier in TIERS], store.share
        save_s = store.page_s["host"]
        self.readings = {  # time models of reads, by whether steps run
            False: ReadTimes(BEGIN_S, page_s, save_s),
            True: ReadTimes(BEGIN_S, [seconds / share for seconds in page_s], save_s),
        }
        self._saved = 0  # number of pages saved since the start
        planner.transfers.attach(self)

    @property
    def changes(self) -> int:
        return self._changes

    @property
    def idle(self) -> bool:
        """Whether no job waits and no read is in progress."""
        return not (self._jobs or self._coming)

    def due_in(self) -> float | None:
        return None if self.idle else SOON_S

    # ------------------------------------------------------------------------------------------ calls of the planner

    def forgets(self, pages: Sequence[Forgotten]) -> None:
        """As `KvTier.forgets`."""
        self._saved += self.store.save([Saved(*page) for page in pages])

    def awaits(self, id: JobId, lack: Lack) -> bool:
        """As `KvTier.awaits`."""
        if not self._choose(lack).pages:
            return False
        self._jobs[id] = _WaitingJob(self._clock())
        return True

    def took(self, step: Step, seconds: float) -> None:
        """As `KvTier.took`."""
        self.store.parts.took("step", seconds)
        rows = [(row.start, row.count) for row in step.rows if row.start is not None]
        if not rows:
            return
        decoding = sum(row.count for row in step.rows if row.start is None)
        if not decoding and len(rows) == 1:  # a prefill of one prompt: compare it with its prediction
            first, count = rows[0]
            predicted = self.prefills.predict(first, first + count, self._step_tokens)
            if predicted is not None:
                self._of_prefills.predicted_s += predicted
                self._of_prefills.read_s += seconds
                self._of_prefills.error_s += abs(predicted - seconds)
        self.prefills.observed(rows, decoding, seconds)

    # ------------------------------------------------------------------------------------------ one loop iteration

    def work(self) -> None:
        """Makes progress: completes reads, begins others, and queues the jobs that no longer wait."""
        self.store.busy = not self._planner.idle
        if self.idle:
            return
        now = self._clock()
        for coming in self._coming:
            coming.jobs = {id for id in coming.jobs if self._planner.transfers.lack(id) is not None}
            coming.reading.cancelled |= not coming.jobs
        for coming in [one for one in self._coming if one.reading.ended.is_set()]:
            self._end(coming)
        for id, waiting in list(self._jobs.items()):
            if waiting.coming is None:
                self._move(id, waiting, now)

    def load(self, load: Load) -> Load:
        return msgspec.structs.replace(load, tiers=self.figures())

    def figures(self) -> tuple[TierLoad, ...]:
        """The size and the counters of each tier, and, as "compute", the accuracy of predicted prefill times."""
        store, told = self.store, list[TierLoad]()
        for tier in TIERS:
            if tier == "host":
                pages, most = store.host_pages, store.host_most * store.page_bytes
                held = pages * store.page_bytes
            elif store.disk is not None:
                pages, held, most = len(store.disk), store.disk.bytes, store.disk.most_bytes
            else:
                continue
            counts = tuple(sorted((why, count) for (of, why), count in store.counts.items() if of == tier))
            told.append(_load(tier, self._tallies[tier], pages=pages, bytes=held, most_bytes=most, counts=counts))
        told.append(_load("compute", self._of_prefills))
        return tuple(told)

    def stop(self) -> None:
        """Saves the prefix cache's pages, writes as many pages to disk as FLUSH_S allows, and ends the store's thread.

        No step of the planner may be running."""
        for coming in self._coming:
            coming.reading.cancelled = True
            coming.reading.ended.wait(READ_S)
        self.work()
        if self.store.disk is not None:
            self._planner.forget_idle()
            self.store.flush(FLUSH_S)
        self.store.close()

    def check(self) -> None:
        """Raises AssertionError unless the waiting jobs and the reads in progress refer to each other."""
        for id, waiting in self._jobs.items():
            assert waiting.coming is None or id in waiting.coming.jobs, f"job {id} is not among its read's jobs"
            assert waiting.coming is None or waiting.coming in self._coming, f"job {id} waits for a read that has ended"

    def _choose(self, lack: Lack) -> FetchChoice:
        """Chooses how many of a prompt's missing pages to read."""
        if not lack.hashes:
            return FetchChoice(0)
        found = self.store.find(lack.hashes, exact=lack.exact, drafted=lack.drafted)
        if not found:
            return FetchChoice(0)
        pages = _by_tier(found)
        begin_s, *page_s = self.readings[self.store.busy].predict(pages)
        by_tier = dict(zip(TIERS, page_s, strict=True))
        return choose(
            lack.first * PAGE_TOKENS,
            lack.positions,
            [by_tier[one.tier] for one in found],
            self._ahead() + begin_s,
            self.prefills,
            page_tokens=PAGE_TOKENS,
            step_tokens=self._step_tokens,
        )

    def _ahead(self) -> float:
        """Predicted seconds until all reads in progress are done."""
        now = self._clock()
        return sum(max(0.0, one.choice.fetch_s - (now - one.began)) for one in self._coming)

    def _move(self, id: JobId, waiting: _WaitingJob, now: float) -> None:
        """Begins to read for a job, lets it wait for another job's read, or queues it."""
        lack = self._planner.transfers.lack(id)
        if lack is None:  # it was aborted
            del self._jobs[id]
            return
        if lack.hashes and (coming := self._that_reads(lack.hashes[0])) is not None:
            waiting.coming = coming
            coming.jobs.add(id)
            return
        if not self._planner.transfers.comes_next(id):
            waiting.since = now  # earlier jobs wait: this job could not have been admitted yet either
            return
        choice = self._choose(lack)
        reading = self.store.hold(lack.hashes[: choice.pages]) if choice.pages else None
        if reading is None or now - waiting.since > ROOM_S:
            if reading is not None:
                self.store.let_go(reading)
            self._go_on(id)
            return
        ahead_s, before, began = self._ahead(), self._saved, self._clock()
        with self.store.parts.of("room"):
            fetch = self._planner.transfers.fetch(id, choice.pages)
        if fetch is None:
            self.store.let_go(reading)
            return
        # Making room copies each page that is evicted. Computing the prompt would need the same room, so the copies are
        # not a part of the choice; but the first token waits for them, so they are a part of the predicted time.
        busy, saved = self.store.busy, self._saved - before
        pages = _by_tier(reading.found)
        begin_s, *page_s = self.readings[busy].predict(pages, saved)
        fetch_s = ahead_s + begin_s + sum(count * page for count, page in zip(pages, page_s, strict=True))
        room_s, choice = fetch_s - choice.fetch_s, choice._replace(fetch_s=fetch_s)
        waiting.coming = coming = _Coming(
            fetch, reading, choice, began, ahead_s, saved, room_s if saved else 0.0, busy, id, {id}
        )
        self._coming.append(coming)
        self.store.read(reading, fetch.pages, READ_S + LATE * choice.fetch_s)

    def _that_reads(self, hash: PageHash) -> _Coming | None:
        return next((one for one in self._coming if not one.reading.cancelled and hash in one.fetch.hashes), None)

    def _end(self, coming: _Coming) -> None:
        """Handles the end of a read: its pages go into the prefix cache, its owner is queued, and the other jobs that
        waited for it choose again."""
        self._coming.remove(coming)
        kept = coming.reading.kept
        self._planner.transfers.fetched(coming.fetch, [PageFlags(one.exact, one.drafted) for one in kept])
        self._changes += 1
        brought = self._count(coming)
        for id, waiting in list(self._jobs.items()):
            if waiting.coming is coming:
                waiting.coming = None
                if id == coming.owner:
                    self._go_on(id, brought)

    def _go_on(self, id: JobId, brought: Brought | None = None) -> None:
        del self._jobs[id]
        if self._planner.transfers.lack(id) is not None:
            self._planner.transfers.compute_here(id, brought)
            self._changes += 1

    def _count(self, coming: _Coming) -> Brought | None:
        """Counts the pages of a read and the error of its prediction. -> its summary; None if it has read no page."""
        reading, choice = coming.reading, coming.choice
        if not reading.kept:
            return None
        took = self._clock() - coming.began
        brought = _by_tier(reading.kept)
        whole = len(reading.kept) == len(reading.hashes)
        saved = 0.0 if choice.compute_s is None else choice.saves_s + choice.fetch_s - (took - coming.room_s)
        if whole:  # the prediction is for a complete read
            self.readings[coming.busy].observed(brought, took - coming.ahead_s, coming.saved)
        for tier, count in zip(TIERS, brought, strict=True):
            share, tally = count / len(reading.kept), self._tallies[tier]
            tally.hit_tokens += count * PAGE_TOKENS
            tally.read_bytes += count * self.store.page_bytes
            if whole:
                tally.read_s += share * took
                tally.predicted_s += share * choice.fetch_s
                tally.error_s += share * abs(took - choice.fetch_s)
                tally.saved_s += share * max(0.0, saved)
                tally.lost_s += share * max(0.0, -saved)
        host, disk = (count * PAGE_TOKENS for count in brought)
        known = choice.compute_s is not None and choice.rest_s is not None
        return Brought(
            host_tokens=host,
            disk_tokens=disk,
            read_s=took,
            predicted_s=choice.fetch_s,
            compute_s=choice.saves_s + choice.fetch_s if known else None,
        )


def _by_tier(found: Sequence[Found]) -> list[int]:
    """The number of these pages in each tier."""
    return [sum(one.tier == tier for one in found) for tier in TIERS]


def _load(name: str, tally: _Tally, **there: object) -> TierLoad:
    return TierLoad(name=name, **vars(tally), **there)  # type: ignore[arg-type]
