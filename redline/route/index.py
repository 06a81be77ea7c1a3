"""Which worker has which pages in its prefix cache, from what the workers tell of them.

A page's hash chains over all that comes before it, so the pages that a worker can begin a prompt from are found by
walking the prompt's hashes until one is missing, for all workers in one walk: each hash has a set of workers, kept as
the bits of a number. A worker may have forgotten a page from the middle; the walk then ends there, as its own does.
"""

from collections.abc import Sequence

from redline.wire.job import PageHash
from redline.wire.news import Cached

_LOST = -1  # in the place of a number: news of a worker has been missed


class PageIndex:
    """State of all workers' caches. A worker is there from `begin` to `forget`.

    Memory: about 200 bytes for each page of each worker.
    """

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}  # of each worker; a power of two
        self._holders: dict[PageHash, int] = {}
        self._pages: dict[str, set[PageHash]] = {}  # the same, by worker
        self._numbers: dict[str, int] = {}  # of the newest news that has been taken in

    def __len__(self) -> int:
        """Pages of all workers, each as often as workers have it."""
        return sum(len(pages) for pages in self._pages.values())

    def pages_of(self, worker: str) -> int:
        """How many pages a worker has cached."""
        return len(self._pages.get(worker, ()))

    def begin(self, worker: str) -> None:
        """A worker has started, with an empty cache. Whatever an earlier start of it had is forgotten."""
        self.forget(worker)
        taken = sum(self._bits.values())
        self._bits[worker] = ~taken & (taken + 1)  # the lowest that is free
        self._pages[worker] = set()
        self._numbers[worker] = 0

    def forget(self, worker: str) -> None:
        """A worker has ended; idempotent."""
        if worker in self._bits:
            self._clear(worker)
            del self._bits[worker], self._pages[worker], self._numbers[worker]

    def take(self, worker: str, news: Cached) -> bool:
        """Takes in what has changed. False where news is missed for the first time: the whole has to be asked for, and
        until it comes nothing is known. Raises KeyError for a worker that has not begun."""
        expected = self._numbers[worker] + 1
        if news.whole:
            self._clear(worker)
        elif expected == _LOST + 1:
            return True  # the whole has been asked for already
        elif news.number != expected:
            self._clear(worker)
            self._numbers[worker] = _LOST
            return False
        self._numbers[worker] = news.number
        bit, pages, holders = self._bits[worker], self._pages[worker], self._holders
        for page in news.removed:
            if page in pages:
                pages.remove(page)
                self._take_from(page, bit)
        for page in news.stored:
            pages.add(page)
            holders[page] = holders.get(page, 0) | bit
        return True

    def cached(self, prompt: Sequence[PageHash]) -> dict[str, int]:
        """How many of a prompt's first pages each worker has."""
        found = dict.fromkeys(self._bits, len(prompt))
        left = sum(self._bits.values())
        holders = self._holders
        for number, page in enumerate(prompt):
            here = left & holders.get(page, 0)
            if here != left:
                found.update((worker, number) for worker, bit in self._bits.items() if bit & left & ~here)
                left = here
                if not left:
                    break
        return found

    def check(self) -> None:
        """Raises AssertionError unless both books say the same."""
        holders: dict[PageHash, int] = {}
        for worker, pages in self._pages.items():
            for page in pages:
                holders[page] = holders.get(page, 0) | self._bits[worker]
        assert holders == self._holders, "pages by worker and workers by page differ"
        assert sum(self._bits.values()).bit_count() == len(self._bits), "two workers share a bit"

    def _clear(self, worker: str) -> None:
        bit, pages = self._bits[worker], self._pages[worker]
        for page in pages:
            self._take_from(page, bit)
        pages.clear()

    def _take_from(self, page: PageHash, bit: int) -> None:
        if left := self._holders[page] & ~bit:
            self._holders[page] = left
        else:
            del self._holders[page]
