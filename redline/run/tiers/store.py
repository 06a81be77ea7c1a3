"""KV offload tiers below the prefix cache: pages in host memory and, below that, on disk, each under its hash.

The caller (the loop's thread) saves pages that the prefix cache evicts, looks up stored pages, and starts reads. The
store's own thread does the rest, one task at a time: it computes the checksum of saved pages, reads, verifies and
copies pages into the KV pool, writes the pages to disk that host memory will evict next, and pins memory before it is
needed. So a step never waits for the disk. On a GPU, saving a page only launches a copy: work launched later on the
stream of steps waits on the device until the pages are gathered, and the host does not wait.

If a page's checksum differs from the one computed when it was saved, or its bytes are incomplete, the page is dropped,
which is logged once, and the request that wanted it recomputes it.
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
from redline.messages.job import PageHash, PageId
from redline.run.tiers.copies import Copied, Copies, Leaving, wait
from redline.run.tiers.disk import DiskPages, Place
from redline.run.tiers.memory import Entry, HostPages, pinned, unpin
from redline.run.tiers.pages import TOGETHER, WholePages, seal, seed_of
from redline.run.tiers.parts import Parts

Tier = Literal["host", "disk"]

EXACT, DRAFTED = 1, 2  # flags of a page, as in `PrefixCache.match`
AHEAD = 4  # one in AHEAD slots is kept free, or its page is written to disk ahead of need
LOOK_S = 0.0002  # seconds between two polls of whether other ranks have received a page, or saved pages have arrived
REST_S = 60.0  # seconds for which the disk is not used after a failed write
DISK_S = 1e-9  # seconds per byte from the disk, as an initial estimate

_log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """A page to save."""

    hash: PageHash
    page: PageId
    exact: bool
    drafted: bool


class Found(NamedTuple):
    """A stored page."""

    tier: Tier
    exact: bool
    drafted: bool


class Reading:
    """A read of stored pages. Once `ended` is set, nothing writes to the target pages any more, and the first
    `len(kept)` are valid.

    kept: the tier and flags of each valid page.
    """

    def __init__(self, hashes: Sequence[PageHash], found: Sequence[Found]) -> None:
        self.hashes, self.found = tuple(hashes), tuple(found)
        self.pages: tuple[PageId, ...] = ()
        self.kept: list[Found] = []
        self.ended = threading.Event()
        self.until = 0.0  # deadline, by the store's clock
        self.cancelled = False


class _Fetched(NamedTuple):
    """A page's bytes on the host, and the expected checksum."""

    tier: Tier
    hash: PageHash
    flags: int
    checksum: Callable[[], int]  # to be called after the copy
    bytes_B: Tensor


class _Put(NamedTuple):
    """Pages that are being copied into the KV pool."""

    pages: tuple[_Fetched, ...]
    copied: Copied


class _Order(IntEnum):
    """Priorities of the thread's tasks, highest first."""

    READ = 0  # a request waits for it; also runs before the pages that made room for it get their checksums
    SEAL = 1
    WRITE = 2


class Others(Protocol):
    """The other tensor parallel ranks of a model; their KV pools must have the same contents as this rank's."""

    def memory(self, size: int) -> Tensor:
        """Host memory that all ranks can read: uint8 [size], pinned if pages are on a GPU. Raises ConfigError if
        there is too little."""
        ...

    def put(self, page: PageId, bytes_B: Tensor) -> Callable[[], bool]:
        """Has the other ranks copy a whole page from such memory into their page of the same number, before any step
        launched from now on. -> a function: whether they no longer need the bytes; it raises RankLost if a rank is
        down."""
        ...


class Store:
    """The KV offload tiers of one engine.

    page_s: initial estimate of the seconds per page of each tier. parts: time spent by part of the work.
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
        """host_bytes: host memory for pages. share: share of the thread's time that reads may take while steps run.
        disk: owned by the store from now on; its thread reads the index first. others: the other ranks, if tensor
        parallel ranks share the model; pages are saved from this rank only, since they are the same on all ranks."""
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
        # Batches of pages that are being copied and not verified yet.
        self._under_way = 2 if pages.together > 1 and others is None else 1
        self._lock = threading.Condition()  # protects all following attributes
        self._on_disk: Mapping[PageHash, Place] = {} if disk is None else disk.places
        self._held: dict[Reading, list[Entry]] = {}  # by reads that have not ended
        self._work: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._working = False
        self._rests_until = 0.0  # no writes to the disk before this time
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
        """Whether steps run. If so, reads take only their share of the time, and memory is pinned only if it must
        be."""
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
        """Pages in host memory."""
        return len(self._host)

    @property
    def host_most(self) -> int:
        """Pages that fit into host memory."""
        return self._host.slots.total

    def save(self, pages: Sequence[Saved]) -> int:
        """Saves pages that are not being written. Once this returns they may be overwritten; on a GPU, by work
        launched on the stream of steps. Pages that are stored already with the same or better flags are only marked
        as used. A page without room is lost, and counted. -> how many were copied."""
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
            for one, slot in reversed(new):  # the slot freed last is filled first
                seed = seed_of(one.hash, _flags(one.exact, one.drafted))
                leaving.append(Leaving(one.page, self._host.slots.bytes_of(slot), seed))
            copied = self._copies.save(leaving)
        if self._others is not None:  # other ranks' streams do not wait for this rank's copies
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
        sealing.reverse()  # in the order of their copies
        self._put(_Order.SEAL, lambda: self._seal(sealing, copied))
        return len(new)

    def find(self, hashes: Sequence[PageHash], *, exact: bool = False, drafted: bool = False) -> list[Found]:
        """The longest prefix of `hashes` that is stored. exact, drafted: only pages with that flag count."""
        wanted, found = _flags(exact, drafted), list[Found]()
        with self._lock:
            for hash in hashes:
                one = self._look(hash)
                if one is None or one[1] & wanted != wanted:
                    break
                found.append(Found(one[0], bool(one[1] & EXACT), bool(one[1] & DRAFTED)))
        return found

    def hold(self, hashes: Sequence[PageHash]) -> Reading | None:
        """Keeps these pages in their tier until they are read or released; None if one is not stored any more."""
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
        """Releases the pages of a read that was not started."""
        self._end_of(reading)

    def read(self, reading: Reading, pages: Sequence[PageId], seconds: float) -> None:
        """Starts to copy the held pages into `pages`, which must not be written or read until the read has ended.
        seconds: time limit; at the limit the read ends with the pages copied so far."""
        reading.pages, reading.until = tuple(pages), self._clock() + seconds
        self._put(_Order.READ, lambda: self._read(reading))

    def flush(self, seconds: float) -> None:
        """Writes to disk the pages that are only in memory, most recently used first, for at most `seconds` seconds.
        The store must be closed afterwards."""
        if self.disk is None:
            return
        until = self._clock() + seconds
        with self._lock:
            self._host.slots.ahead = None  # stop making memory in advance
        self.settle(seconds)
        with self._lock:
            hashes = list(reversed(self._host.dirty))
        for hash in hashes:
            self._put(_Order.WRITE, lambda hash=hash: self._clock() < until and self._write(hash))
        self.settle(max(0.0, until - self._clock()))

    def settle(self, seconds: float) -> bool:
        """Waits until the thread is idle, at most `seconds` seconds. Returns whether it is."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._working and not self._wanted(), seconds)

    def close(self) -> None:
        """Ends the thread after its current task, and releases the files. Reads end with the pages copied so far."""
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
        """Raises AssertionError unless every slot is free or holds exactly one page. The thread must be idle."""
        with self._lock:
            self._host.check()
            for entry in self._host:
                holding = sum(entries.count(entry) for entries in self._held.values())
                assert entry.readings == holding, f"{entry.readings} readings counted, {holding} hold a page"
            if self.disk is not None and not self._work and not self._working:
                self.disk.check()
                assert self._host.clean.keys() <= self._on_disk.keys(), "a page marked as on disk is not on disk"

    # ------------------------------------------------------------------------------ either thread, holding the lock

    def _look(self, hash: PageHash) -> tuple[Tier, int] | None:
        entry = self._host.find(hash)
        if entry is not None:
            return "host", entry.flags
        place = self._on_disk.get(hash)
        return None if place is None else ("disk", place.flags)

    def _room(self) -> int | None:
        """A slot to fill, evicting a page if necessary; None if no page can be evicted."""
        slot, given_up = self._host.take()
        if given_up is not None:
            self.counts["host", "lost" if given_up == "dirty" and self.disk is not None else "given up"] += 1
        return slot

    def _wanted(self) -> bool:
        """Whether the thread has a task."""
        return bool(self._work) or self._host.slots.short(busy=self._busy)

    def _land(self) -> bool:
        """Waits for the pages that are still being copied, so that they can be evicted. Returns whether there were
        any."""
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
            torch.cuda.set_device(self._pages.device)  # the current device is set per thread
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
            except Exception as error:  # an error of a tier must not end the caller
                self._warn(f"KV offload: {type(error).__name__}: {error}")

    def _make_room(self) -> None:
        """Allocates a slab of memory before it is needed, so that saving pages does not have to wait for pinning."""
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
        """Computes the checksums of saved pages after their copies have ended. Reads go first."""
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
                self._checksum(hash, entry)  # if the page has been evicted since, the number is not used
        with self._lock:
            for _, entry in new:
                entry.coming = None
        self._write_ahead()

    def _checksum(self, hash: PageHash, entry: Entry) -> int:
        """The checksum of a page in memory after its copy has ended; stored with the page."""
        if entry.checksum is None:
            if entry.sum is None:
                found = seal(self._host.slots.bytes_of(entry.slot), seed_of(hash, entry.flags))
            else:
                sums, at = entry.sum
                found = int(sums[at])
            entry.checksum, entry.sum = found % 2**64, None
        return entry.checksum

    def _write_ahead(self) -> None:
        """Queues writes of the pages that memory will evict next."""
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
        # ConfigError: the folder was removed, and now belongs to another process
        except (OSError, ConfigError) as error:
            self._rest(error)
        finally:
            entry.writing = False

    def _removed(self, hashes: Sequence[PageHash]) -> None:
        """Called when the disk has evicted pages: those that are in memory are in memory only."""
        self.counts["disk", "given up"] += len(hashes)
        with self._lock:
            for hash in hashes:
                self._host.unwritten(hash)

    def _rest(self, error: OSError | ConfigError) -> None:
        """Stops writing to the disk for REST_S seconds."""
        self._rests_until = self._clock() + REST_S
        why = error.strerror or error if isinstance(error, OSError) else error
        self._warn(f"KV offload: cannot write pages to disk: {why}; retrying every {REST_S:g} s")

    def _warn(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            _log.warning("%s", line)

    def _read(self, reading: Reading) -> None:
        """Copies pages into the KV pool until one cannot be read, or the read is cancelled."""
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
        """The next batch of pages of a read, from index `at` on; shorter if a page cannot be read, or the read is
        cancelled or past its deadline."""
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
        """Launches the copies of pages into the KV pool."""
        seeds = [seed_of(one.hash, one.flags) for one in fetched]
        return _Put(tuple(fetched), self._copies.bring(pages, [one.bytes_B for one in fetched], seeds))

    def _fetch(self, reading: Reading, hash: PageHash, scratch: Tensor) -> _Fetched | None:
        """A page's bytes, in memory that stays valid until they are copied; None if they cannot be read. A page from
        the disk goes through `scratch` if host memory has no room for it."""
        with self._lock:
            entry, place = self._host.find(hash), self._on_disk.get(hash)
            if entry is not None and entry not in self._held.get(reading, ()):
                self._holds(reading, entry)  # it was only on disk when the read began, and has been saved again since
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
                twice = self._host.find(hash) is not None  # it has been saved again since
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
        """Tier and flags of the copied pages, up to the first one with wrong bytes, which is dropped."""
        wait(put.copied.ended)
        assert put.copied.sums is not None, "copies into the pool have checksums"
        good: list[Found] = []
        for one, got in zip(put.pages, put.copied.sums.tolist(), strict=True):
            if one.checksum() != got % 2**64:
                self._spoilt(one.tier, one.hash, "has a wrong checksum")
                break
            good.append(Found(one.tier, bool(one.flags & EXACT), bool(one.flags & DRAFTED)))
        return good

    def _there(self, reading: Reading, first: int, put: _Put) -> list[Found]:
        """As `_good`, for the read's pages from `first` on; also waits until the other ranks have them. Raises
        RankLost."""
        with self.parts.of("read: wait"):
            good = self._good(put)
        if self._others is not None:
            pages = reading.pages[first : first + len(good)]
            told = [self._others.put(page, one.bytes_B) for page, one in zip(pages, put.pages, strict=False)]
            while not all(ended() for ended in told):
                clock.sleep(LOOK_S)
        return good

    def _spoilt(self, tier: Tier, hash: PageHash, why: str) -> None:
        """Drops a corrupt page from all tiers: its copy in another tier may be right, but the same hash is not tried
        twice."""
        self.counts[tier, "spoilt"] += 1
        if not any(line.startswith(f"a page of the {tier}") for line in self._warned):
            self._warn(
                f"a page of the {tier} {why} ({hash.hex()}): dropped and recomputed; further cases are only counted"
            )

        with self._lock:
            if (entry := self._host.find(hash)) is not None and entry.coming is None:
                self._host.drop(hash)
        if self.disk is not None:
            self.disk.spoil(hash)


def _from_disk(disk: DiskPages, place: Place, into: Tensor) -> str | None:
    """Reads a page; returns what is wrong, or None."""
    try:
        return None if disk.read(place, into.numpy().data) else "is incomplete"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _flags(exact: bool, drafted: bool) -> int:
    return EXACT * exact | DRAFTED * drafted
