"""Who holds each page of KV memory: a count per page and kind of holder.

A page is free when nobody holds it. It may be held many times: by the prefix cache (once at most) and by every job
whose page table names it. No tensor lives here; a page is a number that the run room turns into an address.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum

from redline.wire.job import PageId

SLICE = 256  # pages that a check looks at between two looks at something else: about 0.1 ms


class Holder(IntEnum):
    """The kinds of holder. Each has its own count, so that `check` can ask each of them for its pages."""

    CACHE = 0
    JOBS = 1
    LENT = 2  # computed for another worker, and not handed over yet
    FETCHES = 3  # being filled from memory below the cache, or the cached prefix of such pages


class PagePool:
    """Who holds each of `total` pages, numbered from 0; all are free at first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = [PageId(page) for page in reversed(range(total))]
        self._counts = [[0] * total for _ in Holder]
        self._used = 0  # pages that the cache cannot free, kept up to date because every admission asks

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that jobs or fetches hold or that are lent, shared ones counted once."""
        return self._used

    @property
    def idle(self) -> int:
        """Pages that the cache alone holds: they can be evicted."""
        return self.total - len(self._free) - self._used

    def is_idle(self, page: PageId) -> bool:
        """Whether the cache alone holds the page."""
        return not self._in_use(page) and bool(self._counts[Holder.CACHE][page])

    def _in_use(self, page: PageId) -> int:
        counts = self._counts
        return counts[Holder.JOBS][page] + counts[Holder.LENT][page] + counts[Holder.FETCHES][page]

    def take(self, count: int, holder: Holder = Holder.JOBS) -> list[PageId]:
        """`count` free pages, now held once, by a job unless told. Raises AssertionError where fewer are free."""
        assert count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._counts[holder][page] = 1
        self._used += count
        return pages

    def share(self, page: PageId, holder: Holder) -> None:
        """Count one more holder of a page that somebody holds already. Raises AssertionError for a free page."""
        assert any(counts[page] for counts in self._counts), f"page {page} is free and cannot be shared"
        self._counts[holder][page] += 1
        if holder is not Holder.CACHE and self._in_use(page) == 1:
            self._used += 1

    def give(self, page: PageId, holder: Holder) -> None:
        """Count one holder less; without any, the page is free. Raises AssertionError where it does not hold it."""
        counts = self._counts[holder]
        assert counts[page] > 0, f"page {page} is given back by {holder.name}, which does not hold it"
        counts[page] -= 1
        if holder is not Holder.CACHE and not self._in_use(page):
            self._used -= 1
        if not any(counts[page] for counts in self._counts):
            self._free.append(page)

    def check(self, held: Mapping[Holder, Iterable[PageId]]) -> None:
        """Raises AssertionError unless every count equals what the holders say, and all other pages are free.

        held: the pages of each kind of holder; a page that is named twice is held twice, and a kind that is absent
        holds none.
        """
        for _ in self.checks(held):
            pass

    def checks(self, held: Mapping[Holder, Iterable[PageId]]) -> Iterator[None]:
        """The same as `check`, about SLICE pages between two yields; nothing may change until it is exhausted."""
        for holder in Holder:
            expected = [0] * self.total
            for page in held.get(holder, ()):
                expected[page] += 1
                if page % SLICE == 0:
                    yield
            for page, (counted, said) in enumerate(zip(self._counts[holder], expected, strict=True)):
                assert counted == said, f"page {page}: {counted} references by {holder.name} counted, {said} held"
                if page % SLICE == 0:
                    yield
        free = [0] * self.total
        for page in self._free:
            free[page] += 1
            if page % SLICE == 0:
                yield
        used = 0
        for page, times in enumerate(free):
            held_by = [counts[page] for counts in self._counts]
            assert times == (not any(held_by)), f"page {page} is {times} times in the free list, and held {held_by}"
            used += self._in_use(PageId(page)) > 0
            if page % SLICE == 0:
                yield
        assert self._used == used, f"{self._used} pages counted as used, {used} are"
