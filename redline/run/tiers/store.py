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
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import torch

from redline import clock
from redline.errors import ConfigError
from redline.messages.job import PageHash, PageId
from redline.run.tiers.copies import Copied, Copies, Leaving, wait
from redline.run.tiers.disk import DiskPages
from redline.run.tiers.memory import HostPage, HostPages, pinned, unpin
from redline.run.tiers.pages import TOGETHER, WholePages, seal, seed_of
from redline.run.tiers.reads import LOOK_S, Others, PageReader
from redline.run.tiers.tables import DRAFTED, EXACT, Found, PageTables, Tier, TierRead, flags_of

AHEAD = 4  # one in AHEAD slots is kept free, or its page is written to disk ahead of need
REST_S = 60.0  # seconds for which the disk is not used after a failed write
DISK_S = 1e-9  # seconds per byte from the disk, as an initial estimate

_log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """A page to save."""

    hash: PageHash
    page: PageId
    exact: bool
    drafted: bool


class _Order(IntEnum):
    """Priorities of the thread's tasks, highest first."""

    READ = 0  # a request waits for it; also runs before the pages that made room for it get their checksums
    SEAL = 1
    WRITE = 2


class Store:
    """The KV offload tiers of one engine.

    page_s: initial estimate of the seconds per page of each tier. counts, parts: as in `PageTables`.
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
        gpu = pages.device.type == "cuda"
        memory = None if others is None else others.memory
        self._tables = PageTables(HostPages(pages.size, host_bytes, pinned=gpu, memory=memory), disk)
        self.parts, self.counts, self.disk = self._tables.parts, self._tables.counts, disk
        self.share = share
        self.page_bytes = pages.size
        self._pages, self._clock = pages, clock
        self._others = others
        self._copies = Copies(pages)
        self._work: list[tuple[int, int, Callable[[], object]]] = []  # protected by the lock of the tables
        self._numbers = itertools.count()
        self._working = False
        self._rests_until = 0.0  # no writes to the disk before this time
        together = pages.together if others is None else TOGETHER
        under_way = 2 if pages.together > 1 and others is None else 1
        places = under_way * together
        if memory is None:
            memory = pinned if gpu else partial(torch.empty, dtype=torch.uint8)
        self._scratch = memory(places * pages.size).view(places, pages.size)
        self._reader = PageReader(
            *(self._tables, self._copies, self._scratch, self._checksum),
            together=together, under_way=under_way, share=share, clock=clock, others=others,
        )  # fmt: skip
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
        return self._tables.busy

    @busy.setter
    def busy(self, busy: bool) -> None:
        if busy == self._tables.busy:
            return
        with self._tables.lock:
            self._tables.busy = busy
            self._tables.lock.notify_all()

    @property
    def host_pages(self) -> int:
        """Pages in host memory."""
        return len(self._tables.host)

    @property
    def host_most(self) -> int:
        """Pages that fit into host memory."""
        return self._tables.host.slots.total

    def save(self, pages: Sequence[Saved]) -> int:
        """Saves pages that are not being written. Once this returns they may be overwritten; on a GPU, by work
        launched on the stream of steps. Pages that are stored already with the same or better flags are only marked
        as used. A page without room is lost, and counted. -> how many were copied."""
        new: list[tuple[Saved, int]] = []
        with self.parts.of("save: room"), self._tables.lock:
            for one in pages:
                flags = flags_of(one.exact, one.drafted)
                entry = self._tables.host.find(one.hash)
                if entry is not None and (entry.flags | flags == entry.flags or entry.stays):
                    self._tables.host.touch(one.hash)
                    continue
                place = self._tables.on_disk.get(one.hash)
                if entry is None and place is not None and place.flags | flags == place.flags:
                    continue
                if entry is not None:
                    self._tables.host.drop(one.hash)
                slot = self._tables.room()
                if slot is None and self._tables.land():
                    slot = self._tables.room()
                if slot is None:
                    self.counts["host", "lost"] += 1
                    continue
                new.append((one, slot))
        if not new:
            return 0
        with self.parts.of("save: launch"):
            leaving = list[Leaving]()
            for one, slot in reversed(new):  # the slot freed last is filled first
                seed = seed_of(one.hash, flags_of(one.exact, one.drafted))
                leaving.append(Leaving(one.page, self._tables.host.slots.bytes_of(slot), seed))
            copied = self._copies.save(leaving)
        if self._others is not None:  # other ranks' streams do not wait for this rank's copies
            with self.parts.of("save: wait"):
                wait(copied.ended)
        sealing: list[tuple[PageHash, HostPage]] = []
        with self.parts.of("save: books"), self._tables.lock:
            for at, (one, slot) in enumerate(new, 1):
                entry = self._tables.host.put(one.hash, slot, flags_of(one.exact, one.drafted))
                entry.coming = copied.ended if self._others is None else None
                entry.sum = None if copied.sums is None else (copied.sums, len(new) - at)
                sealing.append((one.hash, entry))
                self.counts["host", "stored"] += 1
        sealing.reverse()  # in the order of their copies
        self._put(_Order.SEAL, lambda: self._seal(sealing, copied))
        return len(new)

    def find(self, hashes: Sequence[PageHash], *, exact: bool = False, drafted: bool = False) -> list[Found]:
        """The longest prefix of `hashes` that is stored. exact, drafted: only pages with that flag count."""
        wanted, found = flags_of(exact, drafted), list[Found]()
        with self._tables.lock:
            for hash in hashes:
                one = self._tables.look(hash)
                if one is None or one[1] & wanted != wanted:
                    break
                found.append(Found(one[0], bool(one[1] & EXACT), bool(one[1] & DRAFTED)))
        return found

    def hold(self, hashes: Sequence[PageHash]) -> TierRead | None:
        """Keeps these pages in their tier until they are read or released; None if one is not stored any more."""
        with self._tables.lock:
            looked = [self._tables.look(hash) for hash in hashes]
            found = [Found(one[0], bool(one[1] & EXACT), bool(one[1] & DRAFTED)) for one in looked if one is not None]
            if len(found) < len(looked):
                return None
            reading = TierRead(hashes, found)
            for hash in hashes:
                if (entry := self._tables.host.find(hash)) is not None:
                    self._tables.holds(reading, entry)
        return reading

    def let_go(self, reading: TierRead) -> None:
        """Releases the pages of a read that was not started."""
        self._tables.end_of(reading)

    def read(self, reading: TierRead, pages: Sequence[PageId], seconds: float) -> None:
        """Starts to copy the held pages into `pages`, which must not be written or read until the read has ended.
        seconds: time limit; at the limit the read ends with the pages copied so far."""
        reading.pages, reading.until = tuple(pages), self._clock() + seconds
        self._put(_Order.READ, lambda: self._reader.read(reading))

    def flush(self, seconds: float) -> None:
        """Writes to disk the pages that are only in memory, most recently used first, for at most `seconds` seconds.
        The store must be closed afterwards."""
        if self.disk is None:
            return
        until = self._clock() + seconds
        with self._tables.lock:
            self._tables.host.slots.ahead = None  # stop making memory in advance
        self.settle(seconds)
        with self._tables.lock:
            hashes = list(reversed(self._tables.host.dirty))
        for hash in hashes:
            self._put(_Order.WRITE, lambda hash=hash: self._clock() < until and self._write(hash))
        self.settle(max(0.0, until - self._clock()))

    def settle(self, seconds: float) -> bool:
        """Waits until the thread is idle, at most `seconds` seconds. Returns whether it is."""
        with self._tables.lock:
            return self._tables.lock.wait_for(lambda: not self._working and not self._wanted(), seconds)

    def close(self) -> None:
        """Ends the thread after its current task, and releases the files. Reads end with the pages copied so far."""
        with self._tables.lock:
            self._tables.ended = True
            self._tables.lock.notify_all()
        self._thread.join()
        for reading in list(self._tables.held):
            self._tables.end_of(reading)
        self._copies.close()
        self._tables.host.slots.close()
        if self._pages.device.type == "cuda" and self._others is None:
            unpin(self._scratch)
        if self.disk is not None:
            self.disk.close()

    def check(self) -> None:
        """Raises AssertionError unless every slot is free or holds exactly one page. The thread must be idle."""
        with self._tables.lock:
            self._tables.check()
            if self.disk is not None and not self._work and not self._working:
                self.disk.check()
                assert self._tables.host.clean.keys() <= self._tables.on_disk.keys(), (
                    "a page marked as on disk is not on disk"
                )

    # ------------------------------------------------------------------------------ either thread, holding the lock

    def _wanted(self) -> bool:
        """Whether the thread has a task."""
        return bool(self._work) or self._tables.host.slots.short(busy=self._tables.busy)

    def _put(self, order: _Order, work: Callable[[], object]) -> None:
        with self._tables.lock:
            if not self._tables.ended:
                heapq.heappush(self._work, (order, next(self._numbers), work))
                self._tables.lock.notify_all()

    # ------------------------------------------------------------------------------------------- the store's thread

    def _serve(self) -> None:
        if self._pages.device.type == "cuda":
            torch.cuda.set_device(self._pages.device)  # the current device is set per thread
        while True:
            with self._tables.lock:
                self._working = False
                self._tables.lock.notify_all()
                self._tables.lock.wait_for(lambda: self._tables.ended or self._wanted())
                if self._tables.ended:
                    return
                work = heapq.heappop(self._work)[2] if self._work else self._make_room
                self._working = True
            try:
                work()
            except Exception as error:  # an error of a tier must not end the caller
                self._tables.warn(f"KV offload: {type(error).__name__}: {error}")

    def _make_room(self) -> None:
        """Allocates a slab of memory before it is needed, so that saving pages does not have to wait for pinning."""
        with self.parts.of("thread: pin"):
            slab = self._tables.host.slots.slab()
        with self._tables.lock:
            self._tables.host.slots.add(slab)

    def _load(self, disk: DiskPages) -> None:
        try:
            for count in disk.load():
                self.counts["disk", "found"] += count
                if self._tables.ended:
                    return
        except OSError as error:
            self._rest(error)

    def _seal(self, new: Sequence[tuple[PageHash, HostPage]], copied: Copied) -> None:
        """Computes the checksums of saved pages after their copies have ended. Reads go first."""
        with self.parts.of("thread: wait for saved"):
            while copied.ended is not None and not copied.ended.query():
                with self._tables.lock:
                    if self._tables.ended:
                        return
                    if self._work and self._work[0][0] < _Order.SEAL:
                        again = _Order.SEAL, next(self._numbers), lambda: self._seal(new, copied)
                        heapq.heappush(self._work, again)
                        return
                    self._tables.lock.wait(LOOK_S)
        with self.parts.of("thread: seal"):
            for hash, entry in new:
                self._checksum(hash, entry)  # if the page has been evicted since, the number is not used
        with self._tables.lock:
            for _, entry in new:
                entry.coming = None
        self._write_ahead()

    def _checksum(self, hash: PageHash, entry: HostPage) -> int:
        """The checksum of a page in memory after its copy has ended; stored with the page."""
        if entry.checksum is None:
            if entry.sum is None:
                found = seal(self._tables.host.slots.bytes_of(entry.slot), seed_of(hash, entry.flags))
            else:
                sums, at = entry.sum
                found = int(sums[at])
            entry.checksum, entry.sum = found % 2**64, None
        return entry.checksum

    def _write_ahead(self) -> None:
        """Queues writes of the pages that memory will evict next."""
        if self.disk is None or self._clock() < self._rests_until:
            return
        with self._tables.lock:
            wanted = (
                max(1, self._tables.host.slots.total // AHEAD)
                - self._tables.host.slots.free
                - len(self._tables.host.clean)
            )
            for hash, entry in self._tables.host.dirty.items():
                if wanted <= 0:
                    break
                wanted -= 1
                if not entry.writing and entry.checksum is not None:
                    entry.writing = True
                    heapq.heappush(self._work, (_Order.WRITE, next(self._numbers), lambda of=hash: self._write(of)))

    def _write(self, hash: PageHash) -> None:
        with self._tables.lock:
            entry = self._tables.host.dirty.get(hash)
            if entry is None or entry.checksum is None:
                return
            entry.writing = True
        try:
            if self.disk is not None and self._clock() >= self._rests_until:
                page = self._tables.host.slots.bytes_of(entry.slot).numpy().data
                with self.parts.of("thread: write"):
                    self.disk.write(hash, page, entry.checksum, entry.flags)
                self.counts["disk", "stored"] += 1
                with self._tables.lock:
                    self._tables.host.written(hash)
        # ConfigError: the folder was removed, and now belongs to another process
        except (OSError, ConfigError) as error:
            self._rest(error)
        finally:
            entry.writing = False

    def _removed(self, hashes: Sequence[PageHash]) -> None:
        """Called when the disk has evicted pages: those that are in memory are in memory only."""
        self.counts["disk", "given up"] += len(hashes)
        with self._tables.lock:
            for hash in hashes:
                self._tables.host.unwritten(hash)

    def _rest(self, error: OSError | ConfigError) -> None:
        """Stops writing to the disk for REST_S seconds."""
        self._rests_until = self._clock() + REST_S
        why = error.strerror or error if isinstance(error, OSError) else error
        self._tables.warn(f"KV offload: cannot write pages to disk: {why}; retrying every {REST_S:g} s")
