"""Planning of rows that verify drafts: the most tokens they can yield are planned, and the rejected ones are taken
back.
"""

import pytest

from redline.errors import ConfigError
from redline.messages.job import PAGE_TOKENS
from redline.messages.step import RowResult, Shape, Step, StepResult
from redline.policy.costs import StepCosts
from redline.policy.draft_count import PATIENCE
from redline.scheduler.config import PlanConfig
from redline.scheduler.speculation import EVERY
from tests.fakes import World, hash_page, make_job, page_hashes
from tests.scheduler.test_planner import prompt

DEAR = StepCosts(rows=(1, 64), counts=(1, 8), target_ms=((1, 8), (64, 512)), draft_ms=(1, 64))
"""A position and a drafter pass each cost the same as a token."""


def drafts(step: Step) -> list[int]:
    return [row.drafts for row in step.rows]


def proposals(step: Step) -> list[int]:
    return [row.propose for row in step.rows]


def settle(world: World, step: Step, *outcomes: RowResult):
    return world.planner.settle(step, StepResult(number=step.number, rows=outcomes))


def running(world: World):
    return world.planner._table.running[0]


# Rows


def test_a_row_verifies_what_the_row_before_it_was_asked_to_propose():
    world = World(draft_tokens=3)
    world.submit(prompt(10), max_tokens=50)
    steps = [world.plan(), world.plan()]
    world.settle()
    steps.append(world.plan())
    assert [(row.start, row.count, row.drafts, row.propose) for step in steps for row in step.rows] == [
        (0, 10, 0, 3),
        (None, 4, 3, 3),
        (None, 4, 3, 3),
    ]
    world.finish()


def test_a_row_verifies_nothing_where_the_last_one_that_is_known_left_nothing():
    """Suffix matches come in runs. Whether the row in flight has left any is not known."""
    world = World(draft_tokens=3)
    world.submit(prompt(10), max_tokens=50)
    steps = [world.plan(), world.plan()]
    settle(world, steps[0], RowResult(tokens=(1,)))
    steps.append(world.plan())
    for waiting in (0, 0, 7, None):
        settle(world, steps[-2], RowResult(tokens=(1,), waiting=waiting))
        steps.append(world.plan())
    assert [drafts(step) for step in steps] == [[0], [3], [3], [0], [0], [3], [3]]
    assert all(proposals(step) == [3] for step in steps)


@pytest.mark.parametrize(("ahead", "expected"), [(0, [9, 0]), (1, [0, 8, 0])])
def test_a_row_verifies_what_a_grammar_is_known_to_force(ahead: int, expected: list[int]):
    """Nine tokens are forced after the first. A row in flight takes one of them and its drafts, which
    are all accepted.
    """
    world = World(ahead=ahead)
    world.planner.submit(make_job("a", prompt(5), max_tokens=50))
    steps = [world.planner.next_step() for _ in range(1 + ahead)]
    settle(world, steps[0], RowResult(tokens=(1,), forced=9))
    steps.append(world.planner.next_step())
    if ahead:
        settle(world, steps[1], RowResult(tokens=(1,), forced=8))
        steps.append(world.planner.next_step())
    else:
        settle(world, steps[1], RowResult(tokens=(1,) * 10, proposed=9, accepted=9, by="grammar"))
        steps.append(world.planner.next_step())
    assert [step.rows[0].drafts for step in steps[1:]] == expected
    assert all(row.count == 1 + row.drafts and row.propose == 0 for step in steps[1:] for row in step.rows)
    world.planner.check()


def test_a_forced_run_is_drafted_to_the_limit_and_in_parts_where_it_is_long():
    world = World(ahead=0, shapes=(Shape(1, 4, 1024),))
    world.planner.submit(make_job("a", prompt(5), max_tokens=7))
    settle(world, world.planner.next_step(), RowResult(tokens=(1,), forced=40))
    step = world.planner.next_step()
    assert drafts(step) == [3], "one draft for each further position of the CUDA graph"
    settle(world, step, RowResult(tokens=(1,) * 4, proposed=3, accepted=3, by="grammar", forced=36))
    step = world.planner.next_step()
    assert drafts(step) == [1], "one draft less than the limit"
    (delta,) = settle(world, step, RowResult(tokens=(1,) * 2, proposed=1, accepted=1, by="grammar", forced=34))
    assert (delta.finish, delta.by) == ("length", "grammar")
    load = world.planner.load()
    assert (load.grammar_draft_tokens, load.grammar_accepted_tokens, load.suffix_draft_tokens) == (4, 4, 0)


def test_where_others_draft_anyway_a_forced_run_costs_them_nothing():
    """Four positions per row are expensive if one row has a forced run; but the other row verifies
    three drafts anyway.
    """
    costs = StepCosts(rows=(1, 2), counts=(1, 4), target_ms=((1, 100), (1, 100)), padded=True)
    asked: list[list[int]] = []
    for waiting in (0, 3):
        world = World(ahead=0, draft_tokens=3, costs=costs, shapes=(Shape(2, 4, 1024),))
        world.planner._speculation._chosen, world.planner._speculation._until_next = 3, 9
        for name in ("forced", "neighbour"):
            world.planner.submit(make_job(name, prompt(5), max_tokens=50))
        settle(world, world.planner.next_step(), RowResult(tokens=(1,)), RowResult(tokens=(1,)))
        results = RowResult(tokens=(1,), forced=9, waiting=0), RowResult(tokens=(1,), waiting=waiting)
        settle(world, world.planner.next_step(), *results)
        asked.append(drafts(world.planner.next_step()))
    assert asked == [[0, 0], [3, 3]]


def test_a_resumed_job_has_nothing_forced_before_it_is_told_again():
    world = World(ahead=0, pages=3)
    world.planner.submit(make_job("old", prompt(60), max_tokens=50))
    world.planner.submit(make_job("young", prompt(60), max_tokens=50))
    settle(world, world.planner.next_step(), RowResult(tokens=(1,)), RowResult(tokens=(1,), forced=9))
    young = world.planner._table.running[1]
    assert young.forced == 70
    while young in world.planner._table.running:
        step = world.planner.next_step()
        settle(world, step, *[RowResult(tokens=(1,) * row.count, forced=9) for row in step.rows])
    assert young.forced == 0
    world.planner.check()


def test_nothing_is_proposed_behind_a_token_that_is_not_known():
    world = World(draft_tokens=3, learned=True, step_tokens=64)
    world.submit(prompt(100), max_tokens=50)
    steps = [world.plan(), world.plan()]
    assert [proposals(step) for step in steps] == [[0], [3]]
    assert all(row.drafting for step in steps for row in step.rows)
    world.finish()


def test_drafts_in_flight_count_as_if_they_held_until_they_have_settled():
    world = World(ahead=2, draft_tokens=3)
    world.planner.submit(make_job("a", prompt(5), max_tokens=100))
    first, second, third = (world.planner.next_step() for _ in range(3))
    job = running(world)
    assert (job.planned, job.length, job.slack) == (5 + 4 + 4, 6 + 4 + 4, 6)
    settle(world, first, RowResult(tokens=(1,)))
    (delta,) = settle(world, second, RowResult(tokens=(2, 3), proposed=3, accepted=1))
    assert (delta.tokens, delta.proposed, delta.accepted) == ((2, 3), 3, 1)
    assert (job.computed, job.planned, job.length, job.slack) == (7, 7 + 4, 8 + 4, 3)
    settle(world, third, RowResult(tokens=(4,), proposed=0))
    assert (job.computed, job.planned, job.length, job.slack) == (8, 8, 9, 0)
    world.planner.check()


def test_rows_are_launched_as_long_as_rejections_may_leave_room_below_the_limit():
    world = World(ahead=9, draft_tokens=7)
    world.planner.submit(make_job("a", prompt(5), max_tokens=4))
    steps = []
    while (step := world.planner.next_step()) is not None:
        steps.append(step)
    assert [(drafts(step), proposals(step)) for step in steps] == [([0], [2]), ([2], [1]), ([1], [0]), ([0], [0])]
    world.planner.check()
    settle(world, steps[0], RowResult(tokens=(1,)))
    (delta,) = settle(world, steps[1], RowResult(tokens=(2, 3, 4), proposed=2, accepted=2))
    assert delta.finish == "length"
    for step in steps[2:]:
        assert settle(world, step, RowResult()) == []
    world.planner.check()
    assert world.planner.idle


def test_a_row_that_finds_its_job_at_the_limit_ends_it():
    world = World(draft_tokens=1, ahead=0)
    world.planner.submit(make_job("a", prompt(5), max_tokens=9))
    settle(world, world.planner.next_step(), RowResult(tokens=(1,)))
    (delta,) = settle(world, world.planner.next_step(), RowResult())
    assert (delta.finish, delta.tokens) == ("length", ())


def test_drafts_behind_a_stop_id_are_dropped():
    world = World(draft_tokens=3, ahead=0)
    world.planner.submit(make_job("a", prompt(5), max_tokens=50, stop_ids=(8,)))
    settle(world, world.planner.next_step(), RowResult(tokens=(1,)))
    (delta,) = settle(world, world.planner.next_step(), RowResult(tokens=(7, 8, 9), proposed=3, accepted=2))
    assert (delta.tokens, delta.finish) == ((7, 8), "stop")
    world.planner.check()


def test_a_pre_empted_job_has_no_proposals_when_it_returns():
    world = World(draft_tokens=3, learned=True, ahead=0)
    story = world.submit(prompt(100), max_tokens=100)
    while len(story.tokens) < 30:
        world.turn()
    while world.flights:
        world.settle()
    world.planner._builder.preempt(running(world), running(world))
    steps = [world.plan()]
    world.settle()
    steps.append(world.plan())
    world.settle()
    steps.append(world.plan())
    known = len(story.tokens) + 100
    assert [(row.start, row.drafts) for step in steps[:2] for row in step.rows] == [(64, 0), (100, 0)]
    assert steps[1].rows[0].count == known - 1 - 100
    assert (steps[2].rows[0].start, steps[2].rows[0].drafts) == (None, 3)
    world.finish()


# The budget


def test_every_job_keeps_its_token_and_drafts_take_what_is_left_in_order_of_arrival():
    world = World(step_tokens=8, max_running=4, draft_tokens=3, ahead=0)
    for first in range(4):
        world.submit((first,), max_tokens=50)
    world.turn()
    world.turn()
    step = world.plan()
    assert drafts(step) == [3, 1, 0, 0]
    assert sum(row.count for row in step.rows) == 8
    world.finish()


def test_drafts_leave_half_of_the_rest_to_prompts():
    world = World(step_tokens=16, max_running=4, draft_tokens=7, ahead=0)
    for first in range(2):
        world.submit((first,), max_tokens=50)
    world.turn()
    world.turn()
    world.submit(prompt(100))
    (_, second, chunk) = world.plan().rows
    assert second.drafts == 0
    assert chunk.count == 7
    world.finish()


def test_speculation_never_starves_a_prompt():
    world = World(pages=40, step_tokens=8, max_running=8, draft_tokens=7)
    others = [world.submit((first,), max_tokens=150) for first in range(7)]
    for _ in range(4):
        world.turn()
    long = world.submit(prompt(30), max_tokens=1)
    for _ in range(60):
        world.turn()
    assert long.finish == "length"
    assert not all(story.finish for story in others)
    world.finish()


# Pages


def test_nobody_is_pre_empted_for_a_draft():
    world = World(pages=2, draft_tokens=7, ahead=0, max_model_len=128)
    one, two = (world.submit(prompt(40, first), max_tokens=25) for first in (1, 5))  # 64 positions are computed
    while not (one.finish and two.finish):
        world.turn()
        world.planner.check()
    assert world.planner.load().preemptions == 0
    assert world.runner.drafts > 0


def test_less_is_proposed_where_no_page_is_left_for_more():
    world = World(pages=3, draft_tokens=7, ahead=0)
    world.submit(prompt(60), max_tokens=60)
    world.submit(prompt(60, 2), max_tokens=4)
    step = world.plan()
    assert proposals(step) == [7, 2]
    world.finish()
    world.submit(prompt(60, 3), max_tokens=60)
    world.submit(prompt(60, 4), max_tokens=60)
    assert proposals(world.plan()) == [7, 4], (
        "the last page went to the first job; positions 60 to 63 have a page already"
    )
    world.finish()


def test_pages_for_drafts_are_taken_while_there_are_some():
    world = World(pages=4, draft_tokens=7, ahead=0)
    world.submit(prompt(60), max_tokens=60)
    (row,) = world.plan().rows
    assert (row.propose, len(row.new_pages)) == (7, 2)
    world.finish()


def test_no_page_lies_behind_the_limit():
    world = World(pages=4, draft_tokens=7, ahead=3)
    world.submit(prompt(60), max_tokens=5)
    while not world.planner.idle:
        world.turn()
        assert world.planner.load().pages_used <= 1
    world.check_end()


# The learned drafter


def test_a_cached_page_knows_whether_the_drafter_has_read_it():
    for learned in (True, False):
        world = World(draft_tokens=3, learned=learned)
        story = world.submit(prompt(100), max_tokens=100)
        world.finish()
        pages = world.planner._pages.cache.match(page_hashes(prompt(100) + story.expected))
        assert [world.planner._pages.cache.is_drafted(page) for page in pages] == [learned] * 3


def test_the_drafter_follows_a_job_that_begins_from_pages_that_it_has_read():
    world = World(draft_tokens=3, learned=True)
    world.submit(prompt(200))
    world.finish()
    world.submit((*prompt(200), 1, 2), max_tokens=20)
    (begin,) = world.plan().begins
    assert begin.drafting
    assert len(begin.pages) == 3
    world.finish()
    assert world.runner.drafter_rows_from_cache == 192


def lapsed_world(**config: int) -> World:
    """A world in which the prefix cache holds three pages without the drafter's rows."""
    world = World(draft_tokens=3, learned=True, **config)
    world.planner._speculation._learned = False
    world.submit(prompt(200))
    world.finish()
    world.planner._speculation._learned = True
    return world


def test_a_job_that_begins_from_pages_that_the_drafter_has_not_read_is_lost_to_it():
    world = lapsed_world(step_tokens=128)
    story = world.submit((*prompt(200), 1, 2), max_tokens=80)
    step = world.plan()
    assert not step.begins[0].drafting
    assert not step.rows[0].drafting
    assert step.rows[0].propose == 3, "a suffix match is possible"
    world.finish()
    pages = world.planner._pages.cache.match(page_hashes((*prompt(200), 1, 2, *story.expected)))
    assert [world.planner._pages.cache.is_drafted(page) for page in pages] == [False] * 4


def test_what_one_step_can_compute_is_computed_again_for_the_drafter_and_cached_so():
    world = lapsed_world(step_tokens=256)
    world.submit((*prompt(200), 1, 2))
    (begin,) = world.plan().begins
    assert (begin.drafting, begin.pages) == (True, ())
    world.finish()
    world.submit((*prompt(200), 3, 4))
    (begin,) = world.plan().begins
    assert (begin.drafting, len(begin.pages)) == (True, 3)
    world.finish()


def test_a_job_that_the_drafter_leaves_half_way_keeps_the_pages_that_it_has_read():
    world = World(draft_tokens=3, learned=True, step_tokens=64)
    world.submit(prompt(250), max_tokens=2)
    world.turn()
    world.turn()
    world.planner._speculation._learned = False
    world.finish()
    pages = world.planner._pages.cache.match(page_hashes(prompt(250)))
    assert [world.planner._pages.cache.is_drafted(page) for page in pages] == [True, True, False]
    assert world.runner.lapses == 1


# What pays


def test_a_row_that_verifies_nothing_worth_its_time_is_not_asked_to_draft():
    world = World(draft_tokens=3, costs=DEAR, ahead=0)
    world.submit(prompt(5), max_tokens=20)
    assert proposals(world.plan()) == [0]
    world.finish()
    assert world.planner.load().draft_tokens == 0


def test_a_drafter_that_does_not_pay_is_left_after_many_steps_that_say_so_and_no_sooner():
    world = World(draft_tokens=3, learned=True, costs=DEAR, ahead=0, max_model_len=400)
    world.submit(prompt(5), max_tokens=300)
    drafting = []
    steps = (PATIENCE - 1) * EVERY
    for _ in range(steps + 6):
        drafting.append(world.plan().rows[0].drafting)
        world.settle()
    assert drafting == [True] * steps + [False] * 6
    world.finish()
    world.submit(prompt(5), max_tokens=3)
    assert not world.plan().begins[0].drafting
    world.finish()


def test_what_steps_take_changes_what_is_drafted():
    """The measured grid has drafts free of cost; on the machine, each costs more than a step."""
    costs = StepCosts(rows=(1,), counts=(1, 2, 4), target_ms=((10, 10, 10),))

    def seconds(step: Step, result: StepResult) -> float:
        return 0.01 * sum(1 + 1.5 * row.proposed for row in result.rows)

    world = World(draft_tokens=3, costs=costs, seconds=seconds, max_model_len=2000, pages=40)
    world.submit(prompt(5), max_tokens=1500)
    asked = []
    while not world.planner.idle:
        step = world.plan()
        asked += proposals(step) if step else []
        if step is None or len(world.flights) > 1:
            world.settle()
    early, late = asked[:20], asked[-200:]
    assert sum(early) / len(early) > 2
    assert sum(late) / len(late) < 1, asked
    world.check_end()


def test_steps_with_prompts_teach_nothing_about_costs():
    costs = StepCosts(rows=(1,), counts=(1,), target_ms=((10,),))
    world = World(draft_tokens=1, costs=costs, seconds=lambda *_: 1.0, ahead=0)
    world.submit(prompt(100), max_tokens=1)
    world.finish()
    assert world.planner._speculation.times.ms(1, 0, 0) == 10


# The books


def test_the_load_counts_drafts_by_position():
    world = World(draft_tokens=2, ahead=0)
    world.planner.submit(make_job("a", prompt(5), max_tokens=100))
    settle(world, world.planner.next_step(), RowResult(tokens=(1,)))
    for tokens, proposed in (((1, 2, 3), 2), ((1,), 2), ((1, 2), 2), ((1,), 0)):
        row = RowResult(tokens=tokens, proposed=proposed, accepted=len(tokens) - 1, by="suffix" if proposed else None)
        settle(world, world.planner.next_step(), row)
    load = world.planner.load()
    assert (load.drafts, load.draft_tokens, load.accepted_tokens, load.accepted_per_pos) == (3, 6, 3, (2, 1))
    assert (load.suffix_draft_tokens, load.suffix_accepted_tokens) == (6, 3)


def test_without_speculation_no_row_says_a_word_of_it():
    world = World()
    world.submit(prompt(5), max_tokens=20)
    while not world.planner.idle:
        for row in (world.plan() or Step(number=0)).rows:
            assert (row.drafts, row.propose, row.drafting) == (0, 0, False)
        world.settle()
    assert world.planner.load().accepted_per_pos == ()


def test_check_finds_drafts_that_were_not_taken_back():
    world = World(draft_tokens=3)
    world.submit(prompt(5), max_tokens=50)
    world.plan()
    world.plan()
    running(world).slack -= 1
    with pytest.raises(AssertionError, match="2 drafts counted, 3 are in flight"):
        world.planner.check()


def test_check_finds_positions_that_nobody_computes():
    world = World(draft_tokens=3)
    world.submit(prompt(5), max_tokens=50)
    world.plan()
    running(world).planned += 1
    with pytest.raises(AssertionError, match="6 positions planned"):
        world.planner.check()


def test_a_row_drafts_no_more_than_a_page():
    assert PlanConfig(draft_tokens=PAGE_TOKENS).draft_tokens == PAGE_TOKENS
    for wrong in (PAGE_TOKENS + 1, -1):
        with pytest.raises(ConfigError, match=f"draft_tokens is {wrong}"):
            PlanConfig(draft_tokens=wrong)


def test_a_drafts_page_has_the_name_of_its_tokens_alone():
    """Pages filled by verification have the same hashes as pages filled by plain decoding."""
    worlds = [World(draft_tokens=k, learned=k > 0) for k in (0, 3)]
    for world in worlds:
        world.submit(prompt(30), max_tokens=120)
        world.finish()
    hashes = [set(world.planner._pages.cache._nodes) for world in worlds]
    assert hashes[0] == hashes[1]
    assert hash_page(None, (prompt(30) + worlds[0].stories["job-0"].expected)[:64]) in hashes[0]
