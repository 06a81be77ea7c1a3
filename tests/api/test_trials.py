"""The order of grammar trials: keys take turns, large grammars never fill both children, slow keys wait."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from redline.api.config import Limits
from redline.api.grammars.grammar_child import GrammarTrial, GrammarVerdict
from redline.api.grammars.trials import LATE_S, SMALL_BYTES, Trials
from redline.errors import Overloaded
from tests.clocks import FakeClock
from tests.waiting import turns

pytestmark = pytest.mark.anyio
LARGE = SMALL_BYTES + 1


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    with FakeClock().installed() as fake:
        yield fake


class Child:
    """A child process that answers when the test sets the answer."""

    def __init__(self) -> None:
        self.texts: list[str] = []  # the texts of the trials, in order
        self.kills = 0
        self._answer: asyncio.Future[GrammarVerdict] | None = None

    async def ask(self, trial: GrammarTrial) -> GrammarVerdict:
        assert self._answer is None, "one at a time"
        self.texts.append(trial.text)
        self._answer = asyncio.get_running_loop().create_future()
        try:
            return await self._answer
        finally:
            self._answer = None

    async def answer(self, outcome: GrammarVerdict | Exception = GrammarVerdict()) -> None:  # noqa: B008
        assert self._answer is not None, "a trial is waiting"
        if isinstance(outcome, Exception):
            self._answer.set_exception(outcome)
        else:
            self._answer.set_result(outcome)
        await turns(5)

    def kill(self) -> None:
        self.kills += 1

    async def ended(self) -> None:
        pass


class World:
    def __init__(self, **limits: Any) -> None:
        self.any, self.small = Child(), Child()
        self.kept: list[bytes] = []
        self.trials = Trials(Limits(**limits), [self.any, self.small], lambda key, _: self.kept.append(key))

    async def ask(self, text: str, tenant: str = "", size: int = LARGE) -> asyncio.Task[GrammarVerdict]:
        asked = self.trials.verdict(GrammarTrial(text=text), tenant, text.encode(), size)
        task = asyncio.create_task(asked)
        await turns(3)
        return task


async def test_keys_take_turns():
    world = World()
    for n in range(4):
        await world.ask(f"a{n}", "a")
    for tenant in "bc":
        await world.ask(tenant, tenant)
    for _ in range(6):
        await world.any.answer()
    assert world.any.texts == ["a0", "b", "c", "a1", "a2", "a3"]


async def test_a_small_grammar_does_not_wait_for_large_ones_of_the_same_key():
    world = World()
    for n in range(3):
        await world.ask(f"large {n}")
    small = await world.ask("small", size=10)
    assert (world.any.texts, world.small.texts) == (["large 0"], ["small"])
    await world.small.answer(GrammarVerdict(text="x"))
    assert (await small).text == "x"
    assert world.small.texts == ["small"], "large grammars are not tried by the child for small ones"


async def test_small_ones_take_whichever_child_is_free():
    world = World()
    for n in range(3):
        await world.ask(f"{n}", size=10)
    assert (world.any.texts, world.small.texts) == (["0"], ["1"])
    await world.any.answer()
    assert world.any.texts == ["0", "2"]


async def test_a_key_whose_trial_took_too_long_waits_behind_others_for_a_while(clock: FakeClock):
    world = World()
    slow = await world.ask("slow", "a")
    await world.any.answer(TimeoutError())
    assert (await slow).error == "compiling it takes more than 1 s"
    for n, tenant in enumerate("babb"):
        await world.ask(f"{tenant}{n}", tenant)
    for _ in range(4):
        await world.any.answer()
    assert world.any.texts == ["slow", "b0", "b2", "b3", "a1"]
    clock.advance(LATE_S)
    for n, tenant in enumerate("bab"):
        await world.ask(f"later {tenant}{n}", tenant)
    for _ in range(3):
        await world.any.answer()
    assert world.any.texts[5:] == ["later b0", "later a1", "later b2"]


async def test_too_many_of_one_key_are_refused_and_no_others():
    world = World(grammars=2)
    asked = [await world.ask(f"a{n}", "a") for n in range(4)]
    other = await world.ask("b", "b")
    with pytest.raises(Overloaded, match="2 grammars are queued"):
        await asked[3]
    assert not other.done()
    assert world.trials.waiting == 3


async def test_the_same_grammar_is_tried_once_for_all_that_ask_meanwhile():
    world = World()
    first, second = await world.ask("x"), await world.ask("x")
    await world.any.answer(GrammarVerdict(text="done"))
    assert (await first, await second) == (GrammarVerdict(text="done"), GrammarVerdict(text="done"))
    assert (world.any.texts, world.kept) == (["x"], [b"x"])


async def test_a_client_that_leaves_takes_back_what_has_not_begun_and_leaves_the_rest_to_its_end():
    world = World()
    running, waiting, shared, other = [await world.ask(text) for text in ("running", "waiting", "shared", "shared")]
    for task in (running, waiting, shared):
        task.cancel()
    await turns(3)
    assert world.trials.waiting == 1
    await world.any.answer()
    assert world.kept == [b"running"]
    await world.any.answer()
    assert await other == GrammarVerdict()
    assert (world.any.texts, world.any.kills) == (["running", "shared"], 0)


@pytest.mark.parametrize("error", [Overloaded("later"), ValueError("a surprise")], ids=["overloaded", "a surprise"])
async def test_what_a_child_raises_is_its_callers_and_the_next_trial_is_made(error: Exception):
    world = World()
    first, second = await world.ask("first"), await world.ask("second")
    await world.any.answer(error)
    with pytest.raises(type(error)):
        await first
    await world.any.answer()
    assert await second == GrammarVerdict()


async def test_at_the_end_nobody_is_left_waiting():
    world = World()
    asked = [await world.ask(text) for text in ("first", "second")]
    world.trials.close()
    world.trials.close()
    await world.trials.ended()
    came = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in came] == [Overloaded] * 2
