"""More grammars than the cache keeps: each job that waits for its grammar gets it, and none is compiled twice while
jobs wait.
"""

import pytest

from redline.messages.job import Grammar
from redline.run.grammar.matcher import KEPT, KEPT_CHARS, Matchers
from tests.fakes import World
from tests.later import Later, compile_later


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """The thread of the `Matchers` that a test creates, replaced so that the test decides when it runs."""
    [thread] = compile_later(monkeypatch, 1)
    return thread


def world_of(matchers: Matchers, **config: float) -> World:
    world = World(pages=64, step_tokens=64, **config)
    world.planner.compile_with(lambda grammar: matchers.hold(grammar.text).done)
    return world


def turns(world: World, later: Later, count: int) -> None:
    for _ in range(count):
        world.turn()
        world.planner.check()
        later.run()


@pytest.mark.parametrize(
    "texts",
    [[str(n) for n in range(KEPT + 1)], [letter * (KEPT_CHARS // 2 + 1) for letter in "ab"]],
    ids=["more than are kept", "longer than are kept"],
)
def test_jobs_that_come_together_all_end_and_each_grammar_is_compiled_once(texts: list[str], later: Later):
    matchers = Matchers(lambda: None, 32)  # type: ignore[arg-type]
    world = world_of(matchers, max_running=4)
    stories = [world.submit((n, n + 1), grammar=Grammar(text=text)) for n, text in enumerate(texts)]
    turns(world, later, 20 * len(stories))
    assert [story.finish for story in stories] == ["length"] * len(stories)
    assert later.compiled == texts
    world.check_end()
    assert (set(matchers._alive), matchers._chars <= KEPT_CHARS) == (set(matchers._compiled), True)
    assert len(matchers._compiled) <= KEPT, "ended jobs must release their grammars"


def test_jobs_that_wait_long_behind_others_find_their_grammars_compiled(later: Later):
    matchers = Matchers(lambda: None, 32)  # type: ignore[arg-type]
    world = world_of(matchers, max_running=1)
    running = world.submit((1, 2), max_tokens=300)
    texts = [str(n) for n in range(2 * KEPT)]
    stories = []
    for n, text in enumerate(texts):
        stories.append(world.submit((n, 3), grammar=Grammar(text=text)))
        turns(world, later, 1)
    assert (running.finish, later.compiled) == (None, texts)
    turns(world, later, 20 * len(stories))
    assert [story.finish for story in stories] == ["length"] * len(stories)
    assert later.compiled == texts
    world.check_end()
