"""Handoffs that go wrong: whatever is lost, late or wrong, the answer is that of one worker, and all comes back."""

import ctypes
import random
from collections.abc import Callable

import msgspec
import pytest
import torch

from redline.transport.memory import Disturbance, MemoryTransport
from redline.wire.handoff import Gone, Prefill
from redline.wire.job import Abort, Job, JobId
from redline.worker import exchange
from tests.handoff import Pair
from tests.tiny_model import BOTH, Answer, job, open_engine, prompt, run_alone, tiny_model

LENGTH = 300


def asked(name: str = "asked", length: int = LENGTH, seed: int = 1) -> Job:
    return job(name, prompt(seed=seed, length=length), max_tokens=30)


def told(answer: Answer) -> Answer:
    return answer._replace(cached_tokens=0, proposed=0, accepted=0)


def alone(one: Job) -> Answer:
    return told(run_alone(tiny_model(), one))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pair(
    disturb: Callable[[int, int], Disturbance | None] | None = None, clock: Clock | None = None, **engine: object
) -> Pair:
    engines = [open_engine(tiny_model(), speculation=BOTH, step_tokens=100, **engine) for _ in range(2)]  # type: ignore[arg-type]
    clock = clock or Clock()
    return Pair(*engines, transport=MemoryTransport(disturb, clock), clock=clock)


def finished(both: Pair) -> None:
    """Nothing is held on either side."""
    for side in (both.computes, both.answers):
        planner = side.engine.planner
        planner.check()
        assert planner.idle
        assert planner.load().pages_used == 0
        assert side.exchange.idle


def flip(address: int, count: int) -> None:
    ctypes.memset(address + count // 2, ctypes.string_at(address + count // 2, 1)[0] ^ 4, 1)


@pytest.mark.parametrize(
    "disturbance",
    [Disturbance(failing=True), Disturbance(change=flip), Disturbance(torn=True, failing=True)],
    ids=["fails", "flips a bit", "tears"],
)
@pytest.mark.parametrize("at", [0, 2])
def test_a_parcel_that_does_not_come_is_computed_where_the_answer_is(at: int, disturbance: Disturbance) -> None:
    reads = 0

    def disturb(_: int, __: int) -> Disturbance | None:
        nonlocal reads
        reads += 1
        return disturbance if reads == at + 1 else None

    both = pair(disturb)
    try:
        answers = both.run([asked(), asked("other", seed=2)])
        assert both.answers.exchange.counts == {"transfer": 1, "taken over": 1}
        finished(both)
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())
    assert told(answers["other"]) == alone(asked("other", seed=2))


def test_a_link_that_stalls_is_given_up_after_its_seconds() -> None:
    clock = Clock()
    both = pair(lambda *_: Disturbance(dropped=True), clock)
    try:
        both.send([asked()])
        with torch.inference_mode():
            for _ in range(40):
                both.turn()
                clock.now += 0.05
            assert not both.deltas["asked"]
            clock.now += exchange.READ_S
        answers = both.run()
        assert both.answers.exchange.counts == {"transfer": 1}
        finished(both)
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())


@pytest.mark.parametrize("turns", [1, 2, 3, 5])
def test_who_computes_may_end_at_any_time(turns: int) -> None:
    both = pair()
    try:
        both.send([asked(), asked("other", seed=2)])
        with torch.inference_mode():
            for _ in range(turns):
                both.turn()
        both.stop_computing()
        answers = both.run()
        both.answers.engine.planner.check()
        assert both.answers.exchange.idle
    finally:
        both.close()
    for one in (asked(), asked("other", seed=2)):
        assert told(answers[one.id]) == alone(one)


def test_a_worker_that_says_nothing_is_not_waited_for_longer_than_it_may() -> None:
    clock = Clock()
    both = pair(clock=clock)
    try:
        both.send([asked()])
        with torch.inference_mode():
            both.turn()
            both.turn()
        both.computes.stopped = True  # and nobody says so
        clock.now = exchange.SILENCE_S + 1
        answers = both.run()
        assert both.answers.exchange.counts == {"silence": 1}
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_who_answers_may_end_at_any_time_and_what_was_for_it_comes_back(turns: int) -> None:
    both = pair()
    try:
        both.send([asked(), asked("other", seed=2)])
        with torch.inference_mode():
            for _ in range(turns):
                both.turn()
            both.answers.stopped = True
            both.computes.box.put(Gone(worker="decode", epoch=1))
            for _ in range(30):
                both.turn()
        planner = both.computes.engine.planner
        assert planner.idle
        assert planner.load().pages_used == 0
        assert both.computes.exchange.idle
    finally:
        both.close()


def test_a_prompt_that_nobody_wants_is_given_up() -> None:
    clock = Clock()
    both = pair(clock=clock)
    both.answers.stopped = True
    try:
        both.send([asked()])
        with torch.inference_mode():
            for _ in range(10):
                both.turn()
            assert both.computes.engine.planner.load().pages_used > 0, "it is lent"
            clock.now = exchange.WANT_S + 1
            both.turn()
        assert both.computes.engine.planner.load().pages_used == 0
        assert both.computes.exchange.idle
        both.answers.stopped = False
        answers = both.run()
        assert both.answers.exchange.counts == {"error": 1}, "it is told, should it ever ask"
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())


def test_a_parcel_that_nobody_has_read_in_time_fails_its_checksum_or_is_gone() -> None:
    """The lease runs out, its space is lent again, and the late reader notices."""
    clock, polls = Clock(), 6
    both = pair(lambda *_: Disturbance(polls=polls), clock)
    both.computes.exchange._lender.size  # noqa: B018
    try:
        both.send([asked()])
        with torch.inference_mode():
            for _ in range(3):
                both.turn()
            clock.now += exchange.LEASE_S + 1
            both.computes.exchange.work()
            assert not both.computes.exchange._lender.lent
            both.computes.exchange._space.random_(0, 255)  # others' parcels lie there now
        answers = both.run()
        finished(both)
    finally:
        both.close()
    assert both.answers.exchange.counts["transfer"] == 1
    assert told(answers["asked"]) == alone(asked())


@pytest.mark.parametrize("turns", [1, 2, 3, 4, 6, 9])
def test_an_abort_reaches_both_sides_whenever_it_comes(turns: int) -> None:
    both = pair(lambda *_: Disturbance(polls=2))
    try:
        both.send([asked(), asked("other", seed=2)])
        with torch.inference_mode():
            for _ in range(turns):
                both.turn()
        both.answers.box.put(Abort(job=JobId("asked")))
        answers = both.run()
        finished(both)
    finally:
        both.close()
    assert answers["asked"].finish in ("aborted", "length")
    assert told(answers["other"]) == alone(asked("other", seed=2))


def test_an_abort_or_a_wish_that_comes_before_its_prompt_is_kept_for_it() -> None:
    both = pair()
    one, other = asked(), asked("other", seed=2)
    try:
        for each in (one, other):
            both.deltas[each.id] = []
            both.answers.box.put(msgspec.structs.replace(each, pages_from=both.computes.as_other))
        with torch.inference_mode():
            both.turn()
            both.answers.box.put(Abort(job=one.id))
            both.turn()
            both.turn()
        for each in (one, other):
            both.computes.box.put(Prefill(job=each, to=both.answers.as_other))
        answers = both.run()
        assert both.computes.exchange.counts == {"handed over": 1}
        finished(both)
    finally:
        both.close()
    assert answers["asked"].finish == "aborted"
    assert told(answers["other"]) == alone(other)


def test_parcels_of_another_format_are_not_asked_for() -> None:
    engines = [open_engine(tiny_model(), kv_dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    both = Pair(*engines)
    try:
        answers = both.run([asked()])
        assert both.answers.exchange.counts == {"another format": 1}
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())


def test_a_worker_whose_area_is_not_there_is_not_waited_for() -> None:
    both = pair()
    source = msgspec.structs.replace(both.computes.as_other, area=b"nothing")
    both.deltas["asked"] = []
    try:
        both.answers.box.put(msgspec.structs.replace(asked(), pages_from=source))
        answers = both.run()
        assert both.answers.exchange.counts == {"no connection": 1}
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())


@pytest.mark.parametrize("seed", range(12))
def test_anything_may_happen_at_any_time(seed: int) -> None:
    """Reads that fail, tear, stall or change a byte; times that run out; clients that leave; a worker that ends."""
    random_, clock = random.Random(seed), Clock()

    def disturb(_: int, __: int) -> Disturbance | None:
        what = random_.random()
        if what < 0.5:
            return None
        return Disturbance(
            polls=random_.choice([0, 1, 5]),
            torn=random_.random() < 0.3,
            dropped=what > 0.95,
            failing=0.9 < what < 0.95,
            change=flip if 0.85 < what < 0.9 else None,
        )

    both = pair(disturb, clock, pages=random_.choice([12, 30]), max_model_len=400)
    jobs = [
        job(f"{n}", prompt(seed=n % 4, length=random_.randrange(60, 330)), max_tokens=random_.choice([1, 2, 30, 60]))
        for n in range(14)
    ]
    left: set[str] = set()
    waiting = list(jobs)
    try:
        with torch.inference_mode():
            for _ in range(400):
                what = random_.random()
                if waiting and what < 0.2:
                    both.send([waiting.pop()])
                elif what < 0.22 and both.deltas:
                    left.add(gone := random_.choice(list(both.deltas)))
                    both.answers.box.put(Abort(job=JobId(gone)))
                elif what < 0.24:
                    clock.now += random_.choice([0.1, 6.0, 11.0])
                elif seed % 3 == 0 and not both.computes.stopped and len(waiting) < 4 and what < 0.26:
                    both.stop_computing()
                both.turn()
                clock.now += 0.01
        clock.now += 40
        answers = both.run()
        assert both.answers.exchange.idle
        assert both.answers.engine.planner.load().pages_used == 0
        if not both.computes.stopped:
            finished(both)
    finally:
        both.close()
    for one in jobs:
        if one.id in answers and one.id not in left:
            assert answers[one.id].tokens == alone(one).tokens, one.id
