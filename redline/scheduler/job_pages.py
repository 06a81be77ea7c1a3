"""The KV pages of jobs, over the page pool and the prefix cache: which cached pages a job starts from, the pages that
it gets while it runs, and those that it gives to the cache once they are full.

Every page in a job's page table has one reference by that job (`Holder.JOBS`), from the moment that it is taken or
matched until it is released.
"""

from collections.abc import Callable

from redline.messages.job import PAGE_TOKENS, PageHash, PageId
from redline.scheduler.active import ActiveJob, pages_for
from redline.scheduler.page_counts import PagePool
from redline.scheduler.prefix_cache import Content, PrefixCache
from redline.scheduler.speculation import Speculation

HashPage = Callable[[PageHash | None, tuple[int, ...]], PageHash]
"""A page's hash from the previous page's hash (None: the first page, of a job without salt) and its PAGE_TOKENS
tokens."""


class JobPages:
    """Takes pages of `pool` for jobs, evicting cached ones if none is free, and inserts full ones into `cache`."""

    def __init__(self, pages: int, hash_page: HashPage, speculation: Speculation, step_tokens: int) -> None:
        """pages: number of pages. step_tokens: maximum number of positions of a step."""
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool)
        self._hash_page = hash_page
        self._speculation = speculation
        self._step_tokens = step_tokens

    @property
    def obtainable(self) -> int:
        """Number of pages that can be taken: those that are free, and those that eviction can free."""
        return self.pool.free + self.pool.idle

    def take(self, count: int) -> list[PageId]:
        """Allocate pages. The caller has checked that so many are obtainable."""
        self.cache.evict(max(0, count - self.pool.free))
        return self.pool.take(count)

    def match(self, job: ActiveJob) -> list[PageId]:
        """Cached pages that the job can start from. Its last token is always computed, because its row samples.

        Only pages of the prompt are taken from the cache: a resumed job must get the same results as before, and only
        recomputing the positions of the answer in the same form guarantees the same bits. For the same reason it takes
        pages that are not bit-equal to a prefill only if it started from such pages.

        With pages that the learned drafter has not read, the job cannot use the drafter. If one step is enough to
        recompute them, they are recomputed, and the cache then keeps the new pages.
        """
        hashes, exact = job.hashes[: job.usable], bool(job.generated) and job.exact
        matched = self.cache.match(hashes, exact=exact)
        if self._speculation.follows:
            drafted = self.cache.match(hashes, exact=exact, drafted=True)
            if (len(matched) - len(drafted)) * PAGE_TOKENS <= self._step_tokens:
                return drafted
        return matched

    def paged(self, job: ActiveJob, end: int, extra: int) -> int:
        """How many of `extra` positions after [0, end), which has pages, can have pages too. Allocates free or idle
        pages; no job is preempted for a draft token."""
        if end + extra <= len(job.pages) * PAGE_TOKENS:  # the usual case
            return extra
        wanted = min(end + extra, job.target)
        while wanted > len(job.pages) * PAGE_TOKENS and self.obtainable:
            job.pages += self.take(1)
        paged = len(job.pages) * PAGE_TOKENS
        return extra if wanted <= paged else max(0, paged - end)

    def give(self, job: ActiveJob, matched: list[PageId]) -> None:
        """Give a job these cached pages and new pages after them; the caller has checked that there is room."""
        self.cache.use(matched, of_tokens=job.known)
        job.pages = matched + self.take(pages_for(job.known) - len(matched))
        job.sent = job.kept = len(matched)
        job.planned = job.computed = len(matched) * PAGE_TOKENS
        job.drafting = self._speculation.follows and all(self.cache.is_drafted(page) for page in matched)
        job.read = job.computed if job.drafting else 0
        if not job.generated:
            job.exact = all(self.cache.is_exact(page) for page in matched)

    def release(self, job: ActiveJob) -> None:
        """Release the pages of a job, which has no steps in flight."""
        for page in job.pages:
            self.cache.release(page)

    def remember(self, job: ActiveJob) -> None:
        """Insert every page that has become full into the prefix cache."""
        full = min(job.computed, job.known) // PAGE_TOKENS
        hashes = job.hashes
        for index in range(job.kept, full):
            previous = hashes[index - 1] if index else None
            end = (index + 1) * PAGE_TOKENS
            if index == len(hashes):
                if not job.hashable:
                    return
                hashes.append(self._hash_page(previous, job.tokens(end - PAGE_TOKENS, end)))
            exact, drafted = job.exact and end <= job.prompt, end <= job.read
            content = self.content(job, index) if self.cache.log is not None and not job.job.media else None
            self.cache.insert(hashes[index], job.pages[index], previous, exact=exact, drafted=drafted, content=content)
            job.kept = index + 1

    def content(self, job: ActiveJob, index: int) -> Content:
        """Content of page `index` of a job."""
        return Content(job.tokens(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS), job.job.salt)
