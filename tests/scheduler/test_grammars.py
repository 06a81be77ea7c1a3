"""Jobs waiting for their grammar's compilation: they are left out of steps, and no other job waits."""

import random
import weakref
from collections.abc import Callable

import pytest

from redline.messages.handoff import PrefillDone
from redline.messages.job import Grammar, JobId
from tests.fakes import World, make_job


class Compiler:
    """Compiles a grammar when a test asks for it, and keeps it for the jobs that hold it."""

    def __init__(self, *done: str) -> None:
        self.done = set(done)
        self.asked: list[str] = []

    def __call__(self, grammar: Grammar) -> Callable[[], bool]:
        self.asked.append(grammar.text)
        kept = False

        def compiled() -> bool:
            nonlocal kept
            kept = kept or grammar.text in self.done
            return kept

        return compiled


def world_of(compiler: Compiler, **config: float) -> World:
    world = World(step_tokens=64, **{"max_running": 4, **config})
    world.planner.compile_with(compiler)
    return world


def prompt(first: int) -> tuple[int, ...]:
    return tuple(range(first, first + 30))


def test_a_job_whose_grammar_is_not_compiled_sits_out_and_nobody_waits_for_it():
    compiler = Compiler()
    world = world_of(compiler, max_running=1)
    waits = world.submit(prompt(1), grammar=Grammar(text="slow"))
    others = [world.submit(prompt(n)) for n in (50, 90)]
    assert compiler.asked[0] == "slow", "compilation must start when the job arrives"
    for _ in range(100):
        world.turn()
        world.planner.check()
    assert [story.finish for story in others] == ["length"] * 2
    assert (waits.tokens, world.planner.idle, world.planner.compiling) == ([], False, True)
    assert world.planner.load().waiting == 1
    compiler.done.add("slow")
    world.finish()
    assert waits.finish == "length"
    assert not world.planner.compiling


def test_a_grammar_without_text_is_compiled():
    compiler = Compiler()
    world = world_of(compiler)
    world.submit(prompt(1), grammar=Grammar(text=""))
    world.finish()
    assert compiler.asked == []


def test_what_waits_for_its_grammar_counts_among_those_that_wait():
    world = world_of(Compiler(), max_running=1, max_waiting=1)
    stories = [world.submit(prompt(n), grammar=Grammar(text="slow")) for n in range(3)]
    assert [story.finish for story in stories] == [None, None, "error"]


def test_a_job_that_waits_for_its_grammar_can_be_aborted():
    world = world_of(Compiler())
    story = world.submit(prompt(1), grammar=Grammar(text="slow"))
    assert world.plan() is None
    world.abort(story)
    assert story.finish == "aborted"
    world.check_end()


def test_jobs_begin_in_the_order_in_which_they_came_once_they_can():
    compiler = Compiler("fast")
    world = world_of(compiler, max_running=1)
    world.submit(prompt(1))
    world.plan()
    slow = world.submit(prompt(50), grammar=Grammar(text="slow"))
    fast = world.submit(prompt(90), grammar=Grammar(text="fast"))
    plain = world.submit(prompt(130))
    world.plan()
    compiler.done.add("slow")
    begun: list[object] = []
    while not world.planner.idle:
        world.turn()
        begun += [story for story in (slow, fast, plain) if story.tokens and story not in begun]
    assert begun == [slow, fast, plain]
    world.finish()


def test_a_job_asks_for_its_grammar_once_and_holds_it_until_it_ends():
    class Held:
        def __call__(self) -> bool:
            return True

    held: list[weakref.ref[Held]] = []

    def hold(_: Grammar) -> Held:
        one = Held()
        held.append(weakref.ref(one))
        return one

    world = World(step_tokens=64, max_running=1, pages=8)
    world.planner.compile_with(hold)
    stories = [world.submit(prompt(n), grammar=Grammar(text=str(n))) for n in range(3)]
    while not world.planner.idle:
        ended = [story.finish is not None for story in stories]
        assert [one() is None for one in held] == ended
        world.turn()
    world.finish()
    assert [one() for one in held] == [None] * 3


def test_a_prompt_that_came_from_another_worker_waits_for_its_grammar_and_not_for_others():
    compiler = Compiler("fast")
    world = world_of(compiler, pages=12)
    planner = world.planner
    for name in ("slow", "fast"):
        planner.transfers.expect(make_job(name, prompt(1), max_tokens=4, grammar=Grammar(text=name)))
        assert planner.transfers.open(JobId(name)) is not None
        planner.transfers.land(PrefillDone(job=JobId(name), tokens=(5,)))
    assert compiler.asked[:2] == ["slow", "fast"], "compilation must start when the jobs are announced"
    step = planner.next_step()
    assert step is not None
    assert [begin.sampling.grammar for begin in step.begins] == [Grammar(text="fast")]
    planner.check()
    assert planner.compiling
    compiler.done.add("slow")
    step = planner.next_step()
    assert step is not None
    assert [begin.sampling.grammar for begin in step.begins] == [Grammar(text="slow")]
    assert not planner.compiling


@pytest.mark.parametrize("seed", range(30))
def test_random_worlds_in_which_grammars_come_and_are_forgotten(seed: int):
    random_ = random.Random(seed)
    compiler = Compiler()
    world = World(
        pages=random_.choice([7, 8, 12, 24]),
        step_tokens=random_.choice([8, 64]),
        max_running=random_.randrange(1, 8),
        ahead=seed % 3,
    )
    world.planner.compile_with(compiler)
    texts = ["a", "b", "c"]
    for _ in range(150):
        chance = random_.random()
        if chance < 0.15:
            text = random_.choice([None, *texts])
            tokens = tuple(random_.randrange(100) for _ in range(random_.randrange(1, 150)))
            grammar = None if text is None else Grammar(text=text)
            world.submit(tokens, max_tokens=random_.choice([1, 20, 150]), grammar=grammar, tenant=random_.choice("xy"))
        elif chance < 0.2 and world.stories:
            world.abort(random_.choice(list(world.stories.values())))
        elif chance < 0.3:
            compiler.done ^= {random_.choice(texts)}
        elif chance < 0.7:
            world.plan()
        elif world.flights:
            world.settle()
        world.planner.check()
    compiler.done.update(texts)
    world.finish()
