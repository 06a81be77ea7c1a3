"""Laws 2, 3 and 7 where they are decided: whatever the company, the chunks, the cache and the pre-emptions, each answer
is the one that the job would get alone; nobody starves; every page comes back.

`World` checks each token as it comes, `FakeRunner` each position that a row would read, `check` the books.
"""

import random

import pytest

from tests.fakes import VOCABULARY, World, chain


def random_tokens(random_: random.Random, count: int) -> tuple[int, ...]:
    return tuple(random_.randrange(VOCABULARY) for _ in range(count))


def live(seed: int) -> World:
    """A world of its own geometry: arrivals that share prefixes, follow-up turns, aborts, faults, late settling."""
    random_ = random.Random(seed)
    world = World(
        pages=random_.choice([7, 8, 9, 12, 24]),  # a job needs 7 at most
        ahead=seed % 4,
        step_tokens=random_.choice([8, 64, 100, 512]),
        max_running=random_.randrange(1, 8),
        max_waiting=random_.choice([3, 100]),
        fails=(lambda seed_, position: chain(seed_, position, seed) % 997 == 0) if seed % 5 == 0 else lambda *_: False,
    )
    roots = [random_tokens(random_, random_.randrange(1, 200)) for _ in range(3)]
    hurry = random_.choice([0.5, 0.7])  # how often a step is planned rather than settled
    for _ in range(random_.randrange(20, 200)):
        stories = list(world.stories.values())
        chance = random_.random()
        if chance < 0.12:
            tokens = random_.choice(roots)
            if stories and random_.random() < 0.5:
                story = random_.choice(stories[-4:])
                tokens = story.job.tokens + story.expected[: random_.choice([len(story.tokens), 100])]
            if random_.random() < 0.3:
                tokens = tokens[: random_.randrange(1, len(tokens) + 1)]
            world.submit(
                tokens + random_tokens(random_, random_.choice([0, 1, 3, 70])),
                max_tokens=random_.choice([0, 1, 2, 30, 150, 300]),
                salt=random_.choice(["", "", "a"]),
                stop_ids=random_tokens(random_, random_.choice([0, 0, 0, 2])),
                logprobs=random_.choice([None, None, 0]),
                prompt_logprobs=random_.choice([None] * 7 + [0]),
            )
        elif chance < 0.15 and stories:
            world.abort(random_.choice(stories))
        elif random_.random() < hurry:
            world.plan()
        elif world.flights:
            world.settle()
        world.planner.check()
    world.finish()
    return world


@pytest.mark.parametrize("first_seed", range(0, 300, 50))
def test_every_answer_is_what_the_job_would_get_alone(first_seed: int):
    worlds = [live(seed) for seed in range(first_seed, first_seed + 50)]
    finishes = [story.finish for world in worlds for story in world.stories.values()]
    assert {"stop", "length", "aborted", "error"} == set(finishes)
    assert len(finishes) > 500
    assert sum(world.planner.load().preemptions for world in worlds) > 5, "too few pre-emptions to learn from"
    assert sum(world.planner.load().prompt_tokens_cached for world in worlds) > 5000
    assert sum(world.runner.resumed_bits_compared for world in worlds) > 1000
