"""Traces of requests: kept only for the newest ones, in little memory."""

import gc
import io

from rich.console import Console

from redline.api.telemetry.request_traces import MOST_JOBS, MOST_PAUSES, RequestTrace, RequestTraces
from redline.cli.explain import _of_images, show
from redline.messages.channel import MemoryChannel
from redline.messages.delta import Brought, Delta, Drafted, Encoded, Preempted, Resumed
from redline.messages.job import JobId
from redline.router.latency_model import LatencyModel
from redline.router.placement import PlacementCandidate, predict
from redline.router.preemption_forecast import GoesOn
from redline.router.worker_registry import Route, WorkerHandle
from tests.clocks import FakeClock


def begun() -> RequestTrace:
    one = RequestTrace(0, 100, 1.0)
    here, there = predict(
        100, [PlacementCandidate("a", 64, 0, 1, 999), PlacementCandidate("b", 0, 0, 0, 999)], LatencyModel()
    )
    one.record_sent(Route(WorkerHandle("a", MemoryChannel()), None, here, (there,)), "")
    return one


def story() -> RequestTrace:
    one = begun()
    one.record_delta(Delta(job=JobId("-"), tokens=(1, 2), proposed=3, accepted=1, cached_tokens=64), 2.0)
    for _ in range(MOST_PAUSES + 4):
        lost = Preempted(by=JobId("b"), running=3, pages=40, lost_tokens=90, again_tokens=30, short_pages=2)
        one.record_note(lost, JobId("a"), GoesOn(0.5, 0.25), 1)
    one.record_note(Resumed(again_tokens=26, waited_s=0.4, paused_s=0.6), JobId("a"))
    one.record_note(Brought(host_tokens=64, disk_tokens=0, read_s=0.1, predicted_s=0.2, compute_s=None), JobId("a"))
    one.record_note(Drafted(steps=4, seconds=0.04, predicted_s=0.036, without_s=0.02), JobId("a"))
    one.record_end("stop", 2, 3.0)
    return one


def test_only_the_newest_are_kept_also_where_a_client_names_all_its_requests_alike() -> None:
    stories = RequestTraces()
    for number in range(MOST_JOBS + 10):
        stories.begin(str(number), [story()])
    assert not stories.of("9")
    assert len(stories.of("10")) == 1
    for _ in range(MOST_JOBS + 10):
        stories.begin("same", [story()])
    assert len(stories.of("same")) == MOST_JOBS
    assert not stories.of(str(MOST_JOBS + 9))
    stories.begin("next", [story(), story()])
    assert (len(stories.of("next")), stories.of("same")) == (2, ())


def test_no_collection_walks_through_what_is_kept() -> None:
    def tracked() -> int:
        for _ in range(4):  # each collection untracks the tuples that contain those untracked by the previous one
            gc.collect()
        return len(gc.get_objects())

    stories = RequestTraces()
    stories.begin("first", [story()])
    before = tracked()
    for number in range(500):
        stories.begin(str(number), [story()])
    assert tracked() - before < 50


def test_redline_explain_says_of_a_pause_that_nobody_told_the_end_of_what_is_known() -> None:
    one = begun()

    def preempted(after_tokens: int) -> str:
        lost = Preempted(by=JobId("b"), running=3, pages=40, lost_tokens=90, again_tokens=30, short_pages=2)
        one.record_note(lost, JobId("a"), GoesOn(0.5, 0.25), after_tokens)
        return said()

    def said() -> str:
        console = Console(record=True, width=400, file=io.StringIO())
        show({"jobs": [one.told()]}, console)
        return console.export_text()

    one.record_delta(Delta(job=JobId("-"), tokens=(1,)), 2.0)
    assert preempted(1).count("it has not") == 1
    assert preempted(5).count("it resumed on another worker") == 1, "its worker went down, and another one resumed it"
    one.record_end("length", 9, 3.0)
    assert said().count("it resumed on another worker") == 2


def test_a_story_says_what_was_expected_and_what_came() -> None:
    told = story().told()
    (sent,) = told["sent"]
    assert sent["why"] == "64 of its 100 tokens are cached there, 0 elsewhere"
    assert (sent["expected"]["uncached_tokens"], sent["instead"][0]["uncached_tokens"]) == (36, 100)
    assert told["drafts"] == {"rounds": 1, "verified": 3, "accepted": 1}
    assert (told["tokens"], told["finish"], told["cached_tokens"]) == (2, "stop", 64)


def test_a_story_says_what_a_pause_a_reading_and_drafts_took_beside_what_was_expected() -> None:
    told = story().told()
    assert told["preemptions"] == MOST_PAUSES + 4
    assert len(told["paused"]) == MOST_PAUSES
    before, last = told["paused"][-2:]
    assert (last["worker"], last["by"], last["after_tokens"], last["again_expected_tokens"]) == ("a", "b", 1, 30)
    assert (last["wait_expected_s"], last["again_expected_s"]) == (0.5, 0.25)
    assert (last["again_tokens"], last["waited_s"], last["paused_s"]) == (26, 0.4, 0.6)
    assert (before["again_tokens"], before["paused_s"]) == (None, None), "it was preempted again before its next token"
    assert told["brought"] == {
        "host_tokens": 64, "disk_tokens": 0, "read_s": 0.1, "read_expected_s": 0.2, "compute_expected_s": None,
    }  # fmt: skip
    assert told["steps_with_drafts"] == {
        "timed": 4, "step_s": 0.01, "step_expected_s": 0.009, "step_without_expected_s": 0.005,
    }  # fmt: skip


def test_images_are_in_the_trace_and_in_the_line_that_explains_them() -> None:
    one = RequestTrace(0, 100, 0.0)
    assert one.told()["images"] is None
    one.record_note(Encoded(images=2, tokens=828, cached=1, encode_s=0.0342), JobId("a"))
    told = one.told()["images"]
    assert told == {"images": 2, "tokens": 828, "cached": 1, "encode_s": 0.0342}
    assert _of_images(told) == "2 images of 828 tokens, encoded in 0.034 s; 1 encoded for an earlier request"
    assert _of_images(told | {"cached": 2}) == "2 images of 828 tokens, encoded for an earlier request"
    assert _of_images(told | {"images": 1, "cached": 0}) == "1 image of 828 tokens, encoded in 0.034 s"


def test_a_pause_that_is_told_once_it_is_over_was_when_it_was() -> None:
    lost = Preempted(by=JobId("b"), running=3, pages=40, lost_tokens=90, again_tokens=30, short_pages=2)
    with FakeClock().installed() as now:
        one = RequestTrace(0, 100, now())
        now.advance(5.0)
        one.record_note(lost, JobId("a"))
        one.record_note(Resumed(again_tokens=26, waited_s=1.0, paused_s=3.0), JobId("a"))
    (paused,) = one.told()["paused"]
    assert (paused["at_s"], paused["paused_s"]) == (2.0, 3.0), "the time of the preemption, not of the message"


def test_redline_explain_prints_them() -> None:
    console = Console(record=True, width=400, file=io.StringIO())
    show({"jobs": [story().told()]}, console)
    said = console.export_text()
    assert "read 64 tokens from the host's memory in 0.100 s, expected 0.200" in said
    assert "pre-empted 4 times before the latest 16" in said
    assert "pre-empted on a after 1 tokens, for a page of job b: all 40 were in use, and it began last of 4; " in said
    expected = "expected to resume in 0.750 s (0.500 until pages are free, 30 tokens to recompute)"
    assert f"{expected}; it was pre-empted again before" in said
    assert f"{expected}; it did in 0.600 (0.400 until pages were free, 26 tokens recomputed)" in said
    assert "it has not" not in said
    assert "4 of these took 10.00 ms each, expected 9.00, and without drafts 5.00: for 2.00 tokens each" in said
