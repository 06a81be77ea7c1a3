"""The page index equals the workers' prefix caches after any sequence of events."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from redline.messages.job import PageHash, PageId
from redline.messages.news import Cached
from redline.router.index import PageIndex
from redline.scheduler.page_counts import Holder, PagePool
from redline.scheduler.prefix_cache import PrefixCache

WORKERS = "abc"


def chain(of: int, length: int) -> list[PageHash]:
    """Hashes of a prompt; prompts with a common prefix share their first hashes."""
    return [PageHash(b"%d of %d" % (n, of if n >= 3 else of % 2)) for n in range(length)]


class Told:
    """A worker's prefix cache, and the events that it would publish."""

    def __init__(self) -> None:
        self.pool = PagePool(6)
        self.cache = PrefixCache(self.pool)
        self.number = 0

    def news(self, *, whole: bool = False) -> Cached | None:
        whole = whole or not self.number
        stored, removed = self.cache.changes(whole=whole)
        if not (stored or removed or whole):
            return None
        self.number += 1
        return Cached(number=self.number, stored=tuple(stored), removed=tuple(removed), whole=whole)

    def prompt(self, pages: list[PageHash]) -> None:
        """Computes a prompt: cached pages are reused, new ones take free pages, possibly evicting others."""
        held: list[PageId] = self.cache.match(pages)
        self.cache.use(held, of_tokens=0)
        for number in range(len(held), len(pages)):
            if not self.pool.free:
                if not self.pool.idle:
                    break
                self.cache.evict(1)
            (page,) = self.pool.take(1)
            self.cache.insert(pages[number], page, pages[number - 1] if number else None, exact=True)
            held.append(page)
        for page in held:
            self.cache.release(page, Holder.JOBS)

    def cached(self, pages: list[PageHash]) -> int:
        return len(self.cache.match(pages))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_says_what_the_caches_have_after_any_prompts_restarts_and_gaps(data: st.DataObject) -> None:
    index, workers = PageIndex(), {name: Told() for name in WORKERS}
    recall: set[str] = set()
    for name in workers:
        index.begin(name)
    for _ in range(data.draw(st.integers(1, 25))):
        name = data.draw(st.sampled_from(WORKERS))
        match data.draw(st.sampled_from(["prompt", "prompt", "prompt", "restart", "gap", "end"])):
            case "prompt":
                workers[name].prompt(chain(data.draw(st.integers(0, 5)), data.draw(st.integers(1, 6))))
            case "restart":
                workers[name] = Told()
                recall.discard(name)
                index.begin(name)
            case "end":
                workers[name] = Told()
                recall.discard(name)
                index.forget(name)
                index.begin(name)
            case _:
                workers[name].news()  # these events are lost
                workers[name].prompt(chain(9, 2))
        news = workers[name].news()
        if news is not None and not index.take(name, news):
            recall.add(name)
        index.check()
    for name in recall:
        news = workers[name].news(whole=True)
        assert news is not None
        assert index.take(name, news)
    for name, worker in workers.items():  # a gap is detected only with the next message after it
        worker.prompt(chain(7, 1))
        news = worker.news()
        if news is not None and not index.take(name, news):
            whole = worker.news(whole=True)
            assert whole is not None
            assert index.take(name, whole)
    index.check()
    for of in range(10):
        for length in range(7):
            pages = chain(of, length)
            assert index.cached(pages) == {name: worker.cached(pages) for name, worker in workers.items()}
    assert len(index) == sum(len(worker.cache) for worker in workers.values())
    for name in workers:
        index.forget(name)
    assert (len(index), index.cached(chain(1, 3))) == (0, {})
    index.check()


def test_what_was_missed_is_asked_for_once() -> None:
    index = PageIndex()
    index.begin("a")
    page, other = chain(1, 2)
    assert index.take("a", Cached(number=1, stored=(page,), whole=True))
    assert not index.take("a", Cached(number=3, stored=(other,)))
    assert index.cached([page]) == {"a": 0}, "uncertain pages must not be reported"
    assert index.take("a", Cached(number=4, removed=(page,)))
    assert len(index) == 0
    assert index.take("a", Cached(number=5, stored=(other,), whole=True))
    assert index.take("a", Cached(number=6, stored=(page,)))
    assert index.cached([page, other]) == {"a": 2}


class Looks(dict[PageHash, int]):
    """A dictionary that counts its lookups."""

    count = 0

    def get(self, key: PageHash, default: int = 0, /) -> int:  # type: ignore[override]
        self.count += 1
        return super().get(key, default)


def test_a_prompt_of_100_000_tokens_is_looked_up_among_64_workers_with_one_look_a_page() -> None:
    index, draw = PageIndex(), random.Random(1)
    pages = [PageHash(draw.randbytes(16)) for _ in range(1563)]
    for number in range(64):
        index.begin(str(number))
        index.take(
            str(number), Cached(number=1, stored=tuple(pages[: 20 * number] if number < 63 else pages), whole=True)
        )
    looks = index._holders = Looks(index._holders)
    assert index.cached(pages) == {str(number): 20 * number if number < 63 else 1563 for number in range(64)}
    assert looks.count == 1563
    looks.count = 0
    index.forget("63")
    looks.count = 0
    assert max(index.cached(pages).values()) == 20 * 62
    assert looks.count == 20 * 62 + 1, "no worker has the pages after these"
