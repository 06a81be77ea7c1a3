"""Laws 2, 3 and 7 at the planner: for all batches, chunks, cache contents and pre-emptions, each answer equals the
job's answer when it runs alone; no job starves; every page is returned.

`World` checks each token as it arrives, `FakeRunner` each position that a row would read, `check` the accounting.
"""

import random

import pytest

from redline.messages.step import Shape
from redline.policy.costs import StepCosts
from redline.policy.draft_count import Worth
from redline.policy.pairs import Work
from tests.fakes import A_GRAMMAR, VOCABULARY, World, chain

SHAPES = tuple(Shape(*size) for size in ((8, 1, 512), (2, 1, 128), (4, 3, 512), (8, 2, 256), (1, 8, 512)))
COSTS = StepCosts(rows=(1, 8), counts=(1, 4, 8), target_ms=((5, 6, 9), (9, 20, 38)), draft_ms=(0.5, 1.5))


class AnyForecast:
    """A forecast of random times, which must not change any answer."""

    def __init__(self, seed: int) -> None:
        self.known = False
        self._seed = seed

    def took(self, work: Work, ms: float) -> None:
        self.known = True

    def ms(self, work: Work) -> float:
        return 1.0 + chain(*work, self._seed) % 40


def random_tokens(random_: random.Random, count: int) -> tuple[int, ...]:
    return tuple(random_.randrange(VOCABULARY) for _ in range(count))


def live(seed: int, draft_tokens: int = 0, learned: bool = False, together: bool = False) -> World:
    """Run a world with random sizes: arrivals that share prefixes, follow-up turns, aborts, faults, late settling; with
    drafts also steps of any cost, and a learned drafter that is switched off and on again.
    """
    random_ = random.Random(seed)
    measured = draft_tokens and seed % 3
    world = World(
        pages=random_.choice([7, 8, 9, 12, 24]),  # a job needs at most 7 pages
        ahead=seed % 4,
        step_tokens=random_.choice([8, 64, 100, 512]),
        max_running=(slots := random_.randrange(1, 8)),
        admit_together=1 + seed % slots if together else 1,
        max_waiting=random_.choice([3, 100]),
        draft_tokens=draft_tokens,
        learned=learned,
        costs=COSTS if measured else None,
        seconds=(lambda step, _: 1e-3 * (1 + chain(step.number, seed) % 40)) if measured or seed % 3 == 1 else None,
        fails=(lambda seed_, position: chain(seed_, position, seed) % 997 == 0) if seed % 5 == 0 else lambda *_: False,
        shapes=SHAPES[: seed % (1 + len(SHAPES))],
        step_ms=20,
        forecast=AnyForecast(seed) if seed % 3 == 1 else None,
    )
    roots = [random_tokens(random_, random_.randrange(1, 200)) for _ in range(3)]
    hurry = random_.choice([0.5, 0.7])  # probability of planning a step rather than settling one
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
                tenant=random_.choice(["", "", "a", "b"]) if seed % 2 else "",
                stop_ids=random_tokens(random_, random_.choice([0, 0, 0, 2])),
                logprobs=random_.choice([None, None, 0]),
                prompt_logprobs=random_.choice([None] * 7 + [0]),
                given=random_.choice([0, 0, 0, 1, 20, 130]),
                grammar=A_GRAMMAR if seed % 6 < 2 and random_.random() < 0.5 else None,
            )
        elif chance < 0.15 and stories:
            world.abort(random_.choice(stories))
        elif chance < 0.18 and learned:
            world.planner._speculation._worth = Worth(pays=random_.random() < 0.6)
        elif random_.random() < hurry:
            world.plan()
        elif world.flights:
            world.settle()
        world.planner.check()
    world.finish()
    return world


@pytest.mark.parametrize(
    ("draft_tokens", "learned", "together", "seeds"),
    [
        (0, False, False, range(60)),
        (0, False, True, range(60, 120)),
        (3, False, False, range(40)),
        (1, True, False, range(40)),
        (7, True, True, range(50, 110)),
    ],
)
def test_every_answer_is_what_the_job_would_get_alone(draft_tokens: int, learned: bool, together: bool, seeds: range):
    worlds = [live(seed, draft_tokens, learned, together) for seed in seeds]
    finishes = [story.finish for world in worlds for story in world.stories.values()]
    assert {"stop", "length", "aborted", "error"} == set(finishes)
    assert len(finishes) > 400
    loads = [world.planner.load() for world in worlds]
    assert sum(load.preemptions for load in loads) > 5, "too few pre-emptions for a meaningful test"
    assert sum(load.prompt_tokens_cached for load in loads) > 5000
    assert sum(world.runner.resumed_bits_compared for world in worlds) > 1000
    assert sum(world.runner.replays for world in worlds) > 1000
    assert sum(load.bounded for load in loads) > 2
    assert sum(load.grammar_draft_tokens for load in loads) > 200
    assert all(load.grammar_draft_tokens == load.grammar_accepted_tokens for load in loads)
    if not draft_tokens:
        return
    assert sum(load.accepted_tokens for load in loads) > 500
    assert sum(load.draft_tokens - load.accepted_tokens for load in loads) > 500
    if learned:
        assert sum(world.runner.drafter_rows_from_cache for world in worlds) > 5000
        assert sum(world.runner.lapses for world in worlds) > 10
