"""Grammars with several ranks: rank 0 reports a grammar as compiled only when every rank has compiled
it, and keeps it.
"""

import os
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from redline.messages.codec import Wire, decode, encode
from redline.messages.job import PAGE_TOKENS, Grammar
from redline.messages.news import Stop
from redline.messages.step import Forget, Step
from redline.run.fit import Layout
from redline.run.grammar.matcher import KEPT, KEPT_CHARS, Matchers
from redline.run.runner import Runner
from redline.worker.drawn import DigestComparison
from redline.worker.rank import _obey
from redline.worker.rank_memory import FollowedMemory, RankMemory
from redline.worker.ranks import LeadingRunner
from tests.later import Later, compile_later
from tests.tiny_model import tiny_model


class Two:
    """Rank 0 and a follower in one process: the follower executes rank 0's commands when a test asks for it."""

    def __init__(self, threads: list[Later]) -> None:
        self.ours, self.theirs = threads
        self.memory, self.told = RankMemory(2), list[bytes]()
        told = SimpleNamespace(memory=self.memory, tell=self.tell, close=self.memory.close)
        model = tiny_model()
        layout = Layout(4, 256, model.dtype, model.config.kv_bytes_per_token(model.dtype) * PAGE_TOKENS)
        given: tuple[Any, ...] = model, layout, 1
        self.leader = LeadingRunner(told, *given, tokens=lambda: None)  # type: ignore[arg-type]
        self.follower = Runner(*given, tokens=lambda: None)  # type: ignore[arg-type,return-value]
        self._followed = FollowedMemory(os.dup(self.memory.file), 1, self.follower.kv)

    def tell(self, command: Wire) -> None:
        self.told.append(encode([command]))

    def obey(self) -> None:
        """Execute the commands that the follower has received."""
        commands = [*(command for data in self.told for command in decode(data)), Stop()]
        self.told.clear()
        _obey(self.follower, SimpleNamespace(drain=lambda **_: commands), DigestComparison(1), self._followed)  # type: ignore[arg-type]

    def hold(self, text: str) -> Callable[[], bool]:
        return self.leader.hold(Grammar(text=text))

    def run(self) -> None:
        self.obey()
        self.ours.run()
        self.theirs.run()

    def kept(self, runner: Runner) -> dict[str, bool]:
        """Texts that a rank keeps, and whether they are compiled."""
        matchers = runner._matchers
        assert isinstance(matchers, Matchers)
        return {text: compiled.done() for text, compiled in matchers._alive.items()}


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    made = Two(compile_later(monkeypatch, 2))
    yield made
    made.follower.close()
    made.leader.close()


def test_a_grammar_is_compiled_once_it_is_on_every_rank(two: Two):
    compiled = two.hold("a")
    assert not compiled()
    two.ours.run()
    two.obey()
    assert not compiled()
    two.theirs.run()
    assert compiled()
    assert two.hold("a")()
    assert (two.ours.compiled, two.theirs.compiled, two.told) == (["a"], ["a"], [])


def test_what_rank_0_used_again_is_not_forgotten_by_others(two: Two):
    a, b, c, d = (letter * (3 * KEPT_CHARS // 10) for letter in "abcd")  # the cache has room for three of them
    for text in (a, b, c, a, d):
        two.hold(text)
        two.run()
    assert two.hold(a)()
    assert two.kept(two.follower).get(a)
    assert two.theirs.compiled == [a, b, c, d]


def test_whatever_jobs_hold_is_kept_by_every_rank(two: Two):
    texts = [str(n) for n in range(KEPT + 5)]
    held = [two.hold(text) for text in texts]
    two.run()
    assert all(compiled() for compiled in held)
    assert set(two.kept(two.follower)) == set(texts)
    held.clear()
    assert set(two.kept(two.leader)) == set(texts[5:])
    two.hold(texts[-1])
    two.run()
    assert set(two.kept(two.follower)) == set(texts[5:]), "a grammar that no job needs must not be held"
    assert (two.ours.compiled, two.theirs.compiled) == (texts, texts)


def test_what_is_forgotten_is_told_with_the_next_step(two: Two):
    held = [two.hold(str(n)) for n in range(KEPT + 1)]
    two.run()
    del held[0]
    assert two.told == []
    for number in (1, 2):
        two.leader.launch(Step(number=number, begins=(), rows=()))
    told = [told for command in two.told for told in decode(command)]
    assert [type(command) for command in told] == [Step, Forget, Step]
    assert told[1] == Forget(numbers=(1,))


@pytest.mark.parametrize("seed", range(10))
def test_no_rank_lacks_a_grammar_that_rank_0_says_is_compiled(two: Two, seed: int, monkeypatch: pytest.MonkeyPatch):
    """For all contents of the ranks' caches and all delays of the follower. Between two commands a step may begin the
    job.
    """
    monkeypatch.setattr("redline.run.grammar.matcher.KEPT", 3)
    random_, held, compiled = random.Random(seed), list[tuple[str, Callable[[], bool]]](), 0
    for _ in range(600):
        match random_.randrange(6):
            case 0 | 1:
                text = random_.choice("abcdefgh")
                held.append((text, two.hold(text)))
            case 2 if held:
                held.pop(random_.randrange(len(held)))
            case 3:
                two.ours.run(random_.randrange(3))
            case 4:
                two.obey()
            case _:
                two.theirs.run(random_.randrange(6))
        ready = {text for text, done in held if done()}
        compiled += len(ready)
        kept = two.kept(two.follower)
        assert all(kept.get(text) for text in ready)
        if not two.told:
            # Held grammars, cached ones, and those that rank 0 has evicted and will announce with its next command.
            assert set(two.follower._held) == set(two.leader._numbers.values()) | set(two.leader._forgotten)
    assert compiled > 100
