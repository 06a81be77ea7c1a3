"""Several replicas of the API share one worker: which messages each replica gets, and what happens to the jobs of a
replica that ends.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest

from redline.messages.channel import MemoryChannel
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.handoff import Prefill
from redline.messages.job import Job, JobId, PagesFrom
from redline.messages.news import Cached, Heartbeat, Load, Missed, Ping, Ready, Stop
from redline.messages.replicas import Replica, Replicas
from redline.messages.step import Step
from redline.scheduler.config import PlanConfig
from redline.scheduler.planner import Planner
from redline.worker.cache_reports import CacheReports
from redline.worker.delta_router import DeltaRouter
from redline.worker.heartbeat import LoopStatus, LoopWatchdog
from redline.worker.loop import lead
from redline.worker.service import Service
from redline.worker.trace import Trace
from tests.fakes import FakePending, FakeRunner, hash_page, make_job, whole_answer
from tests.waiting import LIMIT_S, until

CONFIG = PlanConfig(max_running=4)
HELD_AT = 6  # number of a step in which the answers of a few jobs are being generated
MAX_MODEL_LEN = 400
PROMPT = tuple(range(70))
READY = Ready(max_model_len=MAX_MODEL_LEN, pages=32, fingerprint="tiny", summary="a fake")


def replicas(*names: str) -> Replicas:
    return Replicas(replicas=tuple(Replica(name=name, writer=name.encode(), inbox=name) for name in names))


def job_of(replica: str, id: str, tokens: int = 20) -> Job:
    return msgspec.structs.replace(make_job(id, PROMPT, max_tokens=tokens, seed=crc32(id.encode())), replica=replica)


class Held(FakeRunner):
    """Launches step HELD_AT only once a test has set `go`, so that messages arrive in the middle of an answer."""

    def __init__(self) -> None:
        super().__init__(32, CONFIG)
        self.go = threading.Event()

    def launch(self, step: Step) -> FakePending:
        if step.number == HELD_AT:
            assert self.go.wait(LIMIT_S), "the test did not release the step"
        return super().launch(step)


class Worker:
    """A loop in its own thread; the messages sent to each replica, by its name. said: messages in its inbox at the
    start.
    """

    def __init__(self, runner: FakeRunner, said: Sequence[Wire] = (), services: Sequence[Service] = ()) -> None:
        self.runner = runner
        self.inbox = MemoryChannel()
        for message in said:
            self.inbox.put(message)
        # created here, because both threads look them up
        self.channels = {name: MemoryChannel() for name in ("", "a", "b")}
        self.told: defaultdict[str, list[Wire]] = defaultdict(list)
        self.planner = Planner(32, CONFIG, MAX_MODEL_LEN, hash_page)
        self.pulse = LoopStatus()
        hearers = DeltaRouter(self.channels[""], lambda address: self.channels[address])
        hearers.put(READY)
        arguments = [self.planner, runner, self.inbox, hearers, [*services, CacheReports(self.planner, hearers)]]
        self.thread = threading.Thread(target=lead, args=arguments, kwargs={"pulse": self.pulse, "record": False})
        self.thread.start()

    def of(self, name: str, kind: type[Any]) -> list[Any]:
        """The messages of one kind that a replica has received."""
        self.told[name] += self.channels[name].drain(wait=False)
        return [message for message in self.told[name] if isinstance(message, kind)]

    def answer(self, name: str, id: str) -> tuple[int, ...]:
        """The whole answer, from the deltas that a replica received."""
        until(lambda: any(delta.job == id and delta.finish for delta in self.of(name, Delta)))
        return tuple(token for delta in self.of(name, Delta) if delta.job == id for token in delta.tokens)


@contextmanager
def worker(said: Sequence[Wire] = (), services: Sequence[Service] = ()) -> Iterator[Worker]:
    with ended(Worker(FakeRunner(32, CONFIG), said, services)) as it:
        yield it


@contextmanager
def held_worker(*said: Wire, trace: Trace | None = None) -> Iterator[Worker]:
    """Messages sent inside this context arrive while the jobs in `said` are being answered; the answers continue after
    it.
    """
    runner = Held()
    with ended(Worker(runner, said, [] if trace is None else [trace])) as it:
        try:
            yield it
        finally:
            runner.go.set()


@contextmanager
def ended(it: Worker) -> Iterator[Worker]:
    try:
        yield it
    finally:
        it.inbox.put(Stop())
        it.thread.join(LIMIT_S)
        assert not it.thread.is_alive(), "the loop did not end"


def test_what_comes_of_a_job_is_told_to_whoever_sent_it_and_all_else_to_everybody() -> None:
    with worker() as it:
        it.inbox.put(replicas("a", "b"))
        jobs = {name: job_of(name, "job" + name * place) for place, name in enumerate(("", "a", "b"))}
        for job in jobs.values():
            it.inbox.put(job)
        for name, job in jobs.items():
            assert it.answer(name, job.id) == whole_answer(job, MAX_MODEL_LEN)
        for name, job in jobs.items():
            assert {delta.job for delta in it.of(name, Delta)} == {job.id}
            until(lambda name=name: it.of(name, Load) and it.of(name, Cached))
        assert it.of("a", Ready) == it.of("b", Ready) == [READY]


def test_a_replica_that_comes_later_is_told_what_the_others_know() -> None:
    with worker() as it:
        it.inbox.put(replicas("a"))
        it.inbox.put(job_of("a", "first"))
        it.answer("a", "first")
        until(lambda: it.of("a", Load))
        it.inbox.put(replicas("a", "b"))
        until(lambda: it.of("b", Cached))
        assert it.of("b", Ready) == [READY]
        (whole,) = it.of("b", Cached)
        assert whole.whole
        assert whole.stored, "the first job's page must be published"
        until(lambda: it.of("a", Cached)[-1] == whole)


def test_the_jobs_of_a_replica_that_has_ended_end_without_a_word_and_no_others() -> None:
    kept = job_of("b", "kept", 200)
    with held_worker(replicas("a", "b"), job_of("a", "loses", 300), kept) as it:
        until(lambda: it.of("a", Delta) and it.of("b", Delta))
        it.inbox.put(replicas("b"))
        it.inbox.put(job_of("a", "under way still", 300))  # it was sent before its replica ended
        it.runner.go.set()
        assert it.answer("b", "kept") == whole_answer(kept, MAX_MODEL_LEN)
        until(lambda: it.planner.idle)
        assert not [delta for delta in it.of("a", Delta) if delta.finish]
        load = it.planner.load()
        assert (load.running, load.waiting, load.pages_used) == (0, 0, 0)
        it.planner.check()


def test_what_is_lost_of_one_replica_s_messages_costs_the_others_nothing() -> None:
    kept = job_of("b", "kept", 200)
    with held_worker(replicas("a", "b"), job_of("a", "of a", 300), kept) as it:
        until(lambda: it.of("a", Delta) and it.of("b", Delta))
        it.inbox.put(lost := Missed(messages=2, writer=b"a"))
        it.runner.go.set()
        until(lambda: it.of("a", Missed) == [lost])
        assert it.answer("b", "kept") == whole_answer(kept, MAX_MODEL_LEN)
        assert it.of("b", Missed) == it.of("", Missed) == []
        assert not [delta for delta in it.of("a", Delta) if delta.finish]
        until(lambda: it.planner.idle)


@pytest.mark.parametrize(
    "end", [replicas("b"), Missed(messages=1, writer=b"a"), Missed(messages=1, writer=b"another")], ids=str
)
def test_the_trace_has_a_line_of_each_job_that_ends_without_a_word(tmp_path: Path, end: Wire) -> None:
    trace = Trace(tmp_path / "trace")
    with held_worker(replicas("a", "b"), job_of("a", "of a", 300), trace=trace) as it:
        until(lambda: it.of("a", Delta))
        it.inbox.put(end)
        it.runner.go.set()
        until(lambda: trace._stories == {})
        until(lambda: it.planner.idle)
        (line,) = (json.loads(line) for line in (tmp_path / "trace").read_text().splitlines())
        assert (line["id"], line["finish"], line["prompt"]) == ("of a", "aborted", len(PROMPT))
    trace.close()


def test_where_it_is_another_worker_s_words_that_were_lost_all_are_told() -> None:
    with held_worker(replicas("a", "b"), job_of("a", "of a", 300)) as it:
        until(lambda: it.of("a", Delta))
        it.inbox.put(lost := Missed(messages=1, writer=b"another"))
        it.runner.go.set()
        until(lambda: it.of("a", Missed) == it.of("b", Missed) == it.of("", Missed) == [lost])
        until(lambda: it.planner.idle)


def test_knocks_are_counted_by_who_knocks() -> None:
    with worker() as it:
        it.inbox.put(replicas("a", "b"))
        for number, replica in ((1, "a"), (1, "b"), (2, "a"), (7, "")):
            it.inbox.put(Ping(number=number, replica=replica))
        until(lambda: it.of("", Ping))
        assert [knock.number for knock in it.of("a", Ping)] == [1, 2]
        assert [knock.number for knock in it.of("b", Ping)] == [1]
        heart = LoopWatchdog(it.pulse, it.channels[""], 64, pytest.fail)
        heart._hearers = DeltaRouter(it.channels[""], lambda address: it.channels[address])
        heart.beat()
        assert [it.of(name, Heartbeat)[-1].knock for name in ("a", "b", "")] == [2, 1, 7]
        it.inbox.put(replicas("b"))
        until(lambda: len(it.pulse.replicas) == 1)
        heart.beat()
        assert [len(it.of(name, Heartbeat)) for name in ("a", "b", "")] == [1, 2, 2]


def test_prompts_that_are_computed_for_the_jobs_of_a_replica_that_has_ended_are_given_up() -> None:
    asked: list[str] = []
    given_up: list[str] = []
    out = {JobId("out"): job_of("a", "out")}

    class Prefills(Service):
        def hear(self, message: Wire) -> list[Delta] | None:
            if not isinstance(message, Prefill):
                return None
            asked.append(message.job.id)
            return []

        def jobs_of(self, replica: str) -> list[JobId]:
            return [id for id, job in out.items() if job.replica == replica]

        def abort(self, id: JobId) -> None:
            given_up.append(id)

    other = PagesFrom(worker="decode", epoch=1, inbox="")
    with worker(services=[Prefills()]) as it:
        it.inbox.put(replicas("a", "b"))
        it.inbox.put(Prefill(job=job_of("a", "out"), to=other))
        it.inbox.put(replicas("b"))
        it.inbox.put(Prefill(job=job_of("a", "too late"), to=other))
        it.inbox.put(job_of("b", "next", 3))
        it.answer("b", "next")
        assert asked == ["out"]
        assert given_up == ["out"]
