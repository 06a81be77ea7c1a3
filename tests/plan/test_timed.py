"""What is told of steps and their times."""

from redline.plan.timed import EVERY, KEPT
from tests.fakes import World


def test_steps_are_told_by_what_they_computed_and_how_long_it_took() -> None:
    world = World(seconds=lambda step, _: (step.number + 1) / 1000)
    world.submit(tuple(range(40)), max_tokens=64)
    world.submit(tuple(range(50, 60)), max_tokens=64)
    while world.planner.load().steps <= 3 * EVERY:
        world.turn()
    world.settle()
    timed = world.planner.load().timed
    prompts = [step for step in timed if step.prompt]
    assert sum(step.prompt for step in prompts) == 50
    assert sum(step.pairs for step in prompts) == 40 * 41 / 2 + 10 * 11 / 2
    answers = [step for step in timed if not step.prompt]
    assert [step.number for step in answers] == [EVERY * of for of in range(4 - KEPT, 4)]
    newest = answers[-1]
    assert (newest.rows, newest.tokens) == (2, 2)
    assert newest.context > 50 + 2 * 2 * EVERY
    assert round(newest.ms) == newest.number + 1
    world.finish()
