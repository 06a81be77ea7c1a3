"""The worker's loop: it launches ahead, survives errors, publishes changes, and shuts down cleanly."""

import itertools
import json
import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from redline import clock
from redline.errors import MessageTooLarge, WorkerLost
from redline.kernels.cuda.driver import CudaError
from redline.messages.channel import MemoryChannel
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.handoff import ChunkAck, PullRequest, WorkerDown
from redline.messages.job import Abort, Grammar, Job, JobId
from redline.messages.news import Load, Missed, Ping, Stop
from redline.messages.step import Shape, Step, StepResult
from redline.run.layer_marks import Meanwhile
from redline.scheduler.config import PlanConfig
from redline.scheduler.planner import Planner
from redline.worker import loop
from redline.worker.heartbeat import LoopStatus
from redline.worker.loop import COMPILES_S, lead
from redline.worker.service import Service
from redline.worker.trace import Trace
from redline.worker.turn import StepInFlight, turn
from tests.clocks import FakeClock
from tests.fakes import FakePending, FakeRunner, Rests, Steady, hash_page, make_job, whole_answer
from tests.waiting import LIMIT_S, until

MAX_MODEL_LEN = 400
CONFIG = PlanConfig(max_running=4)
PROMPT = tuple(range(70))


class Worker:
    """A loop in its own thread, with access to both channels. said: messages in its inbox at the start."""

    def __init__(self, runner: FakeRunner, outbox: MemoryChannel | None = None, said: Sequence[Wire] = ()) -> None:
        self.inbox, self.outbox = MemoryChannel(), outbox or MemoryChannel()
        for message in said:
            self.inbox.put(message)
        self.planner = Planner(32, CONFIG, MAX_MODEL_LEN, hash_page)
        self.thread = threading.Thread(target=lead, args=[self.planner, runner, self.inbox, self.outbox])
        self.thread.start()
        self.messages: list[Delta | Load] = []

    def deltas(self, id: str) -> list[Delta]:
        """The job's deltas; waits for its end."""
        while True:
            found = [message for message in self.messages if isinstance(message, Delta) and message.job == id]
            if found and found[-1].finish:
                return found
            more = self.outbox.drain(wait=True, timeout=LIMIT_S)
            assert more, f"{id} did not end"
            self.messages += more

    def answer(self, id: str) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas(id) for token in delta.tokens)

    def loads(self) -> list[Load]:
        return [message for message in self.messages if isinstance(message, Load)]


@contextmanager
def worker(
    runner: FakeRunner | None = None, outbox: MemoryChannel | None = None, said: Sequence[Wire] = ()
) -> Iterator[Worker]:
    it = Worker(runner or FakeRunner(32, CONFIG), outbox, said)
    try:
        yield it
    finally:
        it.inbox.put(Stop())
        it.thread.join(LIMIT_S)
        it.messages += it.outbox.drain(wait=False)
        assert not it.thread.is_alive(), "the loop did not end"


def test_a_job_is_answered():
    job = make_job("a", PROMPT, max_tokens=20)
    with worker() as it:
        it.inbox.put(job)
        assert it.answer("a") == whole_answer(job, MAX_MODEL_LEN)


def test_a_loop_that_has_nothing_but_grammars_to_wait_for_rests_and_goes_on_once_one_is_compiled():
    compiled, asked = threading.Event(), []
    job = make_job("a", PROMPT, max_tokens=20, grammar=Grammar(text="slow"))
    planner = Planner(32, CONFIG, MAX_MODEL_LEN, hash_page)
    planner.compile_with(lambda grammar: lambda: asked.append(grammar.text) or compiled.is_set())
    rests: list[float | None] = []

    class Inbox(MemoryChannel):
        def drain(self, *, wait: bool, timeout: float | None = None) -> list[Wire]:
            if wait and asked:
                rests.append(timeout)
                if len(rests) == 5:
                    compiled.set()
                return []
            return super().drain(wait=wait, timeout=timeout)

    inbox, outbox = Inbox(), MemoryChannel()
    inbox.put(job)
    thread = threading.Thread(target=lead, args=[planner, FakeRunner(32, CONFIG), inbox, outbox])
    thread.start()
    found: list[Delta] = []
    while not (found and found[-1].finish):
        found += [message for message in outbox.drain(wait=True, timeout=LIMIT_S) if isinstance(message, Delta)]
    inbox.put(Stop())
    thread.join(LIMIT_S)
    assert tuple(token for delta in found for token in delta.tokens) == whole_answer(job, MAX_MODEL_LEN)
    assert rests[:5] == [COMPILES_S] * 5
    assert len(asked) < 20, "the load is computed once per poll"


def test_the_next_step_is_launched_before_the_last_is_settled():
    events: list[str] = []

    class Watched(FakeRunner):
        def launch(self, step: Step) -> FakePending:
            events.append(f"launch {step.number}")
            pending = super().launch(step)

            class Pending(FakePending):
                def wait(self) -> StepResult:
                    events.append(f"wait {step.number}")
                    return self.result

            return Pending(pending.result)

    planner = Planner(32, CONFIG, MAX_MODEL_LEN, hash_page)
    planner.submit(make_job("a", PROMPT, max_tokens=3))
    runner, last = Watched(32, CONFIG), None
    for _ in range(4):
        last, _ = turn(planner, runner, last)
    assert events == ["launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"]
    assert last is None
    assert planner.idle


def test_where_nothing_is_planned_ahead_a_turn_settles_the_step_that_it_launched():
    config = replace(CONFIG, ahead=0)
    planner = Planner(32, config, MAX_MODEL_LEN, hash_page)
    planner.submit(make_job("a", PROMPT, max_tokens=3))
    runner = FakeRunner(32, config)
    deltas: list[Delta] = []
    for _ in range(3):
        last, new = turn(planner, runner, None)
        assert last is None
        assert [len(delta.tokens) for delta in new] == [1]
        deltas += new
    assert planner.idle
    assert deltas[-1].finish == "length"
    assert turn(planner, runner, None) == (None, [])


class Watched(FakeRunner):
    """Its steps can be watched: nine layers each, one layer per poll."""

    def launch(self, step: Step) -> FakePending:
        class Pending(FakePending):
            def watch(self, meanwhile: Meanwhile) -> None:
                for layers in range(1, 10):
                    meanwhile(layers)

        return Pending(super().launch(step).result)


class Departing(Service):
    """Replaces a worker's KV transfers: the prompt of one job is sent while it is computed, and the messages in `said`
    are put into the inbox after the third layer.
    """

    def __init__(self, planner: Planner, inbox: MemoryChannel, job: JobId, said: Sequence[Wire]) -> None:
        self._planner, self._inbox, self._job, self._said = planner, inbox, job, said
        self.done: list[int | str] = []

    @property
    def leaves(self) -> bool:
        return self._planner.transfers.computing(self._job) is not None

    def depart(self, layers: int) -> None:
        self.done.append(layers)
        if layers == 3:
            for message in self._said:
                self._inbox.put(message)

    def hear(self, message: Wire) -> list[Delta] | None:
        if isinstance(message, Job):
            return None
        self.done.append(type(message).__name__)
        return []

    def abort(self, id: JobId) -> None:
        self.done.append(f"abort {id}")


def test_readers_are_heard_while_a_step_is_watched_and_all_others_behind_it() -> None:
    planner, inbox, outbox = Planner(32, CONFIG, MAX_MODEL_LEN, hash_page), MemoryChannel(), MemoryChannel()
    first, second = make_job("first", PROMPT, max_tokens=3), make_job("second", PROMPT, max_tokens=2, seed=2)
    taken, gone = ChunkAck(id=1, epoch=1), WorkerDown(worker="other", epoch=1)
    said = [
        gone,
        taken,
        PullRequest(job=JobId("first"), first=0, way="peer"),
        second,
        Abort(job=JobId("nobody")),
        Stop(),
    ]
    departing = Departing(planner, inbox, JobId("first"), said)
    inbox.put(first)
    lead(planner, Watched(32, CONFIG), inbox, outbox, [departing])
    assert departing.done[:5] == [1, 2, 3, "ChunkAck", "PullRequest"]
    assert departing.done[5:] == [4, 5, 6, 7, 8, 9, "WorkerDown", "abort nobody"], "decode steps must not be watched"
    ended = {message.job for message in outbox.drain(wait=False) if isinstance(message, Delta) and message.finish}
    assert ended == {"first", "second"}, "the job that arrived during the step must be accepted before the end"


def test_an_abort_ends_a_job_and_the_loop_goes_on():
    with worker(said=[make_job("a", PROMPT, max_tokens=300), Abort(job=JobId("a")), Abort(job=JobId("nobody"))]) as it:
        assert it.deltas("a")[-1].finish == "aborted"
        it.inbox.put(make_job("b", PROMPT, max_tokens=2))
        assert it.deltas("b")[-1].finish == "length"


def test_a_delta_that_is_too_large_to_travel_ends_its_job_and_the_loop_goes_on():
    class Narrow(MemoryChannel):
        def put(self, message: Wire) -> None:
            if isinstance(message, Delta) and message.job == "large" and len(message.tokens):
                raise MessageTooLarge("too many bytes")
            super().put(message)

    with worker(outbox=Narrow()) as it:
        it.inbox.put(make_job("large", PROMPT, max_tokens=300))
        it.inbox.put(make_job("small", PROMPT, max_tokens=20))
        (told,) = it.deltas("large")
        assert (told.finish, told.error, told.fault) == ("error", "too many bytes", "failed")
        assert it.deltas("small")[-1].finish == "length"
    assert it.planner.load().pages_used == 0


def test_stop_ends_what_runs_and_gives_back_every_page():
    jobs = [make_job(name, PROMPT, max_tokens=300, seed=seed) for seed, name in enumerate("abcdef")]
    with worker(said=[*jobs, Stop()]) as it:
        it.thread.join(LIMIT_S)
        assert [it.deltas(name)[-1].finish for name in "abcdef"] == ["aborted"] * 6
    assert it.planner.idle
    it.planner.check()
    assert it.loads()[-1].pages_used == 0


def test_a_job_that_breaks_the_planner_ends_alone(monkeypatch: pytest.MonkeyPatch):
    submit = Planner.submit

    def fragile(self: Planner, job: Job) -> list[Delta]:
        if job.id == "bad":
            raise ValueError("too strange")
        return submit(self, job)

    monkeypatch.setattr(Planner, "submit", fragile)
    with worker() as it:
        it.inbox.put(make_job("good", PROMPT, max_tokens=30))
        it.inbox.put(make_job("bad", PROMPT))
        (delta,) = it.deltas("bad")
        assert delta.finish == "error"
        assert "too strange" in delta.error
        assert it.deltas("good")[-1].finish == "length"


@pytest.mark.parametrize("moment", ["launch", "wait"])
def test_a_step_that_fails_ends_its_jobs_and_no_others(moment: str):
    class Fragile(FakeRunner):
        """Its second step fails; the device state of the jobs of a failed step is not used again."""

        broken = False

        def launch(self, step: Step) -> FakePending:
            pending = super().launch(step)
            if step.number != 2:
                return pending
            if moment == "launch":
                raise RuntimeError("out of memory")

            class Pending(FakePending):
                def wait(self) -> StepResult:
                    raise RuntimeError("out of memory")

            return Pending(pending.result)

    with worker(Fragile(32, CONFIG)) as it:
        it.inbox.put(make_job("a", PROMPT, max_tokens=30))
        last = it.deltas("a")[-1]
        assert (last.finish, "out of memory" in last.error) == ("error", True)
        job = make_job("b", PROMPT, max_tokens=30)
        it.inbox.put(job)
        assert it.answer("b") == whole_answer(job, MAX_MODEL_LEN)
        assert it.deltas("b")[-1].finish == "length"


def test_a_failed_launch_is_settled_in_its_turn():
    """The step before it is still in flight, and its tokens are published first."""

    class Fragile(FakeRunner):
        def launch(self, step: Step) -> FakePending:
            if step.number == 2:
                raise RuntimeError("no")
            return super().launch(step)

    planner = Planner(32, CONFIG, MAX_MODEL_LEN, hash_page)
    planner.submit(make_job("a", PROMPT, max_tokens=3))
    runner = Fragile(32, CONFIG)
    first, _ = turn(planner, runner, None)
    second, deltas = turn(planner, runner, first)
    assert isinstance(second, StepInFlight)
    assert [len(delta.tokens) for delta in deltas] == [1]
    _last, deltas = turn(planner, runner, second)
    assert [delta.finish for delta in deltas] == ["error"]


class Failing(FakeRunner):
    """A runner on which the steps with the given numbers fail."""

    def __init__(self, config: PlanConfig, steps: Container[int], error: Exception) -> None:
        super().__init__(32, config)
        self._failing = steps
        self._error = error

    def launch(self, step: Step) -> FakePending:
        pending = super().launch(step)
        if step.number not in self._failing:
            return pending
        error = self._error

        class Pending(FakePending):
            def wait(self) -> StepResult:
                raise error

        return Pending(pending.result)


def ends(jobs: int, failing: Container[int], error: Exception) -> tuple[str, list[Delta]]:
    """The error that ends a loop which runs one job at a time, and the deltas that it sent."""
    config = replace(CONFIG, max_running=1)
    inbox, outbox = MemoryChannel(), MemoryChannel()
    for n in range(jobs):
        inbox.put(make_job(f"{n}", PROMPT, max_tokens=1, seed=n))
    planner = Planner(32, config, MAX_MODEL_LEN, hash_page)
    with pytest.raises(WorkerLost) as caught:
        lead(planner, Failing(config, failing, error), inbox, outbox)
    return str(caught.value), [message for message in outbox.drain(wait=False) if isinstance(message, Delta)]


def test_three_failed_steps_in_a_row_end_the_worker_which_tells_every_job():
    why, deltas = ends(6, range(3, 100), RuntimeError("out of luck\nat line 3"))
    assert why == "3 steps in a row failed, the last one with RuntimeError: out of luck"
    assert {delta.job: delta.fault for delta in deltas} == {
        **dict.fromkeys("01"), **dict.fromkeys("23", "failed"), **dict.fromkeys("45", "lost")
    }  # fmt: skip
    assert all(delta.error == why for delta in deltas[-2:])


def test_two_failed_steps_and_one_that_runs_are_no_end():
    failing = [step for step in range(40) if step % 3]
    with worker(Failing(replace(CONFIG, max_running=4), failing, RuntimeError("out of luck"))) as it:
        for n in range(12):
            it.inbox.put(make_job(f"{n}", PROMPT, max_tokens=1, seed=n))
            it.deltas(f"{n}")
        job = make_job("last", PROMPT, max_tokens=1)
        it.inbox.put(job)
        assert it.deltas("last")[-1].finish in ("length", "error")
        assert sum(it.deltas(f"{n}")[-1].finish == "length" for n in range(12)) == 4


def caused() -> RuntimeError:
    error = RuntimeError("a row could not be drawn")
    error.__cause__ = CudaError("CUDA driver error 719: unspecified launch failure")
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        CudaError("CUDA driver error 700: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        caused(),
    ],
    ids=repr,
)
def test_one_device_error_ends_the_worker(error: Exception):
    why, deltas = ends(3, [2], error)
    assert why.startswith("device error: ")
    assert "\n" not in why
    assert [(delta.job, delta.fault) for delta in deltas] == [("0", None), ("1", "lost"), ("2", "lost")]


def test_too_little_memory_is_a_failed_step_and_no_device_error():
    why, deltas = ends(4, range(2, 100), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert why.startswith("3 steps in a row failed")
    assert [delta.fault for delta in deltas] == [None, "failed", "failed", "lost"]


def test_jobs_that_a_failed_launch_never_began_get_no_rows_in_the_next_step():
    """The device would use another job's slot."""

    class Fragile(FakeRunner):
        def launch(self, step: Step) -> FakePending:
            assert all(row.slot in self.slots or row.slot in {begin.slot for begin in step.begins} for row in step.rows)
            if step.number == 1:
                self.steps = 1
                raise RuntimeError("no")
            return super().launch(step)

    planner = Planner(32, CONFIG, MAX_MODEL_LEN, hash_page)
    planner.submit(make_job("a", PROMPT, max_tokens=3))
    runner = Fragile(32, CONFIG)
    last, deltas = None, []
    for _ in range(3):
        last, told = turn(planner, runner, last)
        deltas += told
    assert [(delta.finish, delta.error) for delta in deltas] == [("error", "the step could not be launched: no")]
    assert planner.idle


def test_a_steps_time_begins_when_the_one_before_has_ended(monkeypatch: pytest.MonkeyPatch):
    """Steps are launched ahead; the time in the device's queue is not part of a step's time."""
    now = itertools.count()
    told: list[float | None] = []
    settle = Planner.settle

    def listen(self: Planner, step: Step, result: StepResult, seconds: float | None = None) -> list[Delta]:
        told.append(seconds)
        return settle(self, step, result, seconds)

    monkeypatch.setattr(clock, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(Planner, "settle", listen)
    planner = Planner(32, CONFIG, MAX_MODEL_LEN, hash_page)
    planner.submit(make_job("a", PROMPT, max_tokens=3))
    runner, last = FakeRunner(32, CONFIG), None
    for _ in range(4):
        last, _ = turn(planner, runner, last)
    # launch 0, launch 1, end 2, launch 3, end 4, end 5
    assert told == [2.0, 2.0, 1.0]


def test_the_time_of_a_failed_step_is_not_told(monkeypatch: pytest.MonkeyPatch):
    class Fragile(FakeRunner):
        def launch(self, step: Step) -> FakePending:
            raise RuntimeError("no")

    planner = Planner(32, CONFIG, MAX_MODEL_LEN, hash_page)
    monkeypatch.setattr(planner._speculation, "took", None)  # calling it would fail
    planner.submit(make_job("a", PROMPT, max_tokens=3))
    last, _ = turn(planner, Fragile(32, CONFIG), None)
    _, (delta,) = turn(planner, Fragile(32, CONFIG), last)
    assert delta.error == "the step could not be launched: no"


def test_a_trace_has_a_line_for_each_job_that_ended(tmp_path: Path):
    config = PlanConfig(max_running=4, draft_tokens=3, learned=True)
    trace = Trace(tmp_path / "trace.jsonl")
    jobs = [make_job(name, PROMPT, max_tokens=40, seed=seed) for seed, name in enumerate("abc")]
    inbox, outbox = MemoryChannel(), MemoryChannel()
    for job in jobs:
        inbox.put(job)
    planner = Planner(32, config, MAX_MODEL_LEN, hash_page)
    thread = threading.Thread(target=lead, args=[planner, FakeRunner(32, config), inbox, outbox, [trace]])
    thread.start()
    ended = 0
    while ended < 3:
        ended += sum(1 for message in outbox.drain(wait=True) if isinstance(message, Delta) and message.finish)
    inbox.put(Stop())
    thread.join(LIMIT_S)
    lines = {line["id"]: line for line in map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines())}
    assert set(lines) == set("abc")
    for job in jobs:
        line = lines[job.id]
        assert tuple(line["tokens"]) == PROMPT + whole_answer(job, MAX_MODEL_LEN)
        assert (line["prompt"], line["finish"]) == (len(PROMPT), "length")
        rounds = line["rounds"]
        assert all(0 <= accepted <= proposed <= 3 for _, proposed, accepted in rounds)
        assert [position for position, _, _ in rounds] == sorted({position for position, _, _ in rounds})
    load = planner.load()
    assert sum(accepted for line in lines.values() for _, _, accepted in line["rounds"]) == load.accepted_tokens > 0
    trace.close()


def test_loads_are_sent_when_something_changed_and_not_too_often():
    clock = FakeClock()
    told: list[tuple[float, Load]] = []

    class Heard(MemoryChannel):
        def put(self, message: Wire) -> None:
            if isinstance(message, Load):
                told.append((clock.now, message))

    runner = Steady(32, CONFIG, clock, step_s=0.01)
    jobs = [make_job(name, PROMPT, max_tokens=100, seed=seed) for seed, name in enumerate("abc")]
    with clock.installed():
        began = clock.now
        inbox = Rests(clock, jobs, then=[Ping(number=1)])
        lead(Planner(32, CONFIG, MAX_MODEL_LEN, hash_page), runner, inbox, Heard())
    times, loads = [at for at, _ in told], [load for _, load in told]
    assert (loads[-1].running, loads[-1].generation_tokens) == (0, 300), "an idle worker must publish its last change"
    assert len(loads) > 3, "loads must be published while the worker runs"
    assert all(before != after for before, after in itertools.pairwise(loads)), (
        "an unchanged load must not be published"
    )
    assert all(after - before >= loop.LOAD_INTERVAL_S - 1e-9 for before, after in itertools.pairwise(times))
    assert max(after - before for before, after in itertools.pairwise([began, *times])) < loop.LOAD_INTERVAL_S + 0.02


def test_a_job_that_comes_while_the_books_are_checked_is_begun_at_once(monkeypatch: pytest.MonkeyPatch):
    """A check of 100,000 pages takes about 50 ms."""
    slices, inbox, outbox = 0, MemoryChannel(), MemoryChannel()
    planner = Planner(100_000, CONFIG, MAX_MODEL_LEN, hash_page)
    checks, submitted = planner.checks, planner.submit

    def watched() -> Iterator[None]:
        nonlocal slices
        for _ in checks():
            slices += 1
            if slices == 3:
                inbox.put(make_job("a", PROMPT, max_tokens=1))
            yield

    def submit(job: Job) -> list[Delta]:
        assert slices == 3
        inbox.put(Stop())
        return submitted(job)

    monkeypatch.setattr(planner, "checks", watched)
    monkeypatch.setattr(planner, "submit", submit)
    lead(planner, FakeRunner(100_000, CONFIG), inbox, outbox)
    assert slices > 1000, "the final check must cover all pages"


def test_shapes_are_recorded_one_at_a_time_while_nothing_runs():
    """A new job waits for one capture at most, and no other capture starts before the job has ended."""
    events: list[str] = []
    recording, go_on = threading.Event(), threading.Event()

    class Recording(FakeRunner):
        def launch(self, step: Step) -> FakePending:
            events.append("step")
            return super().launch(step)

        def record_more(self) -> bool:
            events.append("record" if self.more else "none left")
            if len(self.more) == 3:
                recording.set()
                assert go_on.wait(LIMIT_S)
            return super().record_more()

    more = [Shape(1, 1, 256), Shape(2, 1, 256), Shape(3, 1, 256), Shape(4, 1, 256)]
    runner = Recording(32, CONFIG, shapes=[Shape(4, 1, 1024)], more=more)
    with worker(runner) as it:
        assert recording.wait(LIMIT_S)
        job = make_job("a", PROMPT, max_tokens=20)
        it.inbox.put(job)
        go_on.set()
        assert it.answer("a") == whole_answer(job, MAX_MODEL_LEN)
        until(lambda: "none left" in events)
    assert events == [
        "record",
        "record",
        *["step"] * 20,
        "record",
        "record",
        *["none left"] * events.count("none left"),
    ]
    assert runner.replays == 19


def test_a_worker_with_transfers_captures_every_shape_and_sends_its_load_before_it_waits_for_ever() -> None:
    """The end of a lease does not change the planner, but must be published within LOAD_INTERVAL_S of the last load."""
    now, outbox, turns = FakeClock(), MemoryChannel(), itertools.count()

    class Lends(Service):
        """Lends one chunk until its third iteration."""

        chunks = 1

        @property
        def idle(self) -> bool:
            return not self.chunks

        def due_in(self) -> float | None:
            return None if self.idle else 0.05

        def settled(self, deltas: list[Delta]) -> list[Delta]:
            if next(turns) == 2:
                self.chunks = 0
            return deltas

        def load(self, load: Load) -> Load:
            return msgspec.structs.replace(load, kv_chunks=self.chunks)

    runner = FakeRunner(32, CONFIG, more=[Shape(1, 1, 256), Shape(2, 1, 256), Shape(3, 1, 256)])
    planner, inbox = Planner(32, CONFIG, MAX_MODEL_LEN, hash_page), Rests(now, [], then=[Ping(number=1)])
    with now.installed():
        lead(planner, runner, inbox, outbox, [Lends()])
    sent = outbox.drain(wait=False)
    assert [one.kv_chunks for one in sent[: sent.index(Ping(number=1))] if isinstance(one, Load)] == [1, 0]
    assert not runner.more


def test_a_stop_waits_for_one_recording_at_most():
    class Endless(FakeRunner):
        def record_more(self) -> bool:
            recorded.append(True)
            inbox.put(Stop())
            return True

    recorded: list[bool] = []
    inbox = MemoryChannel()
    lead(Planner(32, CONFIG, MAX_MODEL_LEN, hash_page), Endless(32, CONFIG), inbox, MemoryChannel())
    assert recorded == [True]


def test_a_recording_that_hangs_is_no_rest():
    """So that the worker is ended, as with a step that hangs."""
    pulse, inbox, waited = LoopStatus(), MemoryChannel(), []

    class Recording(FakeRunner):
        def record_more(self) -> bool:
            waited.append(pulse.waits)
            inbox.put(Stop())
            return False

    planner = Planner(32, CONFIG, MAX_MODEL_LEN, hash_page)
    lead(planner, Recording(32, CONFIG), inbox, MemoryChannel(), pulse=pulse)
    assert waited == [False]


def test_an_idle_loop_that_has_checked_its_books_rests(monkeypatch: pytest.MonkeyPatch):
    """It wakes to publish its load, and does not repeat the check if nothing has changed."""
    clock, outbox, checked = FakeClock(), MemoryChannel(), 0
    planner = Planner(32, CONFIG, MAX_MODEL_LEN, hash_page)
    checks = planner.checks

    def counted() -> Iterator[None]:
        nonlocal checked
        checked += 1
        return checks()

    monkeypatch.setattr(planner, "checks", counted)
    with clock.installed():
        began = clock.now
        lead(planner, FakeRunner(32, CONFIG), Rests(clock, [], then=[make_job("a", PROMPT, max_tokens=2)]), outbox)
        assert clock.now > began, "the loop must have slept and woken"
    assert [load for load in outbox.drain(wait=False) if isinstance(load, Load)][-1].running == 0
    assert checked == 3, "one check before the job, one after it, one at Stop"


def test_an_idle_loop_checks_its_books(monkeypatch: pytest.MonkeyPatch):
    checked = threading.Event()
    with worker() as it:
        it.inbox.put(make_job("a", PROMPT, max_tokens=2))
        it.deltas("a")
        monkeypatch.setattr(it.planner, "checks", lambda: checked.set() or [])
        it.inbox.put(make_job("b", PROMPT, max_tokens=2))
        it.deltas("b")
        assert checked.wait(LIMIT_S)


def test_a_job_that_may_begin_now_that_the_last_has_ended_does_not_wait_for_a_message() -> None:
    """A worker with KV transfers sleeps if a loop iteration changed nothing; a settled step is a change."""
    config = PlanConfig(step_tokens=64, max_running=1)
    planner = Planner(16, config, 512, hash_page)
    inbox, outbox = MemoryChannel(), MemoryChannel()
    for name in "ab":
        inbox.put(make_job(name, PROMPT[:60], max_tokens=1))
    arguments = (planner, FakeRunner(16, config), inbox, outbox, [Service()])
    thread = threading.Thread(target=lead, args=arguments, kwargs={"record": False})
    thread.start()
    ended: list[str] = []
    while len(ended) < 2:
        told = outbox.drain(wait=True, timeout=LIMIT_S)
        assert told, ended
        ended += [message.job for message in told if isinstance(message, Delta) and message.finish is not None]
    inbox.put(Stop())
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert ended == ["a", "b"]


def test_a_knock_is_answered_in_its_turn_among_what_else_is_said() -> None:
    with worker() as it:
        it.inbox.put(make_job("a", PROMPT, max_tokens=3))
        it.inbox.put(Ping(number=7))
        told: list[Wire] = []
        while Ping(number=7) not in told:
            more = it.outbox.drain(wait=True, timeout=LIMIT_S)
            assert more, told
            told += more


def test_where_messages_to_a_worker_were_lost_it_says_so_and_has_no_jobs_any_more() -> None:
    """An abort may have been among the lost messages, and its job would run for no client. No end is reported for the
    jobs, so they are requeued.
    """
    first, second = make_job("a", PROMPT, max_tokens=300), make_job("b", PROMPT, max_tokens=3)
    with worker(said=[first, Missed(messages=3), second]) as it:
        assert len(it.answer("b")) == 3
        told = it.messages
        assert Missed(messages=3) in told
        assert not [each for each in told if isinstance(each, Delta) and each.job == "a" and each.finish]
        assert it.planner.load().running == 0
