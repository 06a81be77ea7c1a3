"""Pages that the prefix cache evicts and that come back from an offload tier.

Whatever is kept, lost, late or given up half-way, each answer equals the job's answer when it runs alone, and every
page is returned.

`FakeRunner` verifies each position that a row would read, so a page that is read too early, or under a wrong hash, or
lacks its drafter's rows, fails the test at that point.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import pytest

from redline.messages.job import JobId, PageHash
from redline.messages.step import Step
from redline.policy.draft_count import Worth
from redline.scheduler.kv_tier import Fetch, Lack, PageFlags
from redline.scheduler.page_counts import Holder
from redline.scheduler.prefix_cache import Forgotten
from tests.fakes import A_GRAMMAR, PAGE_TOKENS, FakeRunner, World
from tests.fakes import _Page as Page
from tests.scheduler.test_random_worlds import random_tokens
from tests.seeds import fresh_seed


@dataclass
class Waits:
    """A job that waits, and the fetch in flight for it."""

    turns: int  # turns until its state changes
    fetch: Fetch | None = None


@dataclass
class FakeBelow:
    """Keeps the newest pages, and returns them at random times; until then it fills their destinations with garbage."""

    world: World
    random: random.Random
    most: int = 30
    keeps: OrderedDict[PageHash, tuple[Page, PageFlags]] = field(
        default_factory=OrderedDict[PageHash, tuple[Page, PageFlags]]
    )
    jobs: dict[JobId, Waits] = field(default_factory=dict[JobId, Waits])
    fetched: int = 0
    steps: int = 0

    @property
    def runner(self) -> FakeRunner:
        return self.world.runner

    def forgets(self, pages: Sequence[Forgotten]) -> None:
        for hash, page, exact, drafted in pages:
            if self.random.random() < 0.9:
                self.keeps[hash] = deepcopy(self.runner.pages[page]), PageFlags(exact, drafted)
                self.keeps.move_to_end(hash)
        while len(self.keeps) > self.most:
            self.keeps.popitem(last=False)

    def awaits(self, id: JobId, lack: Lack) -> bool:
        if not self.found(lack) or self.random.random() < 0.1:
            return False
        self.jobs[id] = Waits(self.random.randrange(3))
        return True

    def took(self, step: Step, seconds: float) -> None:
        self.steps += 1

    def found(self, lack: Lack) -> int:
        for count, hash in enumerate(lack.hashes):
            kept = self.keeps.get(hash)
            if kept is None or (lack.exact and not kept[1].exact) or (lack.drafted and not kept[1].drafted):
                return count
        return len(lack.hashes)

    def turn(self) -> None:
        planner = self.world.planner
        for id, waits in list(self.jobs.items()):
            lack = planner.transfers.lack(id)
            if waits.fetch is not None:
                for page in waits.fetch.pages:
                    self.runner.pages[page] = Page([-1] * PAGE_TOKENS, [-1] * PAGE_TOKENS, [-1] * PAGE_TOKENS)
            waits.turns -= 1
            if waits.turns >= 0 and (lack is not None or waits.fetch is not None):
                continue
            waits.turns = self.random.randrange(4)
            if waits.fetch is not None:
                self.end(waits.fetch)
                waits.fetch = None
            elif lack is not None and self.found(lack) and self.random.random() < 0.9:
                waits.fetch = planner.transfers.fetch(id, self.random.randrange(1, self.found(lack) + 1))
                if waits.fetch is not None:
                    continue
                if self.random.random() < 0.97:
                    continue  # there may be room later
            if lack is not None:
                planner.transfers.compute_here(id)
            del self.jobs[id]

    def end(self, fetch: Fetch) -> None:
        """Complete a fetch: the pages that arrived, possibly only the first ones, are in place."""
        kept: list[PageFlags] = []
        for hash, page in zip(fetch.hashes, fetch.pages, strict=True):
            if hash not in self.keeps or self.random.random() < 0.1:
                break
            self.runner.pages[page] = deepcopy(self.keeps[hash][0])
            kept.append(self.keeps[hash][1])
        self.fetched += len(kept)
        self.world.planner.transfers.fetched(fetch, kept)


def finish(world: World, below: FakeBelow) -> None:
    for _ in range(20_000):
        if world.planner.idle and not below.jobs:
            break
        world.turn()
        below.turn()
    assert not below.jobs
    world.check_end()


def live(seed: int, draft_tokens: int = 0, learned: bool = False) -> FakeBelow:
    random_ = random.Random(seed)
    world = World(
        pages=random_.choice([7, 8, 9, 12, 16]),
        ahead=seed % 3,
        step_tokens=random_.choice([8, 64, 100, 512]),
        max_running=random_.randrange(1, 8),
        draft_tokens=draft_tokens,
        learned=learned,
        seconds=lambda _, __: 1e-3,
    )
    below = FakeBelow(world, random_)
    world.planner.transfers.attach(below)
    roots = [random_tokens(random_, random_.randrange(64, 250)) for _ in range(6)]
    crowd = random_.choice([1, 1, 2, 3, 9])  # concurrent jobs; with many there is no room for pages that come back
    for _ in range(random_.randrange(200, 600)):
        stories = list(world.stories.values())
        calls = sum(story.finish is None for story in stories) < crowd
        chance = random_.random()
        if chance < 0.4 and calls:
            tokens = random_.choice(roots)
            if stories and random_.random() < 0.3:
                story = random_.choice(stories[-6:])
                tokens = story.job.tokens + story.expected[: random_.choice([len(story.tokens), 100])]
            world.submit(
                tokens[:300] + random_tokens(random_, random_.choice([0, 1, 1, 3, 70])),
                max_tokens=random_.choice([0, 1, 1, 2, 2, 30]),
                salt="a" if random_.random() < 0.1 else "",
                tenant=random_.choice(["", "", "", "a"]),
                given=random_.choice([0, 0, 0, 20]),
                grammar=A_GRAMMAR if random_.random() < 0.1 else None,
            )
        elif 0.4 < chance < 0.41 and stories:
            world.abort(random_.choice(stories))
        elif 0.41 < chance < 0.43 and learned:
            world.planner._speculation._worth = Worth(pays=random_.random() < 0.6)
        elif random_.random() < 0.6:
            world.plan()
        elif world.flights:
            world.settle()
        below.turn()
        world.planner.check()
    finish(world, below)
    return below


@pytest.mark.parametrize(("drafts", "learned"), [(0, False), (3, True)])
def test_random_worlds_with_memory_below(drafts: int, learned: bool) -> None:
    lived = [live(seed, drafts, learned) for seed in range(15)]
    lived += [live(fresh_seed() + number, drafts, learned) for number in range(5)]
    assert sum(below.fetched for below in lived) > 40, "too few pages came back"
    assert sum(below.steps for below in lived) > 1000, "step times must be reported to the tier"
    if learned:
        assert sum(below.world.runner.drafter_rows_from_cache for below in lived) > 1000


def one_job_waits(pages: int = 8) -> tuple[World, FakeBelow, tuple[int, ...]]:
    """A world in which a prompt of 200 tokens was evicted and is stored in the tier; and that prompt."""
    world = World(pages=pages, max_model_len=1000, step_tokens=512, max_running=4, ahead=0, seconds=lambda _, __: 1e-3)
    below = FakeBelow(world, random.Random(5))
    below.random.random = lambda: 0.5  # no page is lost
    world.planner.transfers.attach(below)
    asked = random_tokens(random.Random(1), 200)
    world.submit(asked, max_tokens=1)
    finish(world, below)
    world.submit(random_tokens(random.Random(2), 64 * pages - 20), max_tokens=1)
    finish(world, below)
    assert len(below.keeps) >= 3
    return world, below, asked


def test_who_comes_behind_a_job_that_waits_for_pages_does_not_wait() -> None:
    world, below, asked = one_job_waits()
    first = world.submit(asked, max_tokens=1)
    below.jobs[first.job.id].turns = 10
    second = world.submit((1, 2, 3), max_tokens=1)
    for _ in range(3):
        world.turn()
    assert (first.finish, second.finish) == (None, "length")
    finish(world, below)
    assert first.deltas[-1].cached_tokens == 192


def test_an_aborted_job_leaves_its_pages_with_the_fetch_until_nothing_writes_to_them() -> None:
    world, below, asked = one_job_waits()
    story = world.submit(asked, max_tokens=1)
    below.jobs[story.job.id].turns = 0
    below.turn()
    fetch = below.jobs[story.job.id].fetch
    assert fetch is not None
    world.abort(story)
    world.planner.check()
    assert world.planner.load().pages_used == len(fetch.pages) == 3
    other = world.submit(random_tokens(random.Random(3), 64 * 4), max_tokens=1)
    finish(world, below)
    assert other.finish == "length"
    assert world.planner.load().pages_used == 0


def test_a_fetch_waits_for_room_and_then_for_nobody_that_came_later() -> None:
    world, below, asked = one_job_waits()
    runs = world.submit(random_tokens(random.Random(4), 64 * 7), max_tokens=60)
    world.turn()
    story = world.submit(asked, max_tokens=1)
    assert world.planner.transfers.fetch(story.job.id, 3) is None, "the running job holds all pages"
    world.abort(runs)
    world.settle()
    fetch = world.planner.transfers.fetch(story.job.id, 3)
    assert fetch is not None
    below.end(fetch)
    world.planner.transfers.compute_here(story.job.id)
    del below.jobs[story.job.id]
    finish(world, below)
    assert story.deltas[-1].cached_tokens == 192


def test_the_cached_prefix_of_what_is_fetched_is_not_forgotten_meanwhile() -> None:
    world, below, asked = one_job_waits(pages=8)
    cached = world.submit(asked[:64], max_tokens=1)
    finish(world, below)
    assert cached.finish == "length"
    story = world.submit(asked, max_tokens=1)
    fetch = world.planner.transfers.fetch(story.job.id, 2)
    assert fetch is not None
    assert (len(fetch.prefix), len(fetch.pages)) == (1, 2)
    pool = world.planner._pages.pool
    assert not pool.is_idle(fetch.prefix[0])
    world.submit(random_tokens(random.Random(6), 64 * 5 - 1), max_tokens=1)
    for _ in range(3):
        world.turn()
    below.end(fetch)
    assert pool._counts[Holder.FETCHES] == [0] * pool.total
    world.planner.transfers.compute_here(story.job.id)
    del below.jobs[story.job.id]
    finish(world, below)
    assert story.deltas[-1].cached_tokens == 192


def test_forgetting_all_that_is_idle_tells_of_every_page_children_first() -> None:
    world, below, asked = one_job_waits()
    world.submit(asked, max_tokens=1)
    finish(world, below)
    below.keeps.clear()
    world.planner.forget_idle()
    world.planner.check()
    assert world.planner.load().pages_cached == 0
    hashes = [hash for hash in below.keeps if hash in world.stories[JobId("job-2")].job.pages]
    assert hashes == list(reversed(world.stories[JobId("job-2")].job.pages[:3]))
