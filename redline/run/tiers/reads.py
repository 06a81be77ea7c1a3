"""Reads of stored pages into the KV pool, in the store's thread.

A page counts as read only once its bytes, copied into the pool, have the checksum of when it was saved; the first page
that does not ends the read. Until a read has ended its pages belong to it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from redline import clock
from redline.messages.job import PageHash, PageId
from redline.run.tiers.copies import Copied, Copies, wait
from redline.run.tiers.disk import DiskPages, DiskPlace
from redline.run.tiers.memory import HostPage
from redline.run.tiers.pages import seed_of
from redline.run.tiers.tables import DRAFTED, EXACT, Found, PageTables, Tier, TierRead

LOOK_S = 0.0002  # seconds between two polls of whether other ranks have received a page, or saved pages have arrived


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


class PageReader:
    """Fetches pages from the tiers, a batch at a time, while the copies of earlier batches are under way."""

    def __init__(
        self,
        tables: PageTables,
        copies: Copies,
        scratch: Tensor,
        checksum: Callable[[PageHash, HostPage], int],
        *,
        together: int,
        under_way: int,
        share: float,
        clock: Callable[[], float],
        others: Others | None,
    ) -> None:
        """scratch: memory for pages of the disk, uint8 [pages, bytes of a page]. checksum: of a page in memory, after
        its copy has ended. together: pages per batch. under_way: batches that are being copied and not verified yet.
        share, others: as in `Store`."""
        self._tables, self._copies, self._scratch, self._checksum = tables, copies, scratch, checksum
        self._together, self._under_way = together, under_way
        self._share, self._clock, self._others = share, clock, others

    def read(self, reading: TierRead) -> None:
        """Copies pages into the KV pool until one cannot be read, or the read is cancelled."""
        kept, put, at, whole = list[Found](), deque[_Put](), 0, True
        try:
            while put or (whole and at < len(reading.hashes)):
                if whole and at < len(reading.hashes) and len(put) < self._under_way:
                    began, busy = self._clock(), self._tables.busy
                    fetched = self._fetch_some(reading, at)
                    whole = len(fetched) == min(self._together, len(reading.hashes) - at)
                    if fetched:
                        with self._tables.parts.of("read: launch"):
                            put.append(self._bring(reading.pages[at : at + len(fetched)], fetched))
                    at += len(fetched)
                    if busy and self._share < 1:
                        clock.sleep((self._clock() - began) * (1 / self._share - 1))
                    continue
                of = put.popleft()
                good = self._there(reading, len(kept), of)
                kept += good
                if len(good) < len(of.pages):
                    break
        finally:
            self._copies.brought()
            reading.kept = kept
            self._tables.end_of(reading)
        with self._tables.lock:
            for hash in reversed(reading.hashes):
                self._tables.host.touch(hash)
        if self._tables.disk is not None:
            files = {place.file for hash in reading.hashes if (place := self._tables.on_disk.get(hash)) is not None}
            self._tables.disk.use(files, clock.now_ns())

    def _fetch_some(self, reading: TierRead, at: int) -> list[_Fetched]:
        """The next batch of pages of a read, from index `at` on; shorter if a page cannot be read, or the read is
        cancelled or past its deadline."""
        fetched = list[_Fetched]()
        with self._tables.parts.of("read: fetch"):
            for number, hash in enumerate(reading.hashes[at : at + self._together], at):
                if reading.cancelled or self._clock() >= reading.until or self._tables.ended:
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

    def _fetch(self, reading: TierRead, hash: PageHash, scratch: Tensor) -> _Fetched | None:
        """A page's bytes, in memory that stays valid until they are copied; None if they cannot be read. A page from
        the disk goes through `scratch` if host memory has no room for it."""
        with self._tables.lock:
            entry, place = self._tables.host.find(hash), self._tables.on_disk.get(hash)
            if entry is not None and entry not in self._tables.held.get(reading, ()):
                self._tables.holds(
                    reading, entry
                )  # it was only on disk when the read began, and has been saved again since
        if entry is not None:
            if (coming := entry.coming) is not None:
                self._copies.after(coming)
            checksum = partial(self._checksum, hash, entry)
            return _Fetched("host", hash, entry.flags, checksum, self._tables.host.slots.bytes_of(entry.slot))
        if place is None or self._tables.disk is None:
            return None
        with self._tables.lock:
            slot = self._tables.room()
        into = scratch if slot is None else self._tables.host.slots.bytes_of(slot)
        why = _from_disk(self._tables.disk, place, into)
        twice = False
        if slot is not None:
            with self._tables.lock:
                twice = self._tables.host.find(hash) is not None  # it has been saved again since
                if why is None and not twice:
                    entry = self._tables.host.put(hash, slot, place.flags, place.checksum, clean=True)
                    self._tables.holds(reading, entry)
                else:
                    self._tables.host.give_back(slot)
        if why is not None:
            self._tables.spoilt("disk", hash, why)
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
                self._tables.spoilt(one.tier, one.hash, "has a wrong checksum")
                break
            good.append(Found(one.tier, bool(one.flags & EXACT), bool(one.flags & DRAFTED)))
        return good

    def _there(self, reading: TierRead, first: int, put: _Put) -> list[Found]:
        """As `_good`, for the read's pages from `first` on; also waits until the other ranks have them. Raises
        RankLost."""
        with self._tables.parts.of("read: wait"):
            good = self._good(put)
        if self._others is not None:
            pages = reading.pages[first : first + len(good)]
            told = [self._others.put(page, one.bytes_B) for page, one in zip(pages, put.pages, strict=False)]
            while not all(ended() for ended in told):
                clock.sleep(LOOK_S)
        return good


def _from_disk(disk: DiskPages, place: DiskPlace, into: Tensor) -> str | None:
    """Reads a page; returns what is wrong, or None."""
    try:
        return None if disk.read(place, into.numpy().data) else "is incomplete"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
