"""Notes about jobs: pre-emptions, and the times of steps with their drafts."""

import itertools

import msgspec

from redline.messages.codec import decode, encode
from redline.messages.delta import Brought, Delta, Drafted, Note, Preempted, Resumed
from redline.messages.handoff import PrefillDone
from redline.messages.job import JobId, PagesFrom
from redline.messages.step import RowResult, StepResult
from redline.policy.costs import StepCosts
from redline.scheduler.config import PlanConfig
from redline.scheduler.planner import Planner
from tests.fakes import Story, World, hash_page, make_job

CHEAP = StepCosts(rows=(1, 64), counts=(1, 8), target_ms=((10, 10.7), (10, 10.7)), draft_ms=(0.1, 0.1))
READ = Brought(host_tokens=128, disk_tokens=64, read_s=0.2, predicted_s=0.1, compute_s=0.4)


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def notes(story: Story) -> list[Note]:
    return [note for delta in story.deltas for note in delta.noted]


def step_of(planner: Planner) -> list[Delta]:
    """Run a step in which all rows give token 5; -> its deltas."""
    step = planner.next_step()
    assert step is not None
    rows = tuple(RowResult(tokens=(5,) if row.samples else ()) for row in step.rows)
    return planner.settle(step, StepResult(number=step.number, rows=rows))


def test_a_job_that_loses_its_pages_is_told_of_at_once_and_again_with_its_next_token() -> None:
    seconds = itertools.count()
    planner = Planner(4, PlanConfig(step_tokens=128, ahead=0), 300, hash_page, clock=lambda: float(next(seconds)))
    planner.submit(make_job("first", prompt(60), max_tokens=150))
    step_of(planner)
    planner.submit(make_job("last", prompt(60, 2), max_tokens=150))
    told = [delta for _ in range(230) for delta in step_of(planner)]
    of_last = [delta for delta in told if delta.job == "last"]
    assert not any(delta.noted for delta in told if delta.job == "first")
    at = next(place for place, delta in enumerate(of_last) if delta.noted)
    before = sum(len(delta.tokens) for delta in of_last[:at])
    lost, on = of_last[at], of_last[at + 1]
    assert lost.notes_only
    (note,) = lost.noted
    assert isinstance(note, Preempted)
    assert (note.by, note.running, note.pages) == ("first", 1, 4)
    assert note.lost_tokens == 60 + before - 1, "all tokens but the last, which no step has computed"
    assert 0 <= note.again_tokens <= note.lost_tokens
    assert note.short_pages > 0, "otherwise the job would not have been pre-empted"
    (resumed,) = on.noted
    assert on.tokens
    assert isinstance(resumed, Resumed)
    assert resumed.waited_s is not None
    assert resumed.paused_s is not None
    assert 0 < resumed.waited_s < resumed.paused_s
    assert 0 < resumed.again_tokens <= note.lost_tokens
    assert sum(bool(delta.noted) for delta in of_last) == 2


def test_who_ends_before_it_is_told_that_it_has_lost_its_pages_is_told_nothing_more() -> None:
    world = World(ahead=0)
    world.submit(prompt(130), max_tokens=70)
    world.submit(prompt(20, 3), max_tokens=70)
    world.plan()
    world.settle()
    first, last = world.planner._table.running
    world.planner._builder.preempt(last, first)
    ended = world.planner.abort(last.job.id)
    assert [delta.finish for delta in ended] == ["aborted"]
    told = [delta for _ in range(3) for delta in step_of(world.planner)]
    assert {delta.job for delta in told} == {first.job.id}


def test_steps_with_drafts_are_told_beside_what_they_were_expected_to_take() -> None:
    world = World(draft_tokens=4, costs=CHEAP, seconds=lambda step, result: 0.05)
    without = World(costs=CHEAP, seconds=lambda step, result: 0.05)
    drafted, plain = (each.submit(prompt(40), max_tokens=200) for each in (world, without))
    world.finish()
    without.finish()
    told = [note for note in notes(drafted) if isinstance(note, Drafted)]
    assert [note.steps for note in told[:-1]] == [2**n for n in range(2, 2 + len(told) - 1)], (
        "notes must come at powers of two, and at the end"
    )
    last = told[-1]
    assert isinstance(last, Drafted)
    assert 4 <= last.steps < sum(delta.proposed > 0 for delta in drafted.deltas), "only some steps are timed"
    assert abs(last.seconds - 0.05 * last.steps) < 1e-6
    assert 0 < last.without_s < last.predicted_s
    assert not notes(plain)


def test_what_was_read_from_below_is_told_with_the_first_token() -> None:
    planner = Planner(8, PlanConfig(step_tokens=128), 300, hash_page)
    job = make_job("read", prompt(60), max_tokens=4)
    planner.transfers.expect(msgspec.structs.replace(job, pages_from=PagesFrom(worker="p", epoch=1, inbox="p")))
    planner.transfers.compute_here(job.id, READ)
    told = [delta for _ in range(3) for delta in step_of(planner)]
    assert [delta.noted for delta in told if delta.tokens][:2] == [(READ,), ()]


def test_notes_travel_and_what_has_none_pays_no_byte_for_them() -> None:
    lost = Preempted(by=JobId("b"), running=1, pages=2, lost_tokens=3, again_tokens=4, short_pages=5)
    on = Resumed(again_tokens=4, waited_s=0.5, paused_s=None)
    steps = Drafted(steps=4, seconds=1.0, predicted_s=0.5, without_s=0.25)
    delta = Delta(job=JobId("a"), tokens=(1,), noted=(lost, on, READ, steps))
    assert decode(encode([delta])) == [delta]
    assert b"noted" not in encode([Delta(job=JobId("a"), tokens=(1,))])


def test_what_was_noted_where_a_prompt_was_computed_comes_with_its_first_token() -> None:
    planner = Planner(8, PlanConfig(step_tokens=128), 300, hash_page)
    job = make_job("lands", prompt(60), max_tokens=4)
    planner.transfers.expect(msgspec.structs.replace(job, pages_from=PagesFrom(worker="p", epoch=1, inbox="p")))
    planner.transfers.open(job.id)
    (delta,) = planner.transfers.land(PrefillDone(job=JobId("lands"), tokens=(5,), noted=(READ,)))
    assert delta.noted == (READ,)
