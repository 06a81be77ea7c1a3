"""The prefix cache alone: longest match, eviction of the least recently used leaf, never of a page in use."""

import random

from redline.messages.job import PAGE_TOKENS, PageHash, PageId
from redline.scheduler.page_counts import Holder, PagePool
from redline.scheduler.prefix_cache import PrefixCache


def remember(cache: PrefixCache, pool: PagePool, chain: str, *, exact: bool = True) -> list[PageId]:
    """Caches one page for each prefix of `chain`, as a job that computed them and then ended would."""
    pages = pool.take(len(chain))
    for end, page in enumerate(pages, 1):
        previous = name(chain[: end - 1]) if end > 1 else None
        cache.insert(name(chain[:end]), page, previous, exact=exact)
    for page in pages:
        cache.release(page)
    return pages


def name(prefix: str) -> PageHash:
    return PageHash(prefix.encode())


def prefixes(chain: str) -> list[PageHash]:
    return [name(chain[:end]) for end in range(1, len(chain) + 1)]


def test_the_longest_cached_prefix_is_found():
    pool = PagePool(8)
    cache = PrefixCache(pool)
    pages = remember(cache, pool, "abc")
    assert cache.match(prefixes("abcd")) == pages
    assert cache.match(prefixes("abx")) == pages[:2]
    assert cache.match(prefixes("x")) == []


def test_an_exact_match_stops_at_the_first_page_that_a_prefill_did_not_compute():
    pool = PagePool(8)
    cache = PrefixCache(pool)
    first = remember(cache, pool, "a")
    both = [*first, remember(cache, pool, "ab", exact=False)[1]]
    assert cache.match(prefixes("ab"), exact=True) == first
    assert cache.match(prefixes("ab")) == both


def test_a_second_page_with_a_known_hash_is_not_kept():
    pool = PagePool(8)
    cache = PrefixCache(pool)
    pages = remember(cache, pool, "ab")
    remember(cache, pool, "ab")
    assert cache.match(prefixes("ab")) == pages
    assert (pool.free, pool.idle) == (6, 2)


def test_a_page_that_the_drafter_has_read_takes_the_place_of_one_that_it_has_not():
    pool = PagePool(8)
    cache = PrefixCache(pool)
    remember(cache, pool, "a")
    (read,) = pool.take(1)
    cache.insert(name("a"), read, None, exact=False, drafted=True)
    assert cache.match(prefixes("a"), drafted=True) == [], "pages of lower precision must not match"
    cache.insert(name("a"), read, None, exact=True, drafted=True)
    assert cache.match(prefixes("a"), exact=True, drafted=True) == [read]
    (later,) = pool.take(1)
    cache.insert(name("a"), later, None, exact=True, drafted=False)
    assert cache.match(prefixes("a")) == [read]
    cache.release(later)
    cache.release(read)
    cache.check()
    assert (pool.free, pool.idle) == (7, 1)
    cache.evict(1)
    assert pool.free == 8


def test_the_least_recently_used_leaf_goes_first():
    pool = PagePool(4)
    cache = PrefixCache(pool)
    a, ab = remember(cache, pool, "ab")
    x, _xy = remember(cache, pool, "xy")
    cache.use([a, ab], of_tokens=2 * PAGE_TOKENS)
    for page in (a, ab):
        cache.release(page)
    for expected in ([a, ab, x], [a, ab], [a], []):
        cache.evict(1)
        assert sorted(cache.pages()) == sorted(expected)
        cache.check()
    assert pool.free == 4


def test_a_page_that_a_job_holds_is_never_evicted():
    pool = PagePool(3)
    cache = PrefixCache(pool)
    a, _b, _c = remember(cache, pool, "abc")
    cache.use([a], of_tokens=PAGE_TOKENS)
    assert pool.idle == 2
    cache.evict(2)
    assert list(cache.pages()) == [a]
    cache.release(a)
    assert pool.idle == 1
    cache.evict(1)
    assert pool.free == 3


def test_a_page_in_the_middle_goes_when_all_that_continues_it_is_in_use():
    pool = PagePool(4)
    cache = PrefixCache(pool)
    (a,) = remember(cache, pool, "a")
    twin, b = pool.take(2)  # a job that computed "ab" itself, while another job cached "a"
    cache.insert(name("a"), twin, None, exact=True)
    cache.insert(name("ab"), b, name("a"), exact=True)
    assert pool.idle == 1
    cache.evict(1)
    assert list(cache.pages()) == [b]
    assert cache.match(prefixes("ab")) == []
    cache.insert(name("a"), twin, None, exact=True)
    assert cache.match(prefixes("ab")) == [twin, b]
    cache.check()
    assert a not in cache.pages()


def test_of_the_pages_in_the_middle_the_least_recently_used_goes():
    pool = PagePool(8)
    cache = PrefixCache(pool)
    firsts = [remember(cache, pool, chain)[0] for chain in "abc"]
    # pages of a running job, which has a duplicate of the first page
    for letter, child in zip("abc", pool.take(3), strict=True):
        cache.insert(name(f"{letter}x"), child, name(letter), exact=True)
    for first in (firsts[1], firsts[0], firsts[2]):
        cache.use([first], of_tokens=PAGE_TOKENS)
        cache.release(first)
    for expected in (firsts[1], firsts[0], firsts[2]):
        assert expected in cache.pages()
        cache.evict(1)
        assert expected not in cache.pages()
        cache.check()


def test_hits_and_queries_are_counted_in_tokens():
    pool = PagePool(4)
    cache = PrefixCache(pool)
    pages = remember(cache, pool, "ab")
    cache.use(cache.match(prefixes("abc")), of_tokens=200)
    assert (cache.queries, cache.hits) == (200, 2 * PAGE_TOKENS)
    assert pages == cache.match(prefixes("ab"))


def test_what_is_idle_can_always_be_evicted_and_the_books_stay_right():
    """Random operations, compared with a plain model of the holders: eviction frees exactly the pages
    that it reports.
    """
    random_ = random.Random(1)
    for _ in range(60):
        pool = PagePool(12)
        cache = PrefixCache(pool)
        held: list[list[PageId]] = []
        for _ in range(80):
            match random_.randrange(3):
                case 0:
                    chain = "".join(random_.choice("ab") for _ in range(random_.randrange(1, 5)))
                    matched = cache.match(prefixes(chain))
                    cache.use(matched, of_tokens=0)
                    missing = len(chain) - len(matched)
                    if missing > pool.free + pool.idle:
                        for page in matched:
                            cache.release(page)
                        continue
                    cache.evict(max(0, missing - pool.free))
                    pages = matched + pool.take(missing)
                    for end in range(len(matched) + 1, len(chain) + 1):
                        if random_.random() < 0.7:
                            previous = name(chain[: end - 1]) if end > 1 else None
                            cache.insert(name(chain[:end]), pages[end - 1], previous, exact=True)
                    held.append(pages)
                case 1 if held:
                    for page in held.pop(random_.randrange(len(held))):
                        cache.release(page)
                case _:
                    count = random_.randrange(pool.idle + 1)
                    free, in_use = pool.free, {page for pages in held for page in pages}
                    cached = set(cache.pages())
                    cache.evict(count)
                    assert pool.free == free + count
                    assert not (cached - set(cache.pages())) & in_use
            cache.check()
            pool.check({Holder.CACHE: cache.pages(), Holder.JOBS: [page for pages in held for page in pages]})
