"""Law 9: after all jobs have ended or were aborted, every page is free or held by the prefix cache, and nothing else.

Hypothesis searches for an order of arrivals, aborts, plans and late settlings that breaks this, and shrinks it.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from redline.messages.job import PAGE_TOKENS
from redline.policy.draft_count import Worth
from tests.fakes import World

LENGTHS = st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 200])


def everything_can_be_had(world: World) -> None:
    """Every page not held by a job is free or cached; and every cached page can be evicted and allocated."""
    pool, cache = world.planner._pages.pool, world.planner._pages.cache
    assert (pool.used, pool.free + len(cache)) == (0, pool.total)
    cache.evict(pool.idle)
    assert (pool.free, len(cache)) == (pool.total, 0)
    assert sorted(pool.take(pool.total)) == list(range(pool.total)), "a page is allocated twice, or never"


class Life(RuleBasedStateMachine):
    world: World

    @initialize(
        pages=st.integers(5, 12),
        ahead=st.integers(0, 3),
        slots=st.integers(1, 5),
        step=st.sampled_from([8, 64, 200]),
        drafts=st.sampled_from([0, 1, 3, 15]),
        learned=st.booleans(),
    )
    def begin(self, pages: int, ahead: int, slots: int, step: int, drafts: int, learned: bool) -> None:
        # A job needs five pages at most.
        self.world = World(
            pages=pages,
            max_model_len=5 * PAGE_TOKENS,
            ahead=ahead,
            max_running=slots,
            step_tokens=step,
            draft_tokens=drafts,
            learned=learned and drafts > 0,
        )

    @rule(
        length=LENGTHS,
        root=st.integers(0, 1),
        max_tokens=st.sampled_from([0, 1, 2, 64, 200]),
        stop=st.booleans(),
        given=st.sampled_from([0, 0, 1, 63, 64, 100]),
    )
    def submit(self, length: int, root: int, max_tokens: int, stop: bool, given: int) -> None:
        tokens = tuple((at * at + root) % 89 for at in range(length))
        self.world.submit(tokens, max_tokens=max_tokens, stop_ids=(3, 14, 15) if stop else (), given=given)

    @precondition(lambda self: self.world.stories)
    @rule(data=st.data())
    def follow_up(self, data: st.DataObject) -> None:
        story = data.draw(st.sampled_from(list(self.world.stories.values())))
        tokens = (story.job.tokens + tuple(story.tokens))[: 4 * PAGE_TOKENS]
        self.world.submit((*tokens, 7), max_tokens=20)

    @precondition(lambda self: self.world.stories)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(list(self.world.stories.values()))))

    @rule(pays=st.booleans())
    def the_drafter_is_left_or_taken_up(self, pays: bool) -> None:
        self.world.planner._speculation._worth = Worth(pays)

    @rule()
    def plan(self) -> None:
        self.world.plan()

    @precondition(lambda self: self.world.flights)
    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule(turns=st.integers(1, 100))
    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            self.world.turn()

    @invariant()
    def the_books_are_right(self) -> None:
        if hasattr(self, "world"):
            self.world.planner.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()
            everything_can_be_had(self.world)


Life.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLife = Life.TestCase


def test_aborting_everything_in_every_phase_leaves_nothing_behind():
    for turns in range(12):
        world = World(pages=8, max_running=3, step_tokens=64, ahead=2)
        stories = [world.submit(tuple(range(60 + first)), max_tokens=100) for first in range(6)]
        for _ in range(turns):
            world.turn()
        for story in stories:
            world.abort(story)
        while world.flights:
            world.settle()
        world.check_end()
        everything_can_be_had(world)
        assert all(story.finish == "aborted" for story in stories)
