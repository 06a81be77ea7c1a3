"""What became of requests: kept for the newest alone, and in little."""

import gc
import time

from redline.api.stories import MOST_JOBS, Stories, Story
from redline.route.choose import Candidate, predict
from redline.route.links import Link, Route
from redline.route.pace import Pace
from redline.wire.channel import MemoryChannel
from redline.wire.delta import Delta
from redline.wire.job import JobId


def story() -> Story:
    one = Story(0, 100, time.perf_counter())
    here, there = predict(100, [Candidate("a", 64, 0, 1, 999), Candidate("b", 0, 0, 0, 999)], Pace())
    one.goes(Route(Link("a", MemoryChannel()), None, here, (there,)), "")
    one.comes(Delta(job=JobId("-"), tokens=(1, 2), proposed=3, accepted=1, cached_tokens=64), time.perf_counter())
    one.ends("stop", 2, time.perf_counter())
    return one


def test_only_the_newest_are_kept_also_where_a_client_names_all_its_requests_alike() -> None:
    stories = Stories()
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
        for _ in range(4):  # each leaves out the tuples whose parts the one before has left out
            gc.collect()
        return len(gc.get_objects())

    stories = Stories()
    stories.begin("first", [story()])
    before = tracked()
    for number in range(500):
        stories.begin(str(number), [story()])
    assert tracked() - before < 50


def test_a_story_says_what_was_expected_and_what_came() -> None:
    told = story().told()
    (sent,) = told["sent"]
    assert sent["why"] == "64 of its 100 tokens are cached there, 0 elsewhere"
    assert (sent["expected"]["uncached_tokens"], sent["instead"][0]["uncached_tokens"]) == (36, 100)
    assert told["drafts"] == {"rounds": 1, "verified": 3, "accepted": 1}
    assert (told["tokens"], told["finish"], told["cached_tokens"]) == (2, "stop", 64)
