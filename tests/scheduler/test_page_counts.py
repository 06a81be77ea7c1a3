"""The accounting of the page pool: who holds each page, and that `check` detects errors."""

import pytest

from redline.scheduler.page_counts import Holder, PagePool


def held(pool: PagePool, *, jobs: list[int], cache: list[int]) -> None:
    pool.check({Holder.JOBS: jobs, Holder.CACHE: cache})


def test_a_page_is_free_again_when_its_last_holder_gives_it_back():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.share(page, Holder.JOBS)
    pool.share(page, Holder.CACHE)
    assert (pool.free, pool.used, pool.idle) == (1, 1, 0)
    pool.give(page, Holder.JOBS)
    pool.give(page, Holder.JOBS)
    assert (pool.free, pool.used, pool.idle) == (1, 0, 1)
    pool.give(page, Holder.CACHE)
    assert (pool.free, pool.used, pool.idle) == (2, 0, 0)
    held(pool, jobs=[], cache=[])


def test_more_pages_than_are_free_cannot_be_taken():
    with pytest.raises(AssertionError, match="3 pages asked for, 2 free"):
        PagePool(2).take(3)


def test_a_holder_cannot_give_what_it_does_not_hold():
    pool = PagePool(1)
    (page,) = pool.take(1)
    with pytest.raises(AssertionError, match="CACHE, which does not hold it"):
        pool.give(page, Holder.CACHE)


def test_a_free_page_cannot_be_shared():
    pool = PagePool(1)
    (page,) = pool.take(1)
    pool.give(page, Holder.JOBS)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(page, Holder.JOBS)


def test_check_finds_a_page_that_no_job_remembers():
    pool = PagePool(3)
    first, second = pool.take(2)
    held(pool, jobs=[first, second], cache=[])
    with pytest.raises(AssertionError, match=f"page {second}: 1 references by JOBS counted, 0 held"):
        held(pool, jobs=[first], cache=[])


def test_check_counts_every_job_that_shares_a_page():
    pool = PagePool(1)
    (page,) = pool.take(1)
    pool.share(page, Holder.JOBS)
    held(pool, jobs=[page, page], cache=[])
    with pytest.raises(AssertionError, match="2 references by JOBS counted, 1 held"):
        held(pool, jobs=[page], cache=[])
