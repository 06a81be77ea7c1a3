"""The planner's rules, one per test, each in the smallest world that shows it."""

import math
import random
import subprocess
import sys

import msgspec
import pytest

from redline.errors import ConfigError
from redline.messages.channel import MAX_MESSAGE_BYTES
from redline.messages.codec import encode
from redline.messages.delta import Delta
from redline.messages.job import PAGE_TOKENS, JobId, MediaSpan
from redline.messages.news import STEP_SIZES
from redline.messages.step import RowResult, StepResult, TokenLogprobs
from redline.scheduler.config import MOST_STEP_TOKENS, PlanConfig
from redline.scheduler.features import FeatureCache
from redline.scheduler.planner import Planner
from tests.fakes import Story, World, hash_page, make_job, page_hashes


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + at * at) % 89 for at in range(length))


def spans(step) -> list[tuple[int, int | None, int]]:
    return [(row.slot, row.start, row.count) for row in step.rows]


def test_planning_needs_no_torch():
    program = "import sys, redline.scheduler.planner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_step_must_have_a_token_for_each_running_job():
    assert PlanConfig(step_tokens=4, max_running=4).max_running == 4
    for wrong in (5, 0):
        with pytest.raises(ConfigError, match="a token for each running job"):
            PlanConfig(step_tokens=4, max_running=wrong)


def test_neither_a_queue_nor_the_steps_ahead_can_be_negative_and_both_may_be_none():
    assert PlanConfig(max_waiting=0, ahead=0).max_waiting == 0
    for wrong in ({"max_waiting": -1}, {"ahead": -1}):
        with pytest.raises(ConfigError, match="neither can be negative"):
            PlanConfig(**wrong)


def test_jobs_are_admitted_together_by_as_many_as_there_are_slots_at_most():
    assert PlanConfig(max_running=4, admit_together=4).admit_together == 4
    for wrong in (0, 5):
        with pytest.raises(ConfigError, match=f"admit_together is {wrong}; expected 1 to max_running, which is 4"):
            PlanConfig(max_running=4, admit_together=wrong)


# Rows


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_samples():
    world = World(step_tokens=100, max_running=2)
    world.submit(prompt(250), max_tokens=1)
    steps = [world.plan(), world.plan()]
    world.settle()
    steps.append(world.plan())
    assert [spans(step) for step in steps] == [[(0, 0, 100)], [(0, 100, 100)], [(0, 200, 50)]]
    assert [step.rows[0].samples for step in steps] == [False, False, True]
    assert [len(step.rows[0].new_pages) for step in steps] == [2, 2, 0]
    world.finish()


def test_what_a_step_computes_of_a_job_is_told_until_it_has_settled():
    world = World(step_tokens=100, max_running=2, ahead=1)
    world.submit(prompt(250), max_tokens=1)
    id = next(iter(world.planner._table.jobs))
    assert world.planner.transfers.computing(id) is None
    world.plan(), world.plan()
    assert world.planner.transfers.computing(id) == (0, 100), "the step that is settled next must be reported"
    world.settle()
    assert world.planner.transfers.computing(id) == (100, 200)
    assert world.planner.transfers.computing(JobId("nobody")) is None
    world.settle()
    assert world.planner.transfers.computing(id) is None
    world.finish()


def test_rows_that_decode_come_before_prompts_and_several_prompts_share_a_step():
    world = World(step_tokens=64, max_running=4, ahead=0)
    world.submit(prompt(10), max_tokens=5)
    world.turn()
    world.submit(prompt(30, 2))
    world.submit(prompt(100, 3))
    world.settle()
    assert spans(world.plan()) == [(0, None, 1), (1, 0, 30), (2, 0, 33)]
    world.finish()


def test_a_step_is_planned_before_the_last_one_is_settled_and_no_further_than_asked():
    world = World(ahead=2)
    world.submit(prompt(5), max_tokens=20)
    assert [spans(world.plan()) for _ in range(3)] == [[(0, 0, 5)], [(0, None, 1)], [(0, None, 1)]]
    assert world.plan() is None
    world.settle()
    assert spans(world.plan()) == [(0, None, 1)]
    world.finish()


def test_no_row_is_launched_beyond_max_tokens_or_the_models_length():
    for max_tokens, max_model_len in ((3, 400), (50, 8)):
        world = World(ahead=3, max_model_len=max_model_len)
        story = world.submit(prompt(5), max_tokens=max_tokens)
        assert [world.plan() is not None for _ in range(4)] == [True, True, True, False]
        world.finish()
        assert story.finish == "length"
        assert len(story.tokens) == 3
        assert world.runner.computed_positions == 5 + 2


def test_what_was_launched_beyond_a_stop_id_is_dropped_and_pages_return_when_it_has_settled():
    probe = World().submit(prompt(60), max_tokens=30).expected
    world = World(ahead=3, pages=2, max_model_len=128)
    story = world.submit(prompt(60), max_tokens=60, stop_ids=(probe[2],))
    end = probe.index(probe[2]) + 1
    for _ in range(4):
        world.plan()
    while story.finish is None:
        world.settle()
        if story.finish is None:
            world.plan()
    assert (story.finish, tuple(story.tokens)) == ("stop", probe[:end])
    assert len(world.flights) == 3
    assert world.planner.load().pages_used == 2, "rows in flight still write to these pages"
    assert world.plan() is None
    world.planner.check()
    world.finish()


# Ends


def test_a_stop_id_is_the_last_token_of_the_answer():
    expected = World().submit(prompt(9), max_tokens=20).expected
    world = World()
    story = world.submit(prompt(9), max_tokens=20, stop_ids=(expected[5],))
    world.finish()
    assert story.finish == "stop"
    assert story.tokens[-1] == expected[5]
    assert expected[5] not in story.tokens[:-1]


def test_a_row_that_gives_several_tokens_is_cut_at_the_stop_id_and_at_the_limit():
    for sampling, kept, finish in (({"stop_ids": (8,)}, (7, 8), "stop"), ({"max_tokens": 3}, (7, 8, 9), "length")):
        world = World(ahead=0)
        world.planner.submit(make_job("a", prompt(5), **sampling))
        step = world.planner.next_step()
        (delta,) = world.planner.settle(step, StepResult(number=1, rows=(RowResult(tokens=(7, 8, 9, 10)),)))
        assert (delta.tokens, delta.finish) == (kept, finish)
        world.planner.check()


def test_no_tokens_asked_for_computes_the_prompt_and_ends():
    world = World(step_tokens=64)
    story = world.submit(prompt(150), max_tokens=0, prompt_logprobs=0)
    world.finish()
    assert (story.finish, story.tokens) == ("length", [])
    assert len(scored(story)) == 149


def test_an_aborted_job_gives_back_its_pages_when_its_steps_have_settled():
    world = World()
    story = world.submit(prompt(100), max_tokens=50)
    world.plan()
    world.abort(story)
    assert story.finish == "aborted"
    assert world.planner.load().pages_used == 2
    world.settle()
    assert world.planner.load().pages_used == 0
    world.abort(story)
    world.finish()


def test_a_waiting_job_can_be_aborted():
    world = World(max_running=1)
    world.submit(prompt(5), max_tokens=5)
    waiting = world.submit(prompt(6))
    world.plan()
    world.abort(waiting)
    assert (waiting.finish, waiting.tokens) == ("aborted", [])
    world.finish()


def test_an_error_in_a_row_ends_that_job_and_no_other():
    world = World(fails=lambda seed, position: seed == 1 and position == 12)
    stories = [world.submit(prompt(10, first), max_tokens=9) for first in range(3)]
    world.finish()
    assert [story.finish for story in stories] == ["length", "error", "length"]
    assert stories[1].deltas[-1].error == "a fake fault"
    assert len(stories[1].tokens) == 3


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (make_job("a", ()), "prompt is empty"),
        (make_job("a", prompt(400)), "prompt has 400 tokens; prompt and answer may have 400"),
        (make_job("a", prompt(100), max_tokens=200), "need 5 pages of KV memory; there are 4"),
    ],
)
def test_a_job_that_can_never_run_ends_when_it_is_submitted(job, words):
    world = World(pages=4)
    (delta,) = world.planner.submit(job)
    assert delta.finish == "error"
    assert words in delta.error
    assert world.planner.idle


def test_the_largest_job_that_fits_runs():
    world = World(pages=4)
    story = world.submit(prompt(100), max_tokens=4 * PAGE_TOKENS - 100 + 1)
    world.finish()
    assert (story.finish, len(story.tokens)) == ("length", 157)


def test_a_full_queue_refuses_in_words():
    world = World(max_running=2, max_waiting=1)
    stories = [world.submit(prompt(5, first)) for first in range(4)]
    assert [story.finish for story in stories] == [None, None, None, "error"]
    assert "queue is full" in stories[3].deltas[0].error
    assert stories[3].deltas[0].fault == "overloaded", "the same request may succeed later"
    world.finish()


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("length", "each"), [(40, 40), (64, 64), (65, 1), (200, 8), (600, 24)])
def test_choices_of_one_request_compute_its_full_pages_once(length: int, each: int, ahead: int, learned: bool):
    """`each`: positions that every choice but the first computes. They may all fit into the first step."""
    drafts = {"draft_tokens": 3, "learned": True} if learned else {}
    world = World(pages=100, max_model_len=700, max_running=16, step_tokens=2048, ahead=ahead, **drafts)
    stories = [world.submit(prompt(length), max_tokens=1) for _ in range(8)]
    world.finish()
    assert {story.finish for story in stories} == {"length"}
    assert world.runner.computed_positions == length + 7 * each
    assert world.planner.load().pages_used == 0


def test_jobs_that_begin_alike_share_while_they_come_together():
    world = World(pages=100, max_running=16, step_tokens=2048)
    stories = [world.submit((*prompt(192), *prompt(100, first)), max_tokens=1) for first in range(2, 6)]
    world.finish()
    assert world.runner.computed_positions == 4 * 292 - 3 * 192
    assert [story.deltas[0].cached_tokens for story in stories] == [0, 192, 192, 192]


def test_who_waits_for_a_job_that_leaves_computes_by_itself():
    world = World(pages=100, max_running=16, step_tokens=64)
    first, *others = [world.submit(prompt(200), max_tokens=4) for _ in range(4)]
    world.turn()
    world.turn()
    world.abort(first)
    world.finish()
    assert {story.finish for story in others} == {"length"}


def test_a_prompt_whose_log_probabilities_are_asked_for_waits_for_nobody():
    world = World(pages=100, max_running=16, step_tokens=2048)
    for _ in range(3):
        world.submit(prompt(200), max_tokens=1, prompt_logprobs=1)
    assert len(world.plan().begins) == 3
    world.finish()


@pytest.mark.parametrize("length", [100, 300, 390])
def test_a_short_job_behind_choices_that_share_ends_before_all_of_them_could_be_computed(length: int):
    """It is scheduled in order, so it waits with them for the page that the first of them computes."""
    world = World(pages=200, max_running=16, step_tokens=128)
    for _ in range(8):
        world.submit(prompt(length), max_tokens=4)
    behind = world.submit(prompt(70, 88), max_tokens=4)
    turns = 0
    while not behind.finish:
        world.turn()
        turns += 1
    assert turns <= 8 * length // 128 + 4
    world.finish()


def first_token(world: World, story: Story) -> int:
    """The number of steps from now on until a story has its first token."""
    for step in range(1, 1000):
        world.turn()
        if story.tokens:
            return step
    raise AssertionError("no token came")


def long_prompts(world: World, many: int, length: int) -> list[Story]:
    """Prompts without a common prefix; the first of them is being computed."""
    stories = [world.submit(prompt(length, 100 + number), max_tokens=4) for number in range(many)]
    world.turn()
    world.turn()
    return stories


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("many", [1, 6, 14])
def test_a_short_prompt_does_not_wait_behind_long_ones(many: int, ahead: int):
    """It is computed in the next planned step, and its token is available when that step has settled."""
    world = World(pages=700, max_model_len=3000, max_running=16, step_tokens=512, ahead=ahead)
    long_prompts(world, many, 2000)
    assert first_token(world, world.submit(prompt(30, 7), max_tokens=4)) <= 2 + ahead
    world.finish()


def test_a_prompt_that_is_long_itself_does_not_wait_behind_a_much_longer_one():
    world = World(pages=700, max_model_len=30_000, max_running=16, step_tokens=512)
    long_prompts(world, 1, 20_000)
    assert first_token(world, world.submit(prompt(2000, 7), max_tokens=4)) <= 2000 // 256 + 3
    world.finish()


def test_prompts_of_one_length_are_computed_one_after_another():
    """Dividing a step among equal prompts would make none earlier, and all but the last one later."""
    world = World(pages=700, max_model_len=3000, max_running=16, step_tokens=512)
    stories = long_prompts(world, 4, 2000)
    ends = [first_token(world, story) for story in stories]
    assert all(4 <= steps <= 5 for steps in ends[1:]), ends
    world.finish()


def test_short_prompts_take_half_of_a_step_at_most_and_starve_nobody():
    world = World(pages=700, max_model_len=30_000, max_running=16, step_tokens=512)
    (story,) = long_prompts(world, 1, 10_000)
    steps = 0
    while not story.tokens:
        for number in range(3):  # an endless supply, more than the steps can compute
            world.submit(tuple(random.Random(3 * steps + number).choices(range(89), k=200)), max_tokens=1)
        world.turn()
        steps += 1
    assert steps <= 10_000 / (512 // 2 - 16) + 2  # decode rows use tokens of the step as well
    world.finish()


# The prefix cache


def test_a_second_job_begins_from_the_pages_of_the_first():
    world = World()
    world.submit(prompt(200))
    world.finish()
    story = world.submit((*prompt(200), 1, 2))
    world.finish()
    assert story.deltas[0].cached_tokens == 192
    assert world.planner.load().prompt_tokens_cached == 192


def test_the_last_prompt_token_is_always_computed():
    for length, cached in ((128, 64), (129, 128)):
        world = World()
        for _ in range(2):
            story = world.submit(prompt(length))
            world.finish()
        assert story.deltas[0].cached_tokens == cached


def test_the_next_turn_of_a_conversation_begins_from_the_answer_before():
    world = World()
    first = world.submit(prompt(10), max_tokens=200)
    world.finish()
    second = world.submit(prompt(10) + first.expected + (3,), max_tokens=5)
    world.finish()
    assert second.deltas[0].cached_tokens == 192


def test_pages_are_shared_as_soon_as_the_step_that_fills_them_has_settled():
    world = World(step_tokens=64, max_running=2)
    world.submit(prompt(250), max_tokens=5)
    world.plan()
    world.plan()
    world.settle()
    story = world.submit(prompt(100), max_tokens=2)
    world.finish()
    assert story.deltas[0].cached_tokens == 64


@pytest.mark.parametrize("length", [10, 150])
def test_different_salts_never_share_not_even_an_answer_to_less_than_a_page(length: int):
    world = World()
    first = world.submit(prompt(length), max_tokens=100, salt="one tenant")
    world.finish()
    for salt in ("another tenant", ""):
        story = world.submit(prompt(length) + first.expected, max_tokens=2, salt=salt)
        world.finish()
        assert story.deltas[0].cached_tokens == 0


def reads_images(planner: Planner) -> FeatureCache:
    """Makes a planner take jobs with images, of 4 positions each; pixels have to be said to have arrived."""
    features = FeatureCache(64, 1, lambda *_: 1.0)
    planner.encode_with(features)
    return features


def image(start: int, tokens: int) -> MediaSpan:
    return MediaSpan(start=start, tokens=tokens, hash=b"x", rows=2, columns=2 * tokens)


def test_pages_behind_an_image_that_their_hash_would_not_name_are_not_cached():
    for start, cached in ((70, 64), (10, 128)):
        world = World(ahead=0)
        features = reads_images(world.planner)
        job = make_job("a", prompt(100), max_tokens=90)
        world.planner.submit(
            type(job)(
                id=job.id,
                tokens=job.tokens,
                pages=job.pages,
                sampling=job.sampling,
                media=(image(start, 20),),
            )
        )
        features.arrived(b"x")
        while not world.planner.idle:
            step = world.planner.next_step()
            world.planner.settle(step, world.runner.launch(step).wait())
        assert world.planner.load().pages_cached * PAGE_TOKENS == cached


def scored(story: Story) -> list[int]:
    return [item.token for delta in story.deltas for item in delta.prompt_logprobs]


def test_prompt_logprobs_come_a_step_at_a_time_although_the_prompt_is_cached():
    world = World(step_tokens=64)
    world.submit(prompt(150))
    world.finish()
    story = world.submit(prompt(150), prompt_logprobs=0, logprobs=0)
    world.finish()
    assert scored(story) == list(prompt(150)[1:])
    assert [len(delta.prompt_logprobs) for delta in story.deltas[:4]] == [64, 64, 21, 0]
    assert story.deltas[0].cached_tokens == 0


def test_the_log_probabilities_of_the_largest_step_travel():
    """Each of its generated tokens has 20 alternatives, with the longest possible numbers."""
    worst = TokenLogprobs(token=1 << 31, logprob=-math.pi, rank=1 << 31, top=((1 << 31, -math.pi),) * 20)
    assert len(encode([Delta(job=JobId("a" * 64), prompt_logprobs=(worst,) * MOST_STEP_TOKENS)])) < MAX_MESSAGE_BYTES
    with pytest.raises(ConfigError, match="step_tokens is 65,537; the maximum is 65,536"):
        PlanConfig(step_tokens=MOST_STEP_TOKENS + 1)
    assert PlanConfig(step_tokens=MOST_STEP_TOKENS).step_tokens == MOST_STEP_TOKENS


def test_a_resumed_job_takes_no_page_that_another_job_computed_in_another_form():
    world = World(pages=24, ahead=0)
    resumed = world.submit(prompt(10), max_tokens=150)
    world.turn()
    # a prompt that contains the first job's future answer
    world.submit(prompt(10) + resumed.expected[:140], max_tokens=1)
    while len(resumed.tokens) < 100:
        world.turn()
    if world.flights:
        world.settle()
    (active,) = world.planner._table.running
    world.planner._builder.preempt(active, active)
    world.finish()
    assert world.runner.resumed == 1
    assert world.runner.resumed_bits_compared > 100


def test_pages_are_exact_when_nothing_before_them_was_generated():
    world = World()
    story = world.submit(prompt(130), max_tokens=70)
    world.finish()
    whole = prompt(130) + story.expected
    world.submit(whole + prompt(70), max_tokens=1)
    world.finish()
    pages = world.planner._pages.cache.match(page_hashes(whole + prompt(70)))
    assert [world.planner._pages.cache.is_exact(page) for page in pages] == [True, True, False, False]


def test_prompt_logprobs_come_once_although_their_prompt_was_pre_empted_half_way():
    world = World(step_tokens=64, ahead=0)
    story = world.submit(prompt(200), prompt_logprobs=0)
    world.plan()
    world.settle()
    world.planner._builder.preempt(world.planner._table.running[0], world.planner._table.running[0])
    world.finish()
    assert scored(story) == list(prompt(200)[1:])


# Pre-emption and order


def test_when_pages_run_out_the_youngest_job_steps_back_and_resumes():
    world = World(pages=6, max_model_len=320, max_running=3)
    stories = [world.submit(prompt(60, first), max_tokens=150) for first in range(3)]
    world.finish()
    assert world.planner.load().preemptions >= 1
    assert all(story.finish == "length" for story in stories)
    assert world.runner.resumed_bits_compared > 0


def test_a_resumed_job_computes_generated_positions_in_rows_of_their_own():
    world = World(pages=4, max_model_len=250, max_running=2, step_tokens=64)
    world.submit(prompt(40), max_tokens=150)
    world.submit(prompt(40, 7), max_tokens=150)
    resumed = []
    while not world.planner.idle:
        step = world.plan()
        if step is not None and any(len(begin.tokens) > begin.prompt for begin in step.begins):
            resumed = [step]
        elif resumed and len(resumed) < 3 and step is not None:
            resumed.append(step)
        if len(world.flights) > 1 or step is None:
            world.settle()
    begin = resumed[0].begins[0]
    rows = [row for step in resumed for row in step.rows if row.slot == begin.slot]
    assert (rows[0].start, rows[0].count, rows[0].samples) == (0, 40, False)
    assert rows[1].start == 40
    assert rows[1].count > 1, "generated positions must be recomputed in one row"
    world.check_end()


def test_a_long_prompt_moves_in_every_step_while_others_generate():
    world = World(pages=40, step_tokens=8, max_running=8)
    others = [world.submit((first,), max_tokens=100) for first in range(7)]
    world.plan()
    world.plan()
    long = world.submit(prompt(200), max_tokens=1)
    for _ in range(210):
        world.settle()
        world.plan()
        if long.finish:
            break
    assert long.finish == "length"
    assert all(len(story.tokens) > 90 for story in others)
    world.finish()


def test_a_page_is_left_for_each_running_job_when_another_enters():
    world = World(pages=4, max_running=4, ahead=0)
    world.submit(prompt(60), max_tokens=60)
    world.submit(prompt(60, 2), max_tokens=60)
    world.submit(prompt(60, 3), max_tokens=60)
    world.plan()
    assert world.planner.load().running == 2
    world.finish()
    assert world.planner.load().preemptions == 0


def test_what_is_logged_of_pages_is_what_the_cache_has_and_what_they_are_of():
    world, there = World(pages=9, max_model_len=320, max_running=3), set()
    world.planner.log_pages()
    for number in range(12):
        world.submit(prompt(100 + 20 * number, first=number % 4), max_tokens=70, salt="own" if number % 3 == 0 else "")
        for _ in range(40):
            if world.plan() is None or len(world.flights) > 1:
                world.settle()
            for page in world.planner.page_changes():
                if not page.there:
                    there.remove(page.hash)
                    continue
                assert page.hash not in there
                assert page.hash == hash_page(page.previous, page.tokens, page.salt)
                there.add(page.hash)
            assert there == set(world.planner._pages.cache._nodes)
    world.finish()
    assert any(world.planner._pages.cache._nodes.values()), "the cache is empty, so nothing was compared"


def test_pages_of_images_are_not_logged():
    planner = Planner(8, PlanConfig(step_tokens=512), 500, hash_page)
    planner.log_pages()
    features = reads_images(planner)
    for name, media in (("seen", (image(3, 4),)), ("read", ())):
        job = make_job(name, prompt(200, first=len(media)), max_tokens=1)
        planner.submit(msgspec.structs.replace(job, media=media))
        if media:
            features.arrived(b"x")
            step = planner.next_step()
            assert (len(step.encodes), step.rows) == (1, ())
            planner.settle(step, StepResult(number=step.number, rows=()))
        step = planner.next_step()
        assert step is not None
        rows = tuple(RowResult(tokens=(5,)) for _ in step.rows)
        planner.settle(step, StepResult(number=step.number, rows=rows))
        assert [page.there for page in planner.page_changes()] == ([] if media else [True] * 3)


def test_the_hashes_that_the_planner_makes_are_those_of_a_prompt():
    world = World()
    story = world.submit(prompt(100), max_tokens=100)
    world.finish()
    whole = prompt(100) + story.expected
    assert len(world.planner._pages.cache.match(page_hashes(whole))) == 3


# The books


def test_check_finds_a_lost_page():
    world = World()
    world.submit(prompt(100))
    world.plan()
    world.planner._table.running[0].pages.pop()
    with pytest.raises(AssertionError, match="references by JOBS"):
        world.planner.check()


def test_check_finds_a_slot_given_twice():
    world = World(max_running=2)
    world.submit(prompt(100))
    world.submit(prompt(90, first=2))
    world.plan()
    first, second = world.planner._table.running
    second.slot = first.slot
    with pytest.raises(AssertionError, match="slots"):
        world.planner.check()


def test_results_are_settled_in_order():
    world = World(ahead=2)
    world.submit(prompt(5))
    first, second = world.plan(), world.plan()
    with pytest.raises(AssertionError, match="1 is next"):
        world.planner.settle(second, world.flights[1][1].wait())
    assert first.number == 1


def test_the_load_counts_each_prompt_once_and_every_token():
    world = World(pages=6, max_model_len=320, max_running=3)
    stories = [world.submit(prompt(60, first), max_tokens=150) for first in range(3)]
    world.finish()
    load = world.planner.load()
    assert (load.prompt_tokens, load.generation_tokens) == (180, 450)
    assert load.pages_used + load.pages_cached <= load.pages_total == 6
    assert len(stories) == 3


# Together


def begun(world: World) -> list[int]:
    """How many jobs begin in each of the remaining steps."""
    counts: list[int] = []
    while not world.planner.idle:
        step = world.plan()
        counts.append(len(step.begins) if step is not None else 0)
        while world.flights:
            world.settle()
    return [count for count in counts if count]


def test_waiting_jobs_begin_once_enough_slots_are_free_and_the_last_of_them_together():
    def world(together: int) -> World:
        world = World(pages=40, max_running=4, ahead=0, admit_together=together)
        for n in range(11):
            world.submit(prompt(5, n), max_tokens=3 + n)
        return world

    assert begun(world(1)) == [4, *[1] * 7]
    assert begun(world(2)) == [4, 2, 2, 2, 1]
    assert begun(world(4)) == [4, 4, 3]


def test_prompts_that_begin_together_wait_for_no_short_beginning_that_they_share():
    def steps(shared: int, together: int) -> list[int]:
        world = World(pages=100, max_model_len=1024, max_running=4, ahead=0, admit_together=together, step_tokens=4096)
        for n in range(4):
            world.submit(prompt(shared) + prompt(9, n + 1))
        return begun(world)

    assert steps(7 * PAGE_TOKENS, 1) == [1, 3]
    assert steps(7 * PAGE_TOKENS, 4) == [4]
    assert steps(8 * PAGE_TOKENS, 4) == [1, 3]


def test_a_prompt_that_would_be_cut_waits_for_a_step_of_its_own_where_jobs_begin_together():
    for together, expected in ((1, [2]), (2, [1, 1])):
        world = World(pages=40, max_running=2, ahead=0, admit_together=together, step_tokens=100)
        world.submit(prompt(60, 1))
        world.submit(prompt(60, 2))
        assert begun(world) == expected


def test_it_is_told_how_long_a_job_waited_and_how_large_steps_were():
    """Once per job, with its first token."""
    now = 0.0
    world = World(max_running=1, step_tokens=64, ahead=0)
    world.planner = Planner(16, world.config, world.max_model_len, hash_page, clock=lambda: now)
    stories = [world.submit(prompt(100), max_tokens=2)]
    for _ in range(5):
        world.plan()
        if now == 0:
            stories.append(world.submit((1, 2, 3), max_tokens=2))
        world.settle()
        now += 1
    world.check_end()
    told = [[delta.queued_s for delta in story.deltas] for story in stories]
    assert told == [[0.0, None], [3.0, None]]  # two steps for the first job's prompt, one for its second token
    load = world.planner.load()
    assert (sum(load.step_sizes), load.step_positions) == (5, 64 + 36 + 1 + 3 + 1)
    assert [size for size, steps in zip(STEP_SIZES, load.step_sizes, strict=False) if steps] == [1, 8, 64]
    assert load.step_sizes[STEP_SIZES.index(64)] == 2


def test_without_a_clock_no_wait_is_told():
    world = World()
    story = world.submit(prompt(3))
    world.finish()
    assert {delta.queued_s for delta in story.deltas} == {None}
