"""What the planner asks of memory below the prefix cache, and the books of pages that are filled from there.

A page that the cache forgets may be kept elsewhere, under its hash, and come back when a prompt wants it. Where it is
kept, and whether fetching it pays, the planner does not know. While it is fetched its page belongs to the fetch
(`Holder.FETCHES`), and so does the cached prefix that it continues: no job has it, and nothing evicts it. Once it is
there the cache has it, and jobs begin from it as from any other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from redline.plan.pages import Holder, PagePool
from redline.plan.prefix import Content, Forgotten, PrefixCache
from redline.wire.job import JobId, PageHash, PageId
from redline.wire.step import Step


class Lack(NamedTuple):
    """What a prompt could begin from and the cache has not."""

    first: int  # pages before these, which are cached
    positions: int  # that are known, of which pages or steps give all
    hashes: tuple[PageHash, ...]  # of the pages behind, in order
    exact: bool  # only pages that are bit-equal to those of a prefill will do
    drafted: bool  # only pages that the learned drafter has read will do


class Kept(NamedTuple):
    """What is known of a page's bytes, wherever they lie; as `PrefixCache.match` has it."""

    exact: bool
    drafted: bool


class Below(Protocol):
    """Memory below the prefix cache, as the planner sees it. The planner's thread calls it, and is not called back."""

    def forgets(self, pages: Sequence[Forgotten]) -> None:
        """The cache forgets these pages, least recently used first. Once this returns they may be overwritten, on a GPU
        by what is launched on the stream of steps."""
        ...

    def awaits(self, id: JobId, lack: Lack) -> bool:
        """Whether a job that has come waits for pages from there; if so, `Planner.compute_here` is to follow."""
        ...

    def took(self, step: Step, seconds: float) -> None:
        """A step took so long."""
        ...


@dataclass(eq=False)
class Fetch:
    """Pages that are being filled from below."""

    hashes: tuple[PageHash, ...]
    pages: tuple[PageId, ...]  # for each hash the page that it is put into
    prefix: tuple[PageId, ...]  # cached pages that they continue
    previous: PageHash | None  # the hash before the first
    contents: tuple[Content, ...] = ()  # of the pages, where the cache's log wants them


class Fetches:
    """The fetches under way, over a pool and its cache."""

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
        """Takes pages for the first `count` that lack. There has to be room; prefix: the cached pages before them.
        contents: of the pages, where the cache has a log."""
        for page in prefix:
            self._pool.share(page, Holder.FETCHES)
        self._cache.evict(max(0, count - self._pool.free))
        pages = tuple(self._pool.take(count, Holder.FETCHES))
        fetch = Fetch(lack.hashes[:count], pages, tuple(prefix), previous, contents)
        self._under_way.add(fetch)
        return fetch

    def end(self, fetch: Fetch, kept: Sequence[Kept]) -> None:
        """Nothing writes to its pages any more. The first ones are as told, and the cache has them from now on; those
        behind are free. Raises KeyError for a fetch that has ended."""
        self._under_way.remove(fetch)
        previous = fetch.previous
        contents = fetch.contents or (None,) * len(fetch.pages)
        for hash, page, known, content in zip(fetch.hashes, fetch.pages, kept, contents, strict=False):
            self._cache.insert(hash, page, previous, exact=known.exact, drafted=known.drafted, content=content)
            previous = hash
        for page in (*reversed(fetch.pages), *fetch.prefix):
            self._cache.release(page, Holder.FETCHES)

    def held(self) -> Iterator[PageId]:
        """Every page that a fetch holds, as often as it is held."""
        for fetch in self._under_way:
            yield from fetch.pages
            yield from fetch.prefix
