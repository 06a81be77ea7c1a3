"""A step names the cheapest CUDA graph shape that holds it, and only one that every rank has reported."""

import itertools
import random

import pytest

from redline.messages.job import PAGE_TOKENS
from redline.messages.step import CapturedShapes, Shape, Step
from redline.scheduler.recorded import RecordedShapes
from tests.fakes import World

KEPT = Shape(1, 1, 4096), Shape(1, 1, 512), Shape(8, 1, 4096), Shape(8, 1, 512), Shape(2, 4, 4096), Shape(8, 4, 4096)


@pytest.mark.parametrize(
    ("rows", "positions", "longest", "named"),
    [
        (1, 1, 64, (1, 1, 512)),
        (1, 1, 512, (1, 1, 512)),
        (1, 1, 576, (1, 1, 4096)),
        (2, 1, 64, (8, 1, 512)),
        (1, 2, 64, (2, 4, 4096)),
        (3, 4, 64, (8, 4, 4096)),
        (1, 9, 64, (2, 4, 4096)),  # one draft for each position of the largest shape
        (9, 1, 64, None),
        (1, 1, 4160, None),
    ],
)
def test_the_cheapest_that_holds_a_step(rows: int, positions: int, longest: int, named: tuple[int, int, int] | None):
    for kept in itertools.permutations(KEPT, len(KEPT)):
        shapes = RecordedShapes(CapturedShapes(shapes=kept))
        chosen = shapes.choose(rows, positions, longest)
        assert chosen == (None if named is None else Shape(*named))


def test_only_what_every_rank_has_reported_is_named():
    shapes, pick = RecordedShapes(ranks=3), random.Random(0)
    told: dict[int, set[Shape]] = {rank: set() for rank in range(3)}
    for _ in range(60):
        rank = pick.randrange(3)
        told[rank] ^= {pick.choice(KEPT)}
        shapes.report(CapturedShapes(rank=rank, shapes=tuple(told[rank])))
        everywhere = set.intersection(*told.values())
        named = {shapes.choose(rows, positions, 512) for rows in (1, 2, 8) for positions in (1, 4)}
        assert named - {None} <= everywhere
        assert (named != {None}) == bool(everywhere)


def test_drafts_are_as_many_as_the_shapes_for_so_many_rows_hold():
    shapes = RecordedShapes(CapturedShapes(shapes=(Shape(8, 8, 512), Shape(64, 1, 512), Shape(64, 4, 512))))
    assert [shapes.drafts(rows) for rows in (1, 8, 9, 64)] == [7, 7, 3, 3]
    assert shapes.drafts(65) == PAGE_TOKENS, "an eager step takes any number of drafts"
    assert RecordedShapes().drafts(1) == PAGE_TOKENS


def test_many_rows_draft_no_more_than_a_shape_holds():
    world = World(max_running=3, draft_tokens=7, shapes=(Shape(1, 8, 512), Shape(4, 3, 512)))
    drafts: dict[int, set[int]] = {1: set(), 3: set()}
    for seed in range(3):
        world.submit((seed, 2, 3), max_tokens=60 if seed else 150)
    while not world.planner.idle:
        step = world.plan()
        if step is not None and step.shape is not None:
            drafts.setdefault(len(step.rows), set()).update(row.drafts for row in step.rows)
        if world.flights:
            world.settle()
    world.check_end()
    assert max(drafts[3]) == 2
    assert max(drafts[1]) == 7


def test_what_is_recorded_late_is_named_from_then_on():
    world = World(shapes=(Shape(1, 1, 4096),))
    world.submit((1, 2, 3), max_tokens=200)
    named: list[Shape | None] = []
    for turn in range(150):
        if turn == 50:
            world.runner.recorded = CapturedShapes(shapes=(Shape(1, 1, 4096), Shape(1, 1, 128)))
            world.planner.report(world.runner.recorded)
        step = world.plan()
        assert step is not None
        named.append(step.shape)
        world.settle()
    # The prompt's step has no decode row; a context of two pages ends at 128 tokens, three of which are the prompt.
    pages = [None, *[Shape(1, 1, 4096)] * 49, *[Shape(1, 1, 128)] * 76]
    assert named == [*pages, *[Shape(1, 1, 4096)] * (150 - len(pages))]


def test_decode_rows_beside_a_prompt_have_a_shape():
    world = World(step_tokens=64, shapes=(Shape(1, 1, 4096),))
    world.submit((1, 2, 3), max_tokens=50)
    mixed: list[Step] = []
    for turn in range(20):
        if turn == 5:
            world.submit(tuple(range(90)), max_tokens=1)
        step = world.plan()
        assert step is not None
        if {row.start is None for row in step.rows} == {True, False}:
            mixed.append(step)
        world.settle()
    assert [step.shape for step in mixed] == [Shape(1, 1, 4096)] * 2
    assert all(step.rows[0].start is None for step in mixed)
