"""The books of the feature table: which images are encoded next, which rows they have, and when they are dropped."""

import pytest

from redline.messages.delta import Encoded
from redline.messages.job import JobId, MediaSpan
from redline.messages.media import ImageData
from redline.messages.step import Encode, Step, StepResult
from redline.scheduler.active import ActiveJob
from redline.scheduler.features import ENCODE_S, FeatureCache
from tests.fakes import make_job

BLOCKS = 4


def span(name: str, tokens: int = 4, start: int = 0) -> MediaSpan:
    return MediaSpan(start=start, tokens=tokens, hash=name.encode(), rows=2, columns=2 * tokens)


def job(name: str, *media: MediaSpan) -> ActiveJob:
    made = make_job(name, tuple(range(1, 200)))
    return ActiveJob(
        type(made)(id=made.id, tokens=made.tokens, pages=made.pages, sampling=made.sampling, media=media), 0, 300
    )


def cache(rows: int = 16) -> FeatureCache:
    """An encoder of BLOCKS blocks; every patch takes one operation in each."""
    return FeatureCache(rows, BLOCKS, lambda frames, rows, columns: float(BLOCKS * frames * rows * columns))


class Steps:
    """Runs the encoder's steps one after another."""

    def __init__(self, features: FeatureCache, per_s: float = 1e9) -> None:
        self.features = features
        self.per_s = per_s  # operations per second
        self.ran: list[Encode] = []

    def run(self, *, failed: bool = False) -> tuple[Encode, ...]:
        encodes = self.features.next()
        operations = sum(16 * encode.count for encode in encodes)
        step = Step(number=1, encodes=encodes)
        result = StepResult(number=1, rows=(), failed=failed, encode_s=None if failed else operations / self.per_s)
        self.features.settle(step, result, failed=failed)
        self.ran += encodes
        return encodes

    def finish(self) -> None:
        while self.run():
            pass


def test_a_job_starts_when_its_pixels_have_come_and_all_blocks_have_run():
    features, asking = cache(), job("a", span("cat"))
    assert not features.acquire(asking, 0)
    assert [(wanted.job, wanted.hash) for wanted in features.wanted()] == [(JobId("a"), b"cat")]
    assert features.wanted() == []
    assert features.next() == ()
    assert features.busy
    features.arrived(b"cat")
    Steps(features).finish()
    assert features.acquire(asking, 0)
    assert not features.busy
    (found,) = features.features(asking)
    assert (found.start, len(found.rows)) == (0, 4)
    features.check([JobId("a")])


def test_a_jobs_note_has_the_encoders_time_for_its_own_images_and_counts_those_encoded_before():
    features, first = cache(), job("a", span("cat"))
    features.acquire(first, 0)
    features.arrived(b"cat")
    Steps(features, per_s=64.0).finish()
    assert features.encoded_for(first) == Encoded(images=1, tokens=4, cached=0, encode_s=1.0)
    second = job("b", span("cat"), span("dog", start=4))
    features.acquire(second, 0)
    features.arrived(b"dog")
    Steps(features, per_s=32.0).finish()
    assert features.encoded_for(second) == Encoded(images=2, tokens=8, cached=1, encode_s=2.0)
    assert features.encoded_for(job("c", span("cat"))) is None, "it has taken none: the prefix cache covers them"


def test_the_first_step_measures_and_the_others_fill_their_time():
    features = cache()
    features.acquire(job("a", span("cat")), 0)
    features.arrived(b"cat")
    steps = Steps(features, per_s=16 / ENCODE_S * 2.5)  # two blocks of an image in the time of a step
    assert [encode.count for _ in range(3) for encode in steps.run()] == [1, 2, 1]
    assert [encode.start for encode in steps.ran] == [0, 1, 3]
    assert [bool(encode.rows) for encode in steps.ran] == [False, False, True]


def test_a_block_that_takes_longer_than_a_step_may_still_runs():
    features = cache()
    features.acquire(job("a", span("cat")), 0)
    features.arrived(b"cat")
    assert [encode.count for _ in range(5) for encode in Steps(features, per_s=1.0).run()] == [1] * BLOCKS


def test_small_images_share_a_step():
    features = cache()
    features.acquire(job("a", span("cat"), span("dog", start=9)), 0)
    features.arrived(b"cat")
    features.arrived(b"dog")
    steps = Steps(features)
    steps.run()
    assert [(encode.hash, encode.count) for encode in steps.run()] == [(b"cat", 3), (b"dog", 4)]


def test_an_image_that_the_prefix_cache_covers_is_not_asked_for():
    features, asking = cache(), job("a", span("cat", start=0), span("dog", start=100))
    features.acquire(asking, 64)
    assert [wanted.hash for wanted in features.wanted()] == [b"dog"]


def test_a_second_job_with_the_image_encodes_nothing():
    features = cache()
    first = job("a", span("cat"))
    features.acquire(first, 0)
    features.arrived(b"cat")
    Steps(features).finish()
    features.release(first)
    features.check([])
    assert features.acquire(job("b", span("cat", start=50)), 0)
    assert (features.wanted()[1:], features.encoded, features.reused) == ([], 1, 1)


def test_the_least_recently_needed_image_is_dropped_and_one_in_use_never():
    features = cache(rows=8)
    for name in ("cat", "dog"):
        one = job(name, span(name))
        features.acquire(one, 0)
        features.arrived(name.encode())
        Steps(features).finish()
        features.release(one)
    holder = job("holder", span("cat"))
    assert features.acquire(holder, 0)
    features.acquire(job("new", span("owl")), 0)  # takes the dog's rows
    assert not features.acquire(job("more", span("elk")), 0)
    assert [wanted.hash for wanted in features.wanted()] == [b"cat", b"dog", b"owl"]
    features.check([JobId("holder"), JobId("new")])


def test_without_room_for_all_of_its_images_a_job_takes_none():
    features = cache(rows=8)
    features.acquire(job("a", span("cat")), 0)
    assert not features.acquire(job("b", span("dog"), span("owl", start=9)), 0)
    assert [wanted.hash for wanted in features.wanted()] == [b"cat"]
    features.check([JobId("a")])


def test_an_image_whose_job_has_gone_before_its_pixels_came_is_dropped():
    features, gone = cache(), job("a", span("cat"))
    features.acquire(gone, 0)
    features.release(gone)
    data = ImageData(hash=b"cat", frames=1, rows=2, columns=8, patches=b"")
    assert not features.expects(data)
    assert not features.busy
    features.check([])


def test_pixels_of_another_grid_are_not_expected():
    features = cache()
    features.acquire(job("a", span("cat")), 0)
    assert features.expects(ImageData(hash=b"cat", frames=1, rows=2, columns=8, patches=b""))
    assert not features.expects(ImageData(hash=b"cat", frames=1, rows=8, columns=2, patches=b""))


def test_an_image_starts_again_after_a_step_that_failed():
    features, asking = cache(), job("a", span("cat"))
    features.acquire(asking, 0)
    features.arrived(b"cat")
    steps = Steps(features, per_s=16 / ENCODE_S)
    steps.run()
    steps.run(failed=True)
    assert not features.acquire(asking, 0)
    steps.finish()
    assert features.acquire(asking, 0)
    assert [encode.start for encode in steps.ran] == [0, 1, 0, 1, 2, 3]


def test_more_images_than_the_table_holds_are_refused_but_the_same_one_counts_once():
    features = cache(rows=8)
    assert features.refusal([span("cat"), span("cat", start=9), span("dog", start=20)]) is None
    refused = features.refusal([span("cat"), span("dog", start=9), span("owl", start=20)])
    assert refused == "the images of the prompt take 12 tokens; at most 8 are encoded at a time"
    assert features.refusal([MediaSpan(start=0, tokens=5, hash=b"cat", rows=2, columns=8)]) is not None


@pytest.mark.parametrize("wrong", ["rows", "users", "blocks"])
def test_check_finds_wrong_books(wrong: str):
    features = cache()
    features.acquire(job("a", span("cat")), 0)
    (image,) = features._images.values()
    if wrong == "rows":
        features._free.pop()
    elif wrong == "users":
        image.users.add(JobId("nobody"))
    else:
        image.settled = 1
    with pytest.raises(AssertionError):
        features.check([JobId("a")])
