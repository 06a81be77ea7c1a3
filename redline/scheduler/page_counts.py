"""Reference counts of the KV cache's pages: one count per page and kind of holder.

A page without holders is free. A page may have several holders: the prefix cache (at most once) and every job with the
page in its page table. There are no tensors here; a page is a number that the run package turns into an address.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum

from redline.messages.job import PageId

SLICE = 256  # pages checked between two yields of `checks`: about 0.1 ms


class Holder(IntEnum):
    """The kinds of holder. Each has its own counts, so that `check` can compare them with the holder's own list."""

    CACHE = 0
    JOBS = 1
    LENT = 2  # computed for another worker, and not yet transferred
    FETCHES = 3  # being filled from an offload tier, or the cached prefix of such pages


class PagePool:
    """The holders of `total` pages, numbered from 0; all are free at first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = [PageId(page) for page in reversed(range(total))]
        self._counts = [[0] * total for _ in Holder]
        self._used = 0  # pages that eviction cannot free; updated incrementally, because every admission reads it

    @property
    def free(self) -> int:
        """Number of pages without a holder."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of pages held by jobs or fetches, or lent; shared pages count once."""
        return self._used

    @property
    def idle(self) -> int:
        """Number of pages held only by the prefix cache: they can be evicted."""
        return self.total - len(self._free) - self._used

    def is_idle(self, page: PageId) -> bool:
        """Whether only the prefix cache holds the page."""
        return not self._in_use(page) and bool(self._counts[Holder.CACHE][page])

    def _in_use(self, page: PageId) -> int:
        counts = self._counts
        return counts[Holder.JOBS][page] + counts[Holder.LENT][page] + counts[Holder.FETCHES][page]

    def take(self, count: int, holder: Holder = Holder.JOBS) -> list[PageId]:
        """Allocate `count` free pages with one reference by `holder`. Raises AssertionError if fewer are free."""
        assert count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._counts[holder][page] = 1
        self._used += count
        return pages

    def share(self, page: PageId, holder: Holder) -> None:
        """Add a holder to a page that has one already. Raises AssertionError for a free page."""
        assert any(counts[page] for counts in self._counts), f"page {page} is free and cannot be shared"
        self._counts[holder][page] += 1
        if holder is not Holder.CACHE and self._in_use(page) == 1:
            self._used += 1

    def give(self, page: PageId, holder: Holder) -> None:
        """Remove one reference of a holder; a page without holders becomes free. Raises AssertionError if it has
        none."""
        counts = self._counts[holder]
        assert counts[page] > 0, f"page {page} is given back by {holder.name}, which does not hold it"
        counts[page] -= 1
        if holder is not Holder.CACHE and not self._in_use(page):
            self._used -= 1
        if not any(counts[page] for counts in self._counts):
            self._free.append(page)

    def check(self, held: Mapping[Holder, Iterable[PageId]]) -> None:
        """Raises AssertionError unless every count equals the holders' own lists, and all other pages are free.

        held: the pages of each kind of holder; a page listed twice is held twice, and a missing kind holds none.
        """
        for _ in self.checks(held):
            pass

    def checks(self, held: Mapping[Holder, Iterable[PageId]]) -> Iterator[None]:
        """Like `check`, about SLICE pages between two yields; nothing may change until it is exhausted."""
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
