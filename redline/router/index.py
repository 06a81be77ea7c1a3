"""Index of the pages in the workers' prefix caches, from the events that workers publish.

A page's hash chains over all previous ones, so the cached prefix of a prompt is found by walking the prompt's hashes
until one is missing, for all workers in one pass: each hash has a set of workers, stored as a bit mask. A worker may
have evicted a page from the middle; the walk ends there, as the worker's own does.
"""

from collections.abc import Sequence

from redline.messages.job import PageHash
from redline.messages.news import Cached

_LOST = -1  # in place of a message number: updates of a worker were missed


class PageIndex:
    """The content of all workers' prefix caches. A worker is included from `begin` to `forget`.

    Memory: about 200 bytes for each page of each worker.
    """

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}  # bit of each worker, as a power of two
        self._holders: dict[PageHash, int] = {}
        self._pages: dict[str, set[PageHash]] = {}  # the same content, by worker
        self._numbers: dict[str, int] = {}  # number of the newest update of each worker

    def __len__(self) -> int:
        """Number of cached pages, summed over workers."""
        return sum(len(pages) for pages in self._pages.values())

    def pages_of(self, worker: str) -> int:
        """Number of pages that a worker has cached."""
        return len(self._pages.get(worker, ()))

    def begin(self, worker: str) -> None:
        """A worker has started, with an empty cache. The content of an earlier start is dropped."""
        self.forget(worker)
        taken = sum(self._bits.values())
        self._bits[worker] = ~taken & (taken + 1)  # the lowest free bit
        self._pages[worker] = set()
        self._numbers[worker] = 0

    def forget(self, worker: str) -> None:
        """A worker has ended; idempotent."""
        if worker in self._bits:
            self._clear(worker)
            del self._bits[worker], self._pages[worker], self._numbers[worker]

    def take(self, worker: str, news: Cached) -> bool:
        """Apply an update. False when the first missed update is detected: the caller has to request the complete
        content, and the index has none of the worker's pages until it arrives. Raises KeyError for a worker that has
        not begun."""
        expected = self._numbers[worker] + 1
        if news.whole:
            self._clear(worker)
        elif expected == _LOST + 1:
            return True  # the complete content was requested already
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
        """The number of leading pages of a prompt that each worker has cached."""
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
        """Raises AssertionError unless both tables agree."""
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
