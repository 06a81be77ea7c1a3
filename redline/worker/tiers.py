"""Between the planner and the pages below its prefix cache: what is kept, what is fetched, and whether that pays.

A page that the cache forgets is kept. A job that comes, and whose prompt goes on in pages that are kept, waits for
them where reading them is predicted to take less time than computing them, each learnt from what came before; who is
behind it does not wait. It is queued once they are in their place, or the time that they may take is over, or there has
been no room for them: then it computes what is missing, as it would have done.

All of it runs in the loop's thread between two steps, and takes microseconds; the reading is done by the store's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redline import clock
from redline.plan.below import Fetch, Kept, Lack
from redline.plan.planner import Planner
from redline.plan.prefix import Forgotten
from redline.run.tiers.store import Found, Reading, Saved, Store, Tier
from redline.tune.tiers import Choice, PrefillTimes, ReadTimes, choose
from redline.wire.delta import Brought
from redline.wire.job import PAGE_TOKENS, JobId, PageHash
from redline.wire.news import TierLoad
from redline.wire.step import Step

READ_S, LATE = 5.0, 2.0  # for one job's pages to come, and times what is predicted more; what is there by then counts
ROOM_S = 2.0  # for room to be there, once nobody waits who came before
FLUSH_S = 5.0  # to write to the disk what is in memory, when the worker ends
BEGIN_S = 0.001  # of a reading, beside its pages, until that was measured
SOON_S = 0.0005  # between two looks at what is under way
TIERS: tuple[Tier, ...] = ("host", "disk")

# Of the store's thread, that may go to reading while steps run. A CPU's kernels have every core; a GPU's host is idle.
SHARE = {"cpu": 0.25, "cuda": 1.0}


@dataclass(eq=False)
class _Coming:
    """Pages that are being read."""

    fetch: Fetch
    reading: Reading
    choice: Choice
    began: float  # seconds, before room was made for them
    ahead_s: float  # that it was to wait for others
    saved: int  # pages, to make room
    room_s: float  # that saving them was predicted to take of its time
    busy: bool  # whether steps ran when it was chosen
    owner: JobId  # for whom they are read
    jobs: set[JobId]  # that wait for them, the owner included


@dataclass(eq=False)
class _Waiting:
    """A job that waits for pages."""

    since: float  # that it has waited for nobody who came before it
    coming: _Coming | None = None


@dataclass
class _Tally:
    """What has come of a tier's pages."""

    hit_tokens: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    predicted_s: float = 0.0
    error_s: float = 0.0
    saved_s: float = 0.0
    lost_s: float = 0.0


class Tiers:
    """The pages below one worker's prefix cache (`plan.below.Below`). The loop's thread uses it.

    `changes` grows whenever the planner has been told something, so that it may have a step to plan.
    """

    def __init__(
        self,
        planner: Planner,
        store: Store,
        *,
        step_tokens: int,
        experts: tuple[int, int] = (0, 0),
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """step_tokens: positions that a step computes, at most. experts: of a layer, how many there are and how many a
        token chooses; 0: all weights are read by every step."""
        self.changes = 0
        self.store = store
        self.prefills = PrefillTimes(*experts)
        self._planner, self._clock, self._step_tokens = planner, clock, step_tokens
        self._jobs: dict[JobId, _Waiting] = {}  # in the order in which they came
        self._coming: list[_Coming] = []
        self._tallies = {tier: _Tally() for tier in TIERS}
        self._of_prefills = _Tally()
        page_s, share = [store.page_s[tier] for tier in TIERS], store.share
        save_s = store.page_s["host"]
        self.readings = {  # by whether steps run
            False: ReadTimes(BEGIN_S, page_s, save_s),
            True: ReadTimes(BEGIN_S, [seconds / share for seconds in page_s], save_s),
        }
        self._saved = 0  # pages, since the start
        planner.attach(self)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._jobs or self._coming)

    def due_in(self) -> float | None:
        """Seconds until `work` may have something to do without a message; None: never."""
        return None if self.idle else SOON_S

    # ------------------------------------------------------------------------------------- what the planner hands on

    def forgets(self, pages: Sequence[Forgotten]) -> None:
        """As `Below.forgets`."""
        self._saved += self.store.save([Saved(*page) for page in pages])

    def awaits(self, id: JobId, lack: Lack) -> bool:
        """As `Below.awaits`."""
        if not self._choose(lack).pages:
            return False
        self._jobs[id] = _Waiting(self._clock())
        return True

    def took(self, step: Step, seconds: float) -> None:
        """As `Below.took`."""
        self.store.parts.took("step", seconds)
        rows = [(row.start, row.count) for row in step.rows if row.start is not None]
        if not rows:
            return
        decoding = sum(row.count for row in step.rows if row.start is None)
        if not decoding and len(rows) == 1:  # what is predicted of one prompt is held against it
            first, count = rows[0]
            predicted = self.prefills.predict(first, first + count, self._step_tokens)
            if predicted is not None:
                self._of_prefills.predicted_s += predicted
                self._of_prefills.read_s += seconds
                self._of_prefills.error_s += abs(predicted - seconds)
        self.prefills.observed(rows, decoding, seconds)

    # ----------------------------------------------------------------------------------------------------- a turn

    def work(self) -> None:
        """Moves on what is under way: ends readings, begins others, lets jobs go on."""
        self.store.busy = not self._planner.idle
        if self.idle:
            return
        now = self._clock()
        for coming in self._coming:
            coming.jobs = {id for id in coming.jobs if self._planner.lack(id) is not None}
            coming.reading.cancelled |= not coming.jobs
        for coming in [one for one in self._coming if one.reading.ended.is_set()]:
            self._end(coming)
        for id, waiting in list(self._jobs.items()):
            if waiting.coming is None:
                self._move(id, waiting, now)

    def load(self) -> tuple[TierLoad, ...]:
        """What there is of each tier, and what has come of it; and, as "compute", how well prompts are predicted."""
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

    def close(self) -> None:
        """Keeps what the prefix cache has, writes to the disk what there is time for, and ends the store's thread.

        Nothing of the planner may run any more."""
        for coming in self._coming:
            coming.reading.cancelled = True
            coming.reading.ended.wait(READ_S)
        self.work()
        if self.store.disk is not None:
            self._planner.forget_idle()
            self.store.flush(FLUSH_S)
        self.store.close()

    def check(self) -> None:
        """Raises AssertionError unless what waits and what is read belong together."""
        for id, waiting in self._jobs.items():
            assert waiting.coming is None or id in waiting.coming.jobs, f"job {id} waits for what does not know of it"
            assert waiting.coming is None or waiting.coming in self._coming, f"job {id} waits for what has ended"

    def _choose(self, lack: Lack) -> Choice:
        """How much of what a prompt lacks is worth reading."""
        if not lack.hashes:
            return Choice(0)
        found = self.store.find(lack.hashes, exact=lack.exact, drafted=lack.drafted)
        if not found:
            return Choice(0)
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
        """Seconds until the readings are done that have been begun, as predicted."""
        now = self._clock()
        return sum(max(0.0, one.choice.fetch_s - (now - one.began)) for one in self._coming)

    def _move(self, id: JobId, waiting: _Waiting, now: float) -> None:
        """Begins to read for a job, has it wait for what another reads, or lets it go on."""
        lack = self._planner.lack(id)
        if lack is None:  # it was aborted
            del self._jobs[id]
            return
        if lack.hashes and (coming := self._that_reads(lack.hashes[0])) is not None:
            waiting.coming = coming
            coming.jobs.add(id)
            return
        if not self._planner.comes_next(id):
            waiting.since = now  # it would not have begun to compute either
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
            fetch = self._planner.fetch(id, choice.pages)
        if fetch is None:
            self.store.let_go(reading)
            return
        # Making room takes a copy of each page that goes. It would where the prompt was computed, so it was no part of
        # the choice; but the first token waits for it.
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
        """A reading has ended: the cache has its pages. Whose it was goes on; who waited with it looks again."""
        self._coming.remove(coming)
        kept = coming.reading.kept
        self._planner.fetched(coming.fetch, [Kept(one.exact, one.drafted) for one in kept])
        self.changes += 1
        brought = self._count(coming)
        for id, waiting in list(self._jobs.items()):
            if waiting.coming is coming:
                waiting.coming = None
                if id == coming.owner:
                    self._go_on(id, brought)

    def _go_on(self, id: JobId, brought: Brought | None = None) -> None:
        del self._jobs[id]
        if self._planner.lack(id) is not None:
            self._planner.compute_here(id, brought)
            self.changes += 1

    def _count(self, coming: _Coming) -> Brought | None:
        """What a reading has brought, and how well it was predicted; None where it has brought nothing."""
        reading, choice = coming.reading, coming.choice
        if not reading.kept:
            return None
        took = self._clock() - coming.began
        brought = _by_tier(reading.kept)
        whole = len(reading.kept) == len(reading.hashes)
        saved = 0.0 if choice.compute_s is None else choice.saves_s + choice.fetch_s - (took - coming.room_s)
        if whole:  # what was given up half-way was not predicted
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
    """How many of these pages each tier has."""
    return [sum(one.tier == tier for one in found) for tier in TIERS]


def _load(name: str, tally: _Tally, **there: object) -> TierLoad:
    return TierLoad(name=name, **vars(tally), **there)  # type: ignore[arg-type]
