"""Pages below the prefix cache: in the host's memory, and behind it on disk, each under its hash.

Whoever drives it (the loop's thread) saves pages that the cache forgets, asks what there is, and begins readings. One
thread of its own does the rest, one thing after another: it seals what was saved with a checksum, reads, verifies and
puts pages in their place, writes to the disk what memory will give up next, and pins memory before it is needed. So a
step never waits for the disk. On a GPU to save is to launch: whatever is launched on the stream of steps from then on
waits for the device to have gathered the pages, and the host for nothing.

Where a page's checksum is not the one that it was sealed with, or its bytes are not all there, it is forgotten, which
is logged once, and whoever wanted it computes.
"""

import heapq
import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from redline import clock
from redline.errors import ConfigError
from redline.run.tiers.copies import Copied, Copies, Leaving, wait
from redline.run.tiers.disk import DiskPages, Place
from redline.run.tiers.memory import Entry, HostPages, pinned, unpin
from redline.run.tiers.pages import TOGETHER, WholePages, seal, seed_of
from redline.run.tiers.parts import Parts
from redline.wire.job import PageHash, PageId

Tier = Literal["host", "disk"]

EXACT, DRAFTED = 1, 2  # flags of a page: as `PrefixCache.match` has them
AHEAD = 4  # one in so many slots is free, or its page is on disk too, before it is needed
LOOK_S = 0.0002  # between two looks at whether other ranks have what they were told of, or saved pages are here
REST_S = 60.0  # for a disk that took no page
DISK_S = 1e-9  # for a byte from the disk, as a first guess

_log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """A page that is to be kept."""

    hash: PageHash
    page: PageId
    exact: bool
    drafted: bool


class Found(NamedTuple):
    """A page that is kept."""

    tier: Tier
    exact: bool
    drafted: bool


class Reading:
    """Pages on their way back. Once `ended`, nothing writes to them any more, and the first `len(kept)` are in place.

    kept: what is known of each.
    """

    def __init__(self, hashes: Sequence[PageHash], found: Sequence[Found]) -> None:
        self.hashes, self.found = tuple(hashes), tuple(found)
        self.pages: tuple[PageId, ...] = ()
        self.kept: list[Found] = []
        self.ended = threading.Event()
        self.until = 0.0  # of the store's clock
        self.cancelled = False


class _Fetched(NamedTuple):
    """A page's bytes on the host, and what they should be."""

    tier: Tier
    hash: PageHash
    flags: int
    checksum: Callable[[], int]  # to be called once they are copied
    bytes_B: Tensor


class _Put(NamedTuple):
    """Pages that are on their way to their places."""

    pages: tuple[_Fetched, ...]
    copied: Copied


class _Order(IntEnum):
    """What the thread does first."""

    READ = 0  # for which somebody waits; also before what its room was made of is sealed
    SEAL = 1
    WRITE = 2


class Others(Protocol):
    """The other ranks of a model, whose pages are to hold what this one's do."""

    def memory(self, size: int) -> Tensor:
        """Memory of the host that all ranks read: uint8 [size], pinned where pages are a GPU's. Raises ConfigError
        where there is not so much."""
        ...

    def put(self, page: PageId, bytes_B: Tensor) -> Callable[[], bool]:
        """Has them put a whole page, which lies in such memory, into theirs of that number, before any step that is
        launched from now on. -> whether they need the bytes no more, which raises RankLost where one is lost."""
        ...


class Store:
    """Pages of one engine.

    page_s: seconds for a page of each tier, as a first guess. parts: what its time goes to.
    """

    def __init__(
        self,
        pages: WholePages,
        host_bytes: int,
        disk: DiskPages | None = None,
        *,
        share: float = 1.0,
        clock: Callable[[], float] = clock.perf_counter,
        others: Others | None = None,
    ) -> None:
        """host_bytes: of the host's memory, for pages. share: of the thread's time, that readings take while steps run.
        The disk is the store's from now on: its thread reads the index first. others: where several ranks share the
        model; pages are saved from this one's alone, since they are the same on all."""
        self._busy = False
        self.parts = Parts()
        self.share = share
        self.counts: Counter[tuple[Tier, str]] = Counter()
        self.disk = disk
        self.page_bytes = pages.size
        self._pages, self._clock = pages, clock
        gpu = pages.device.type == "cuda"
        self._others = others
        memory = None if others is None else others.memory
        self._host = HostPages(pages.size, host_bytes, pinned=gpu, memory=memory)
        self._copies = Copies(pages)
        self._together = pages.together if others is None else TOGETHER
        # Times so many pages, that are put and not looked at yet.
        self._under_way = 2 if pages.together > 1 and others is None else 1
        self._lock = threading.Condition()  # of all that follows
        self._on_disk: Mapping[PageHash, Place] = {} if disk is None else disk.places
        self._held: dict[Reading, list[Entry]] = {}  # by readings that have not ended
        self._work: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._working = False
        self._rests_until = 0.0  # the disk takes nothing before
        self._warned: set[str] = set()
        self._ended = False
        places = self._under_way * self._together
        size = places * pages.size
        if memory is None:
            memory = pinned if gpu else partial(torch.empty, dtype=torch.uint8)
        self._scratch = memory(size).view(places, pages.size)
        page_s = self._copies.measure(self._scratch[0], clock)
        self.page_s: Mapping[Tier, float] = {"host": page_s, "disk": page_s + DISK_S * pages.size}
        self._thread = threading.Thread(target=self._serve, name="tiers", daemon=True)
        self._thread.start()
        if disk is not None:
            disk.removed = self._removed
            self._put(_Order.SEAL, lambda: self._load(disk))

    # ------------------------------------------------------------------------------------------ the caller's thread

    @property
    def busy(self) -> bool:
        """Whether steps run, which readings make room for, and beside which memory is pinned only where it must be."""
        return self._busy

    @busy.setter
    def busy(self, busy: bool) -> None:
        if busy == self._busy:
            return
        with self._lock:
            self._busy = busy
            self._lock.notify_all()

    @property
    def host_pages(self) -> int:
        """Pages in the host's memory."""
        return len(self._host)

    @property
    def host_most(self) -> int:
        """Pages that the host's memory has room for."""
        return self._host.slots.total

    def save(self, pages: Sequence[Saved]) -> int:
        """Keeps pages that nobody writes to; once this returns they may be overwritten, on a GPU by what is launched on
        the stream of steps. Those that are kept already, and no better now, are only marked as used. Where there is no
        room for one, it is lost, and counted. -> how many were copied."""
        new: list[tuple[Saved, int]] = []
        with self.parts.of("save: room"), self._lock:
            for one in pages:
                flags = _flags(one.exact, one.drafted)
                entry = self._host.find(one.hash)
                if entry is not None and (entry.flags | flags == entry.flags or entry.stays):
                    self._host.touch(one.hash)
                    continue
                place = self._on_disk.get(one.hash)
                if entry is None and place is not None and place.flags | flags == place.flags:
                    continue
                if entry is not None:
                    self._host.drop(one.hash)
                slot = self._room()
                if slot is None and self._land():
                    slot = self._room()
                if slot is None:
                    self.counts["host", "lost"] += 1
                    continue
                new.append((one, slot))
        if not new:
            return 0
        with self.parts.of("save: launch"):
            leaving = list[Leaving]()
            for one, slot in reversed(new):  # what was freed last is filled first
                seed = seed_of(one.hash, _flags(one.exact, one.drafted))
                leaving.append(Leaving(one.page, self._host.slots.bytes_of(slot), seed))
            copied = self._copies.save(leaving)
        if self._others is not None:  # a rank that runs ahead would not wait for what this one's stream does
            with self.parts.of("save: wait"):
                wait(copied.ended)
        sealing: list[tuple[PageHash, Entry]] = []
        with self.parts.of("save: books"), self._lock:
            for at, (one, slot) in enumerate(new, 1):
                entry = self._host.put(one.hash, slot, _flags(one.exact, one.drafted))
                entry.coming = copied.ended if self._others is None else None
                entry.sum = None if copied.sums is None else (copied.sums, len(new) - at)
                sealing.append((one.hash, entry))
                self.counts["host", "stored"] += 1
        sealing.reverse()  # as they were copied
        self._put(_Order.SEAL, lambda: self._seal(sealing, copied))
        return len(new)

    def find(self, hashes: Sequence[PageHash], *, exact: bool = False, drafted: bool = False) -> list[Found]:
        """The longest run of these, from the first on, that is kept. exact, drafted: only such pages count."""
        wanted, found = _flags(exact, drafted), list[Found]()
        with self._lock:
            for hash in hashes:
                one = self._look(hash)
                if one is None or one[1] & wanted != wanted:
                    break
                found.append(Found(one[0], bool(one[1] & EXACT), bool(one[1] & DRAFTED)))
        return found

    def hold(self, hashes: Sequence[PageHash]) -> Reading | None:
        """Keeps these where they are until they are read or let go; None where one is kept no more."""
        with self._lock:
            looked = [self._look(hash) for hash in hashes]
            found = [Found(one[0], bool(one[1] & EXACT), bool(one[1] & DRAFTED)) for one in looked if one is not None]
            if len(found) < len(looked):
                return None
            reading = Reading(hashes, found)
            for hash in hashes:
                if (entry := self._host.find(hash)) is not None:
                    self._holds(reading, entry)
        return reading

    def let_go(self, reading: Reading) -> None:
        """A reading that has not been begun is not wanted."""
        self._end_of(reading)

    def read(self, reading: Reading, pages: Sequence[PageId], seconds: float) -> None:
        """Begins to put the pages that it holds into these, which nobody else writes or reads until it has ended.
        seconds: that it may take; it ends then with what is there."""
        reading.pages, reading.until = tuple(pages), self._clock() + seconds
        self._put(_Order.READ, lambda: self._read(reading))

    def flush(self, seconds: float) -> None:
        """Writes to the disk what is in memory alone, most lately used first, for so long at most. It is to be closed
        then."""
        if self.disk is None:
            return
        until = self._clock() + seconds
        with self._lock:
            self._host.slots.ahead = None  # nobody needs more memory
        self.settle(seconds)
        with self._lock:
            hashes = list(reversed(self._host.dirty))
        for hash in hashes:
            self._put(_Order.WRITE, lambda hash=hash: self._clock() < until and self._write(hash))
        self.settle(max(0.0, until - self._clock()))

    def settle(self, seconds: float) -> bool:
        """Waits until the thread has nothing to do, for so long at most; whether it is so."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._working and not self._wanted(), seconds)

    def close(self) -> None:
        """Ends the thread once it is done with what it does now, and lets go of the files. Readings end as they are."""
        with self._lock:
            self._ended = True
            self._lock.notify_all()
        self._thread.join()
        for reading in list(self._held):
            self._end_of(reading)
        self._copies.close()
        self._host.slots.close()
        if self._pages.device.type == "cuda" and self._others is None:
            unpin(self._scratch)
        if self.disk is not None:
            self.disk.close()

    def check(self) -> None:
        """Raises AssertionError unless every slot is one page's or free. The thread must have nothing to do."""
        with self._lock:
            self._host.check()
            for entry in self._host:
                holding = sum(entries.count(entry) for entries in self._held.values())
                assert entry.readings == holding, f"{entry.readings} readings counted, {holding} hold a page"
            if self.disk is not None and not self._work and not self._working:
                self.disk.check()
                assert self._host.clean.keys() <= self._on_disk.keys(), "a page is given up that is nowhere else"

    # -------------------------------------------------------------------------------------- with the lock, by either

    def _look(self, hash: PageHash) -> tuple[Tier, int] | None:
        entry = self._host.find(hash)
        if entry is not None:
            return "host", entry.flags
        place = self._on_disk.get(hash)
        return None if place is None else ("disk", place.flags)

    def _room(self) -> int | None:
        """A slot to fill; None where all pages stay."""
        slot, given_up = self._host.take()
        if given_up is not None:
            self.counts["host", "lost" if given_up == "dirty" and self.disk is not None else "given up"] += 1
        return slot

    def _wanted(self) -> bool:
        """Whether the thread has something to do."""
        return bool(self._work) or self._host.slots.short(busy=self._busy)

    def _land(self) -> bool:
        """Waits for the pages that are still coming, so that they can be given up; whether there were any."""
        coming = [entry for entry in self._host if entry.coming is not None]
        for entry in coming:
            wait(entry.coming)
            entry.coming = None
        return bool(coming)

    def _holds(self, reading: Reading, entry: Entry) -> None:
        entry.readings += 1
        self._held.setdefault(reading, []).append(entry)

    def _end_of(self, reading: Reading) -> None:
        with self._lock:
            for entry in self._held.pop(reading, ()):
                entry.readings -= 1
        reading.ended.set()

    def _put(self, order: _Order, work: Callable[[], object]) -> None:
        with self._lock:
            if not self._ended:
                heapq.heappush(self._work, (order, next(self._numbers), work))
                self._lock.notify_all()

    # ------------------------------------------------------------------------------------------- the store's thread

    def _serve(self) -> None:
        if self._pages.device.type == "cuda":
            torch.cuda.set_device(self._pages.device)  # which each thread has to be told
        while True:
            with self._lock:
                self._working = False
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._ended or self._wanted())
                if self._ended:
                    return
                work = heapq.heappop(self._work)[2] if self._work else self._make_room
                self._working = True
            try:
                work()
            except Exception as error:  # a tier may be lost, its caller not
                self._warn(f"memory below the prefix cache: {type(error).__name__}: {error}")

    def _make_room(self) -> None:
        """Makes a slab of memory before it is needed: pinning is waited for by nobody, but who needs it meanwhile."""
        with self.parts.of("thread: pin"):
            slab = self._host.slots.slab()
        with self._lock:
            self._host.slots.add(slab)

    def _load(self, disk: DiskPages) -> None:
        try:
            for count in disk.load():
                self.counts["disk", "found"] += count
                if self._ended:
                    return
        except OSError as error:
            self._rest(error)

    def _seal(self, new: Sequence[tuple[PageHash, Entry]], copied: Copied) -> None:
        """Seals pages once they are copied. A reading goes before them."""
        with self.parts.of("thread: wait for saved"):
            while copied.ended is not None and not copied.ended.query():
                with self._lock:
                    if self._ended:
                        return
                    if self._work and self._work[0][0] < _Order.SEAL:
                        again = _Order.SEAL, next(self._numbers), lambda: self._seal(new, copied)
                        heapq.heappush(self._work, again)
                        return
                    self._lock.wait(LOOK_S)
        with self.parts.of("thread: seal"):
            for hash, entry in new:
                self._checksum(hash, entry)  # memory may have given it up: then the number is nobody's
        with self._lock:
            for _, entry in new:
                entry.coming = None
        self._write_ahead()

    def _checksum(self, hash: PageHash, entry: Entry) -> int:
        """The checksum of a page in memory, whose copy has ended; it is sealed with it from then on."""
        if entry.checksum is None:
            if entry.sum is None:
                found = seal(self._host.slots.bytes_of(entry.slot), seed_of(hash, entry.flags))
            else:
                sums, at = entry.sum
                found = int(sums[at])
            entry.checksum, entry.sum = found % 2**64, None
        return entry.checksum

    def _write_ahead(self) -> None:
        """Has pages written that memory will give up next."""
        if self.disk is None or self._clock() < self._rests_until:
            return
        with self._lock:
            wanted = max(1, self._host.slots.total // AHEAD) - self._host.slots.free - len(self._host.clean)
            for hash, entry in self._host.dirty.items():
                if wanted <= 0:
                    break
                wanted -= 1
                if not entry.writing and entry.checksum is not None:
                    entry.writing = True
                    heapq.heappush(self._work, (_Order.WRITE, next(self._numbers), lambda of=hash: self._write(of)))

    def _write(self, hash: PageHash) -> None:
        with self._lock:
            entry = self._host.dirty.get(hash)
            if entry is None or entry.checksum is None:
                return
            entry.writing = True
        try:
            if self.disk is not None and self._clock() >= self._rests_until:
                page = self._host.slots.bytes_of(entry.slot).numpy().data
                with self.parts.of("thread: write"):
                    self.disk.write(hash, page, entry.checksum, entry.flags)
                self.counts["disk", "stored"] += 1
                with self._lock:
                    self._host.written(hash)
        except (OSError, ConfigError) as error:  # ConfigError: the folder was removed, and is another process's now
            self._rest(error)
        finally:
            entry.writing = False

    def _removed(self, hashes: Sequence[PageHash]) -> None:
        """The disk has made room: what it has no more is in memory alone, if at all."""
        self.counts["disk", "given up"] += len(hashes)
        with self._lock:
            for hash in hashes:
                self._host.unwritten(hash)

    def _rest(self, error: OSError | ConfigError) -> None:
        """The disk takes no pages for a while."""
        self._rests_until = self._clock() + REST_S
        why = error.strerror or error if isinstance(error, OSError) else error
        self._warn(f"the disk takes no more pages: {why}; it is tried again every {REST_S:g} s")

    def _warn(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            _log.warning("%s", line)

    def _read(self, reading: Reading) -> None:
        """Puts pages in their place until one cannot be had, or the reading is wanted no more."""
        kept, put, at, whole = list[Found](), deque[_Put](), 0, True
        try:
            while put or (whole and at < len(reading.hashes)):
                if whole and at < len(reading.hashes) and len(put) < self._under_way:
                    began, busy = self._clock(), self.busy
                    fetched = self._fetch_some(reading, at)
                    whole = len(fetched) == min(self._together, len(reading.hashes) - at)
                    if fetched:
                        with self.parts.of("read: launch"):
                            put.append(self._bring(reading.pages[at : at + len(fetched)], fetched))
                    at += len(fetched)
                    if busy and self.share < 1:
                        clock.sleep((self._clock() - began) * (1 / self.share - 1))
                    continue
                of = put.popleft()
                good = self._there(reading, len(kept), of)
                kept += good
                if len(good) < len(of.pages):
                    break
        finally:
            self._copies.brought()
            reading.kept = kept
            self._end_of(reading)
        with self._lock:
            for hash in reversed(reading.hashes):
                self._host.touch(hash)
        if self.disk is not None:
            files = {place.file for hash in reading.hashes if (place := self._on_disk.get(hash)) is not None}
            self.disk.use(files, clock.now_ns())

    def _fetch_some(self, reading: Reading, at: int) -> list[_Fetched]:
        """The next pages of a reading, from that one on, as many as go together; fewer where one cannot be had, or it
        is wanted no more."""
        fetched = list[_Fetched]()
        with self.parts.of("read: fetch"):
            for number, hash in enumerate(reading.hashes[at : at + self._together], at):
                if reading.cancelled or self._clock() >= reading.until or self._ended:
                    break
                one = self._fetch(reading, hash, self._scratch[number % len(self._scratch)])
                if one is None:
                    break
                fetched.append(one)
        return fetched

    def _bring(self, pages: Sequence[PageId], fetched: Sequence[_Fetched]) -> _Put:
        """Puts pages into their places."""
        seeds = [seed_of(one.hash, one.flags) for one in fetched]
        return _Put(tuple(fetched), self._copies.bring(pages, [one.bytes_B for one in fetched], seeds))

    def _fetch(self, reading: Reading, hash: PageHash, scratch: Tensor) -> _Fetched | None:
        """A page's bytes, in memory that stays until they are copied; None where they cannot be had. Where memory has
        no room for what comes from the disk it goes through `scratch`."""
        with self._lock:
            entry, place = self._host.find(hash), self._on_disk.get(hash)
            if entry is not None and entry not in self._held.get(reading, ()):
                self._holds(reading, entry)  # it was on disk alone when the reading began, and was saved anew since
        if entry is not None:
            if (coming := entry.coming) is not None:
                self._copies.after(coming)
            checksum = partial(self._checksum, hash, entry)
            return _Fetched("host", hash, entry.flags, checksum, self._host.slots.bytes_of(entry.slot))
        if place is None or self.disk is None:
            return None
        with self._lock:
            slot = self._room()
        into = scratch if slot is None else self._host.slots.bytes_of(slot)
        why = _from_disk(self.disk, place, into)
        twice = False
        if slot is not None:
            with self._lock:
                twice = self._host.find(hash) is not None  # it was saved anew meanwhile
                if why is None and not twice:
                    entry = self._host.put(hash, slot, place.flags, place.checksum, clean=True)
                    self._holds(reading, entry)
                else:
                    self._host.give_back(slot)
        if why is not None:
            self._spoilt("disk", hash, why)
        if why is not None or twice:
            return None
        return _Fetched("disk", hash, place.flags, lambda: place.checksum, into)

    def _good(self, put: _Put) -> list[Found]:
        """What is known of the first of these pages, up to one whose bytes are wrong: that one is forgotten."""
        wait(put.copied.ended)
        assert put.copied.sums is not None, "what is brought is added up"
        good: list[Found] = []
        for one, got in zip(put.pages, put.copied.sums.tolist(), strict=True):
            if one.checksum() != got % 2**64:
                self._spoilt(one.tier, one.hash, "has another checksum than it was sealed with")
                break
            good.append(Found(one.tier, bool(one.flags & EXACT), bool(one.flags & DRAFTED)))
        return good

    def _there(self, reading: Reading, first: int, put: _Put) -> list[Found]:
        """As `_good`, of the reading's pages from `first` on; and the other ranks have them too. Raises RankLost."""
        with self.parts.of("read: wait"):
            good = self._good(put)
        if self._others is not None:
            pages = reading.pages[first : first + len(good)]
            told = [self._others.put(page, one.bytes_B) for page, one in zip(pages, put.pages, strict=False)]
            while not all(ended() for ended in told):
                clock.sleep(LOOK_S)
        return good

    def _spoilt(self, tier: Tier, hash: PageHash, why: str) -> None:
        """A page is no use. That of its name in another tier may be right, but the same name is not tried twice."""
        self.counts[tier, "spoilt"] += 1
        if not any(line.startswith(f"a page of the {tier}") for line in self._warned):
            self._warn(f"a page of the {tier} {why} ({hash.hex()}): it is forgotten, and computed; others are counted")

        with self._lock:
            if (entry := self._host.find(hash)) is not None and entry.coming is None:
                self._host.drop(hash)
        if self.disk is not None:
            self.disk.spoil(hash)


def _from_disk(disk: DiskPages, place: Place, into: Tensor) -> str | None:
    """Reads a page; what is wrong, where anything is."""
    try:
        return None if disk.read(place, into.numpy().data) else "is not all there"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _flags(exact: bool, drafted: bool) -> int:
    return EXACT * exact | DRAFTED * drafted
