"""Prefix cache: keeps KV pages after their jobs have ended, by the hash of all tokens up to the page's end.

A page hash chains over the previous page's hash, so a dictionary from hash to page is a prefix tree, and the longest
cached prefix is found by walking a prompt's hashes until one is missing.

Eviction takes the least recently used page that no job holds, leaves before their parents. Only if every such page has
a child in use does it take an inner page: its children stay, unreachable until the hash is inserted again. So
`PagePool.idle` is exactly the number of pages that eviction can free.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from redline.messages.job import PAGE_TOKENS, PageHash, PageId
from redline.scheduler.page_counts import SLICE, Holder, PagePool


class Forgotten(NamedTuple):
    """An evicted page; exact, drafted: as in `PrefixCache.match`."""

    hash: PageHash
    page: PageId
    exact: bool
    drafted: bool


class Content(NamedTuple):
    """Content of a page."""

    tokens: tuple[int, ...]
    salt: str  # of the prompt


class Changed(NamedTuple):
    """A page that was inserted or evicted; an evicted one has neither tokens nor salt."""

    hash: PageHash
    there: bool
    previous: PageHash | None = None  # hash of the previous page
    tokens: tuple[int, ...] = ()
    salt: str = ""


class _Node:
    __slots__ = ("drafted", "exact", "hash", "page", "previous", "queued", "told", "used")

    def __init__(
        self, hash: PageHash, page: PageId, previous: PageHash | None, exact: bool, drafted: bool, used: int
    ) -> None:
        self.hash = hash
        self.page = page
        self.previous = previous
        self.exact = exact
        self.drafted = drafted
        self.used = used  # time of the last use, counted in uses of the cache
        self.queued = False  # it has an entry in the heap of eviction candidates
        self.told = False  # its insertion was logged


class PrefixCache:
    """Keeps pages of `pool`, with one reference each.

    `queries` and `hits` count tokens looked up and found, over all admissions.
    """

    def __init__(self, pool: PagePool) -> None:
        self.queries = 0
        self.hits = 0
        self._pool = pool
        self._nodes: dict[PageHash, _Node] = {}
        self._by_page: dict[PageId, _Node] = {}
        self._children: Counter[PageHash] = Counter()
        # Eviction candidates, least recently used first. A node has at most one entry; the entry may be older than the
        # node's last use, or the node may be held or have children by now: this is checked when the entry is popped.
        self._candidates: list[tuple[int, PageHash]] = []
        self._uses = 0
        # hash -> whether it is cached now; None: changes are not recorded.
        self._changes: dict[PageHash, bool] | None = None
        self.log: list[Changed] | None = None  # insertions and evictions in order; None: they are not logged
        # Called with evicted pages before they are reused.
        self.forgets: Callable[[Sequence[Forgotten]], object] | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    def pages(self) -> Iterable[PageId]:
        """The cached pages, each once."""
        return self._by_page

    def match(self, hashes: Iterable[PageHash], *, exact: bool = False, drafted: bool = False) -> list[PageId]:
        """Pages of the longest cached prefix of `hashes`; changes nothing.

        `exact` stops at the first page that is not bit-equal to the result of a prefill, `drafted` at the first page
        that the learned drafter has not read.
        """
        pages: list[PageId] = []
        for hash in hashes:
            node = self._nodes.get(hash)
            if node is None or (exact and not node.exact) or (drafted and not node.drafted):
                break
            pages.append(node.page)
        return pages

    def is_exact(self, page: PageId) -> bool:
        """Whether a cached page is bit-equal to the result of a prefill. Raises KeyError for a page that is not
        cached."""
        return self._by_page[page].exact

    def is_drafted(self, page: PageId) -> bool:
        """Whether the learned drafter has read a cached page. Raises KeyError for a page that is not cached."""
        return self._by_page[page].drafted

    def use(self, pages: Sequence[PageId], *, of_tokens: int) -> None:
        """Add a job's references to the pages that it matched, and mark them as recently used.

        of_tokens: number of the job's known tokens, counted in `queries`.
        """
        self.queries += of_tokens
        self.hits += len(pages) * PAGE_TOKENS
        self._uses += 1
        for page in pages:
            self._pool.share(page, Holder.JOBS)
            self._by_page[page].used = self._uses

    def insert(
        self,
        hash: PageHash,
        page: PageId,
        previous: PageHash | None,
        *,
        exact: bool,
        drafted: bool = False,
        content: Content | None = None,
    ) -> None:
        """Cache a full page that a job holds, under its hash and the hash of the previous page.

        A hash that is cached already keeps its page, unless the learned drafter has read the new page and not the old
        one, and the new one is no less exact. exact, drafted: as in `match`. content: for the log, which omits pages
        without it.
        """
        node = self._nodes.get(hash)
        if node is not None:
            if drafted > node.drafted and exact >= node.exact:
                self._replace(node, page, exact)
            return
        self._uses += 1
        node = _Node(hash, page, previous, exact, drafted, self._uses)
        self._nodes[hash] = node
        self._by_page[page] = node
        if self._changes is not None:
            self._changes[hash] = True
        if self.log is not None and content is not None:
            node.told = True
            self.log.append(Changed(hash, there=True, previous=previous, tokens=content.tokens, salt=content.salt))
        if previous is not None:
            self._children[previous] += 1
        self._pool.share(page, Holder.CACHE)

    def release(self, page: PageId, holder: Holder = Holder.JOBS) -> None:
        """Remove a reference to a page. A cached page becomes evictable when it has no other holder; any other page
        becomes free."""
        self._pool.give(page, holder)
        node = self._by_page.get(page)
        if node is not None and self._pool.is_idle(page):
            self._enqueue(node)

    def changes(self, *, whole: bool = False) -> tuple[list[PageHash], list[PageHash]]:
        """(inserted, evicted): hashes changed since the last call. The first call, and `whole`, returns all cached
        hashes as inserted."""
        if whole or self._changes is None:
            self._changes = dict.fromkeys(self._nodes, True)
        changes, self._changes = self._changes, {}
        return [hash for hash, there in changes.items() if there], [
            hash for hash, there in changes.items() if not there
        ]

    def evict(self, count: int) -> None:
        """Free the `count` least recently used pages. The caller has checked that there are `count` idle pages."""
        forgotten: list[Forgotten] = []
        for _ in range(count):
            node = self._least_recent_leaf() or self._least_recent_idle()
            forgotten.append(Forgotten(node.hash, node.page, node.exact, node.drafted))
            self._forget(node)
        if forgotten and self.forgets is not None:
            self.forgets(forgotten)

    def check(self) -> None:
        """Raises AssertionError unless the tree, its index by page and its counts of children agree, and every
        evictable leaf is an eviction candidate."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[None]:
        """Like `check`, SLICE entries between two yields; nothing may change until it is exhausted."""
        queued: Counter[PageHash] = Counter()
        for at, (_, hash) in enumerate(self._candidates):
            assert hash in self._nodes, "an eviction candidate is no longer cached"
            queued[hash] += 1
            if at % SLICE == 0:
                yield
        children: Counter[PageHash] = Counter()
        for at, (hash, node) in enumerate(self._nodes.items()):
            assert (hash, node) == (node.hash, self._by_page.get(node.page)), "pages and hashes differ"
            assert queued[hash] == node.queued, f"page {node.page}: candidates differ"
            if node.previous is not None:
                children[node.previous] += 1
            if self._pool.is_idle(node.page) and not self._children[hash]:
                assert node.queued, f"page {node.page} is evictable, but not a candidate"
            if at % SLICE == 0:
                yield
        assert len(self._by_page) == len(self._nodes), "pages and hashes differ"
        for counted, found in ((self._children, children), (children, self._children)):
            for at, (hash, count) in enumerate(counted.items()):
                assert found[hash] == count, f"children counted {self._children[hash]}, found {children[hash]}"
                if at % SLICE == 0:
                    yield

    def _replace(self, node: _Node, page: PageId, exact: bool) -> None:
        self._pool.give(node.page, Holder.CACHE)
        del self._by_page[node.page]
        self._pool.share(page, Holder.CACHE)
        self._by_page[page] = node
        node.page, node.exact, node.drafted = page, exact, True

    def _enqueue(self, node: _Node) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._candidates, (node.used, node.hash))

    def _least_recent_leaf(self) -> _Node | None:
        while self._candidates:
            used, hash = heapq.heappop(self._candidates)
            node = self._nodes[hash]
            node.queued = False
            if not self._pool.is_idle(node.page) or self._children[hash]:
                continue  # queued again when its last holder or last child is removed
            if node.used == used:
                return node
            self._enqueue(node)
        return None

    def _least_recent_idle(self) -> _Node:
        idle = [node for node in self._nodes.values() if self._pool.is_idle(node.page)]
        return min(idle, key=lambda node: node.used)

    def _forget(self, node: _Node) -> None:
        del self._nodes[node.hash], self._by_page[node.page]
        if self._changes is not None:
            self._changes[node.hash] = False
        if self.log is not None and node.told:
            self.log.append(Changed(node.hash, there=False))
        self._pool.give(node.page, Holder.CACHE)
        if node.previous is None:
            return
        self._children[node.previous] -= 1
        if not self._children[node.previous]:
            del self._children[node.previous]
            parent = self._nodes.get(node.previous)
            if parent is not None and self._pool.is_idle(parent.page):
                self._enqueue(parent)
