"""The planner's interface to the KV offload tiers (host memory, disk), and the bookkeeping of pages being filled from
them.

An evicted page may be kept in an offload tier under its hash, and be fetched when a prompt needs it. The planner does
not know in which tier a page is or whether a fetch pays. During a fetch its pages, and the cached prefix that they
continue, belong to the fetch (`Holder.FETCHES`): no job uses them, and they are not evicted. Afterwards the prefix
cache holds them, and jobs use them like all other cached pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from redline.messages.job import JobId, PageHash, PageId
from redline.messages.step import Step
from redline.scheduler.page_counts import Holder, PagePool
from redline.scheduler.prefix_cache import Content, Forgotten, PrefixCache


class Lack(NamedTuple):
    """The pages that a prompt could start from and the prefix cache does not have."""

    first: int  # number of cached pages before these
    positions: int  # number of known tokens, all of which need pages or steps
    hashes: tuple[PageHash, ...]  # of the missing pages, in order
    exact: bool  # only pages that are bit-equal to those of a prefill can be used
    drafted: bool  # only pages that the learned drafter has read can be used


class PageFlags(NamedTuple):
    """Properties of a page's content, in any tier; see `PrefixCache.match`."""

    exact: bool
    drafted: bool


class KvTier(Protocol):
    """A KV offload tier, as the planner sees it. The planner's thread calls it; it never calls the planner."""

    def forgets(self, pages: Sequence[Forgotten]) -> None:
        """These pages are evicted from the prefix cache, least recently used first. After the return they may be
        overwritten, on a GPU by work launched on the stream of steps."""
        ...

    def awaits(self, id: JobId, lack: Lack) -> bool:
        """Whether a new job waits for pages from the tiers; if so, `JobTransfers.compute_here` must follow."""
        ...

    def took(self, step: Step, seconds: float) -> None:
        """A step took `seconds`."""
        ...


@dataclass(eq=False)
class Fetch:
    """Pages being filled from an offload tier."""

    hashes: tuple[PageHash, ...]
    pages: tuple[PageId, ...]  # the page that each hash is read into
    prefix: tuple[PageId, ...]  # cached pages that they continue
    previous: PageHash | None  # hash of the page before the first
    contents: tuple[Content, ...] = ()  # of the pages, if the cache logs its changes


class TierReads:
    """The fetches in progress, over a page pool and its prefix cache."""

    def __init__(self, pool: PagePool, cache: PrefixCache) -> None:
        self._pool, self._cache = pool, cache
        self._under_way: set[Fetch] = set()

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(
        self,
        lack: Lack,
        count: int,
        prefix: Sequence[PageId],
        previous: PageHash | None,
        contents: tuple[Content, ...] = (),
    ) -> Fetch:
        """Take pages for the first `count` missing ones; the caller has checked that there is room. prefix: the
        cached pages before them. contents: of the pages, if the cache logs its changes."""
        for page in prefix:
            self._pool.share(page, Holder.FETCHES)
        self._cache.evict(max(0, count - self._pool.free))
        pages = tuple(self._pool.take(count, Holder.FETCHES))
        fetch = Fetch(lack.hashes[:count], pages, tuple(prefix), previous, contents)
        self._under_way.add(fetch)
        return fetch

    def end(self, fetch: Fetch, kept: Sequence[PageFlags]) -> None:
        """End a fetch: nothing writes to its pages any more. The first len(kept) pages are inserted into the prefix
        cache, the others become free. Raises KeyError for a fetch that has ended."""
        self._under_way.remove(fetch)
        previous = fetch.previous
        contents = fetch.contents or (None,) * len(fetch.pages)
        for hash, page, known, content in zip(fetch.hashes, fetch.pages, kept, contents, strict=False):
            self._cache.insert(hash, page, previous, exact=known.exact, drafted=known.drafted, content=content)
            previous = hash
        for page in (*reversed(fetch.pages), *fetch.prefix):
            self._cache.release(page, Holder.FETCHES)

    def held(self) -> Iterator[PageId]:
        """Every page that a fetch holds, once per holder."""
        for fetch in self._under_way:
            yield from fetch.pages
            yield from fetch.prefix
