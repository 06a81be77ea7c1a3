"""KV transfers that fail: if anything is lost, late or wrong, the answer equals that of a single worker, and everything
is freed.
"""

import ctypes
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from redline.errors import ConfigError
from redline.messages.channel import Outbox, SocketInbox, SocketOutbox, ipc_address
from redline.messages.codec import Wire
from redline.messages.delta import Brought, Delta, Preempted
from redline.messages.handoff import (
    ChunkReady,
    Piece,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PullRequest,
    Queued,
    WorkerDown,
)
from redline.messages.job import Abort, Job, JobId
from redline.transport.memory import Disturbance, MemoryTransport
from redline.worker.kv_transfer import incoming, outgoing, receiver, sender
from redline.worker.parcel_memory import HostParcels
from redline.worker.transfer_paths import Carrier
from tests.handoff import Box, Pair, Side
from tests.tiny_model import BOTH, Answer, job, joined, open_engine, prompt, run_alone, tiny_model
from tests.waiting import LIMIT_S

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
    """Neither side holds any transfer, buffer or page."""
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


def test_what_was_noted_of_a_prompt_is_told_by_who_answers() -> None:
    lost = Preempted(by=JobId("b"), running=1, pages=2, lost_tokens=3, again_tokens=4, short_pages=5)
    read = Brought(host_tokens=64, disk_tokens=0, read_s=0.2, predicted_s=0.1, compute_s=None)
    both = pair()
    try:
        both.send([asked()])
        both.turn()
        both.computes.engine.planner._table.jobs[asked().id].brought = read
        assert not both.computes.exchange._outgoing.keep([Delta(job=asked().id, noted=(lost,))]), (
            "the client gets its deltas from the other worker"
        )
        for _ in range(2000):
            both.turn()
        deltas = both.deltas["asked"]
        finished(both)
    finally:
        both.close()
    assert [delta.noted for delta in deltas if delta.noted] == [(lost, read)]
    assert next(delta for delta in deltas if delta.tokens).noted


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
            clock.now += receiver.READ_S
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
        both.computes.stopped = True  # and no message reports it
        clock.now = incoming.SILENCE_S + 1
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
            both.computes.box.put(WorkerDown(worker="decode", epoch=1))
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
            assert both.computes.engine.planner.load().pages_used > 0, "pages wait to be read"
            clock.now = outgoing.WANT_S + 1
            both.turn()
        assert both.computes.engine.planner.load().pages_used == 0
        assert both.computes.exchange.idle
        both.answers.stopped = False
        answers = both.run()
        assert both.answers.exchange.counts == {"error": 1}, "a request for a dropped prompt is answered with an error"
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())


def test_a_parcel_that_nobody_has_read_in_time_fails_its_checksum_or_is_gone() -> None:
    """The lease expires, its buffer space is reused, and the late reader detects it."""
    clock, polls = Clock(), 6
    both = pair(lambda *_: Disturbance(polls=polls), clock)
    try:
        both.send([asked()])
        with torch.inference_mode():
            for _ in range(3):
                both.turn()
            clock.now += sender.LEASE_S + 1
            both.computes.exchange.settled([])
            leaving = both.computes.exchange._ways["memory"].departures
            assert leaving is not None
            assert not leaving.lender.lent
            leaving.space_B.random_(0, 255)  # now holds other jobs' chunks
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


class Three:
    """One prefill worker and two decode workers: the first falls silent, and its job moves to the second."""

    def __init__(self) -> None:
        self.clock, self.boxes = Clock(), dict[str, Box]()
        transport = MemoryTransport(None, self.clock)
        self.computes, self.first, self.second = (
            Side(
                name,
                open_engine(tiny_model(), speculation=BOTH, step_tokens=100),
                [Carrier("memory", transport, HostParcels())],
                self.boxes,
                lends=name == "prefill",
                clock=self.clock,
            )
            for name in ("prefill", "first", "second")
        )

    def send(self, one: Job, to: Side) -> None:
        """Send the job to `to` and to the prefill worker, as a gateway does."""
        self.computes.box.put(Prefill(job=one, to=to.as_other))
        to.box.put(msgspec.structs.replace(one, pages_from=self.computes.as_other))

    def move(self, one: Job) -> Job:
        """Declare the first worker silent, as a gateway does; -> the job under its new name."""
        self.computes.box.put(WorkerDown(worker="first", epoch=1))
        self.first.box.put(Abort(job=one.id))
        moved = msgspec.structs.replace(one, id=JobId(f"{one.id}.1"))
        self.send(moved, self.second)
        return moved

    def run(self, turns: int = 100) -> list[Delta]:
        """The deltas of the second worker, while the first one does not run."""
        told: list[Delta] = []
        for _ in range(turns):
            assert not self.computes.turn()
            told += self.second.turn()
            self.clock.now += 0.01
        return told

    def close(self) -> None:
        for side in (self.computes, self.first, self.second):
            side.exchange.close()
            side.engine.runner.close()


LATE: list[Wire] = [
    Abort(job=JobId("asked")),
    PullRequest(job=JobId("asked"), first=0, way="memory"),
    PullRequest(job=JobId("asked"), first=128, way="memory"),
]


@pytest.mark.parametrize("when", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("late", LATE, ids=["abort", "want all", "want the rest"])
def test_a_late_word_of_a_worker_that_was_silent_changes_nothing_for_the_next(late: Wire, when: int) -> None:
    three = Three()
    try:
        with torch.inference_mode():
            three.send(asked(), three.first)
            three.first.turn()
            three.computes.turn()
            moved = three.move(asked())
            told_ = three.run(when)
            three.computes.box.put(late)
            told_ += three.run()
        assert three.second.exchange.counts == {"taken over": 1}
        assert told(joined(told_)) == alone(moved)
        assert three.computes.engine.planner.load().pages_used == 0
    finally:
        three.close()


@pytest.mark.parametrize("turns", [0, 1, 3, 10])
def test_a_worker_that_was_silent_and_goes_on_disturbs_nobody_whenever_its_job_moved(turns: int) -> None:
    three = Three()
    try:
        with torch.inference_mode():
            three.send(asked(), three.first)
            for _ in range(turns):
                three.computes.turn()
            moved = three.move(asked())
            told_ = three.run(2)
            for _ in range(20):
                three.first.turn()
                told_ += three.run(1)
            told_ += three.run()
        assert told(joined(told_)) == alone(moved)
        for side in (three.computes, three.first, three.second):
            assert side.engine.planner.load().pages_used == 0, side.name
            assert side.engine.planner.idle, side.name
    finally:
        three.close()


def test_a_worker_that_was_only_silent_is_told_what_has_been_dropped() -> None:
    """The decode worker is not declared silent itself, so its jobs are not requeued elsewhere: it computes their
    prompts.
    """
    clock = Clock()
    both = pair(clock=clock)
    try:
        both.send([asked()])
        with torch.inference_mode():
            both.turn()
            both.turn()
            both.computes.box.put(WorkerDown(worker="decode", epoch=1))
            for _ in range(40):
                both.turn()
                clock.now += 0.01
        assert both.answers.exchange.counts == {"error": 1}
        answers = both.run()
        finished(both)
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())


def test_a_prompt_that_is_handed_over_with_a_part_missing_is_computed_here() -> None:
    """The prefill worker's count of chunks is right and all of them arrive, but they do not cover all positions."""
    both = pair()
    try:
        one = asked()
        both.send([one])
        with torch.inference_mode():
            both.turn()
            for _ in range(40):
                both.computes.turn()
                kept = [word for word in both.answers.box.take() if not isinstance(word, ChunkReady) or word.number]
                for word in kept:
                    if isinstance(word, ChunkReady):
                        both.answers.box.put(msgspec.structs.replace(word, number=word.number - 1))
                    elif isinstance(word, PrefillDone):
                        assert word.parcels > 1
                        both.answers.box.put(msgspec.structs.replace(word, parcels=word.parcels - 1))
                    else:
                        both.answers.box.put(word)
                for delta in both.answers.turn():
                    both.deltas[delta.job].append(delta)
        assert both.answers.exchange.counts == {"transfer": 1}
        answer = joined(both.deltas["asked"])
    finally:
        both.close()
    assert told(answer) == alone(one)


def test_a_prompt_that_is_short_once_it_has_begun_long_after_a_silence_is_computed_here_once() -> None:
    clock = Clock()
    both = pair(clock=clock)
    try:
        both.deltas["first"] = []
        both.answers.box.put(asked("first"))
        both.run()
        both.deltas["again"] = []
        both.answers.box.put(msgspec.structs.replace(asked("again"), pages_from=both.computes.as_other))
        with torch.inference_mode():
            both.answers.turn()
            both.answers.exchange.hear(PrefillStarted(job=JobId("again")))
            clock.now += incoming.SILENCE_S + 1  # the process was stopped during its step
            both.computes.stopped = True
        answers = both.run()
        assert both.answers.exchange.counts == {"short": 1}
    finally:
        both.close()
    assert told(answers["again"]) == alone(asked("again"))


def test_who_waits_behind_other_prompts_is_patient_until_its_own_has_begun() -> None:
    clock = Clock()
    both = pair(clock=clock)
    both.computes.stopped = True
    try:
        both.send([asked()])
        with torch.inference_mode():
            both.turn()
            assert both.answers.engine.planner.load().pages_used == 0, "no pages are allocated before they are needed"
            for clock.now in range(600):
                both.answers.box.put(Queued(job=JobId("asked")))
                both.turn()
            assert not both.answers.exchange.counts
            clock.now += incoming.SILENCE_S + 2
            both.turn()
            both.turn()
        assert both.answers.exchange.counts == {"silence": 1}
        both.computes.stopped = False
        answers = both.run()
        finished(both)
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())


def test_where_all_wait_for_pages_of_prompts_that_do_not_come_the_youngest_gives_up_its_own() -> None:
    clock = Clock()
    clock.now = 1.0
    engines = [open_engine(tiny_model(), pages=pages, max_model_len=600, step_tokens=100) for pages in (40, 12)]
    both = Pair(*engines, transport=MemoryTransport(None, clock), clock=clock)
    running = job("runs", prompt(seed=9, length=70), max_tokens=400)
    arriving = [asked(f"{n}", length=190, seed=n) for n in range(3)]
    try:
        both.deltas["runs"] = []
        both.answers.box.put(running)
        with torch.inference_mode():
            both.turn()
            both.turn()
            both.computes.stopped = True
            both.send(arriving)
            for one in arriving:
                both.answers.box.put(PrefillStarted(job=one.id))
            for _ in range(500):
                both.turn()
            assert both.answers.engine.planner.transfers.starved, "the running job was pre-empted, and no job runs"
            clock.now += outgoing.ROOM_S / 2
            both.turn()
            clock.now += outgoing.ROOM_S / 4
            both.turn()
            assert not both.answers.exchange.counts
            clock.now += outgoing.ROOM_S / 2
            both.turn()
            assert both.answers.exchange.counts == {"room": 1}
            assert arriving[2].id not in both.answers.exchange._incoming.prompts, "the newest job must be given up"
            for _ in range(5):
                both.turn()
            assert not both.answers.engine.planner.transfers.starved
        both.computes.stopped = False
        answers = both.run()
        finished(both)
    finally:
        both.close()
    for one in (running, *arriving):
        assert answers[one.id].tokens == run_alone(tiny_model(), one, max_model_len=600).tokens, one.id


def test_parcels_that_wait_when_their_worker_is_gone_are_forgotten_with_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent to a closed socket."""
    clock = Clock()
    monkeypatch.setattr(HostParcels, "sizes", HostParcels.sizes._replace(landing=256 << 10))
    both = pair(lambda *_: Disturbance(polls=10), clock=clock)
    computes, answers = both.computes, both.answers
    sent = received = 0

    class Counted(SocketOutbox):
        def put(self, message: Wire) -> None:
            nonlocal sent
            super().put(message)
            sent += 1

    answers.exchange._connections.outbox_of = lambda name: Counted(ipc_address(tmp_path / "run", name))
    try:
        with SocketInbox(ipc_address(tmp_path / "run", "prefill")) as inbox, torch.inference_mode():
            both.send([asked(), asked("other", seed=2)])
            for _ in range(12):
                while received < sent:
                    came = inbox.drain(wait=True, timeout=LIMIT_S)
                    assert came, "a sent message did not arrive"
                    received += len(came)
                    for message in came:
                        computes.box.put(message)
                both.turn()
                if answers.exchange._incoming.offers:
                    break
            assert answers.exchange._incoming.offers, "one chunk is being read, and others wait"
            both.stop_computing()
            result = both.run()
    finally:
        both.close()
    for one in (asked(), asked("other", seed=2)):
        assert told(result[one.id]) == alone(one)


def test_a_worker_to_which_no_connection_can_be_made_is_not_waited_for() -> None:
    def refuse(_: str) -> Outbox:
        raise ConfigError("no more sockets")

    both = pair()
    both.answers.exchange._connections.outbox_of = refuse
    both.computes.stopped = True
    try:
        answers = both.run([asked()])
        assert both.answers.exchange.counts == {"no connection": 1}
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())


@pytest.mark.parametrize("seed", range(6))
def test_anything_may_happen_at_any_time(seed: int) -> None:
    """Reads that fail, are torn, stall or change a byte; timeouts; clients that leave; a worker that ends."""
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


def test_several_parcels_are_on_their_way_at_once() -> None:
    both, most = pair(lambda *_: Disturbance(polls=4)), 0
    try:
        both.send([asked(), asked("other", seed=2)])
        with torch.inference_mode():
            for _ in range(40):
                both.turn()
                most = max(most, len(both.answers.exchange._ways["memory"].arrivals.under_way))
        answers = both.run()
        finished(both)
    finally:
        both.close()
    assert most > 1
    assert told(answers["asked"]) == alone(asked())


def test_beside_an_answer_parcels_come_as_its_steps_leave_time_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 10 ms, each MiB of a KV chunk a second, and the share for chunks is a tenth of the time."""
    clock = Clock()
    both = pair(clock=clock)
    running = job("running", prompt(seed=3, length=20), max_tokens=400)
    answers, places, took = both.answers, list[float](), list[float]()
    scatter = answers.exchange._parcels.scatter

    def slow(piece: Piece, pages: Sequence[int], from_B: torch.Tensor) -> None:
        took.append(len(from_B) / 2**20)
        clock.now += took[-1]
        places.append(clock.now)
        scatter(piece, pages, from_B)

    monkeypatch.setattr(answers.exchange._parcels, "scatter", slow)
    both.deltas["running"] = []
    try:
        with torch.inference_mode():
            answers.box.put(running)
            both.turn()
            both.send([asked(), asked("other", seed=2)])
            while answers.exchange.counts["taken over"] < 2:
                assert not answers.engine.planner.idle, (
                    "the answer ended before the transfers, so the test shows nothing"
                )
                both.turn()
                clock.now += 0.01
        result = both.run()
    finally:
        both.close()
    assert len(places) > 3
    assert 0.05 < sum(took[1:]) / (places[-1] - places[0]) < 0.11, "the first chunk's time cannot be predicted"
    assert told(result["asked"]) == alone(asked())


def test_a_connection_that_has_failed_is_made_anew_for_the_next_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NIXL, a connection that has failed once fails for ever."""
    reads = itertools.count()
    both = pair(lambda *_: Disturbance(failing=True) if next(reads) == 0 else None)
    connect, made = both.transport.connect, list[object]()

    def connected(area: bytes) -> object:
        made.append(area)
        return connect(area)

    monkeypatch.setattr(both.transport, "connect", connected)
    try:
        first, second = both.run([asked()]), both.run([asked("other", seed=2)])
        assert both.answers.exchange.counts == {"transfer": 1, "taken over": 1}
        assert len(made) == 2
        finished(both)
    finally:
        both.close()
    assert told(first["asked"]) == alone(asked())
    assert told(second["other"]) == alone(asked("other", seed=2))


def test_a_wish_that_was_lost_is_said_again() -> None:
    clock = Clock()
    both = pair(clock=clock)
    try:
        both.send([asked()])
        with torch.inference_mode():
            lost: list[Wire] = []
            while not lost:
                both.turn()
                for message in both.computes.box.take():
                    if isinstance(message, PullRequest):
                        lost.append(message)
                    else:
                        both.computes.box.put(message)
        clock.now += outgoing.WORD_S
        answers = both.run()
        assert both.answers.exchange.counts == {"taken over": 1}
        finished(both)
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())


def test_where_messages_were_lost_nothing_goes_on_that_was_under_way() -> None:
    both = pair()
    try:
        both.send([asked()])
        with torch.inference_mode():
            for _ in range(3):
                both.turn()
            for side in (both.answers, both.computes):
                side.exchange.abort_all()
                side.engine.planner.abort_all()
        both.deltas.clear()
        both.run()
        for side in (both.answers, both.computes):
            assert side.idle
            assert side.engine.planner.load().pages_used == 0
        finished(both)
    finally:
        both.close()


@pytest.mark.parametrize("layered", [False, True], ids=["step by step", "layer by layer"])
def test_a_prompt_that_loses_its_pages_while_its_parcels_wait_for_room_leaves_once_it_is_computed_again(
    layered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older answer of the prefill worker takes one more page. The contents of the freed pages must not be sent."""
    computes = open_engine(tiny_model(), step_tokens=4, pages=11, max_running=2, max_model_len=512)
    answers = open_engine(tiny_model(), step_tokens=100)
    page_B = computes.runner.kv.planes[0, 0].nbytes
    monkeypatch.setattr(HostParcels, "sizes", HostParcels.sizes._replace(parcel=page_B, area=4 * page_B))
    both, one = Pair(computes, answers, layered=layered), asked(length=330)
    planner, given = computes.planner, list[Delta]()
    try:
        with torch.inference_mode():
            planner.submit(job("older", prompt(seed=9, length=180), max_tokens=160))
            for _ in range(90):
                both.computes.turn()
            both.send([one])
            waits: list[bool] = []  # whether the transfer waited for buffer space, at each pre-emption
            for turn in range(1000):
                both.computes.turn()
                if turn < 4 or waits:  # the decode worker pauses until the pre-emption has happened
                    given += both.answers.turn()
                if planner.load().preemptions > len(waits):
                    waits += [out.piece is not None for out in both.computes.exchange._outgoing.prompts.values()]
                if both.answers.exchange.counts["taken over"] and both.answers.idle and both.computes.idle:
                    break
        assert waits == [True]
        finished(both)
    finally:
        both.close()
    assert told(joined(given)) == alone(one)
