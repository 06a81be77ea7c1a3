"""A Profile: what a worker records while one is requested, its memory limit, and its end."""

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.chat.page_hashes import make_job as hashed_job
from redline.kernels.cpu import native
from redline.kernels.cpu.best import best
from redline.kernels.cpu.watch import ROOM, OpTimes
from redline.messages.channel import MemoryChannel
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.job import JobId, Sampling
from redline.messages.profile import Profile, Profiled, Span, spans_of
from redline.model.k2.write import random_checkpoint
from redline.run.runner import nobody
from redline.scheduler.config import PlanConfig
from redline.scheduler.planner import Planner
from redline.worker import profile
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine
from redline.worker.loop import lead
from redline.worker.profile import ProfileRecording, ProfileService, SpanBuffer
from tests.clocks import FakeClock
from tests.fakes import Rests, Steady, hash_page, make_job
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer
from tests.waiting import until

CONFIG = PlanConfig(max_running=4)


class World:
    """A loop that receives the messages in `said`, and its output, in one thread; steps take a millisecond each.
    Whenever it would wait it receives the next message of `then`.
    """

    def __init__(self, *said: Wire, then: Sequence[Wire] = ()) -> None:
        clock, outbox = FakeClock(), MemoryChannel()
        self.runner = Steady(32, CONFIG, clock, step_s=0.001)
        self.runner.begins = nobody
        with clock.installed():
            planner = Planner(32, CONFIG, 400, hash_page)
            profiles = ProfileService(planner, self.runner, outbox, clock.ns)
            lead(planner, self.runner, Rests(clock, said, then), outbox, [profiles])
        self.told = outbox.drain(wait=False)

    def profile(self, number: int) -> tuple[list[Span], Profiled]:
        """All spans of a Profile, and its last message."""
        told = [message for message in self.told if isinstance(message, Profiled) and message.number == number]
        assert [message.last for message in told] == [False] * (len(told) - 1) + [True]
        return [span for message in told for span in spans_of(message.data)], told[-1]


def test_an_idle_worker_tells_of_nothing_and_comes_to_the_end():
    spans, last = World(Profile(number=7, seconds=0.05, most=100)).profile(7)
    assert (spans, last.left_out, last.notes) == ([], 0, ())


def test_each_step_is_planned_launched_awaited_and_settled():
    job = make_job("a", tuple(range(70)), max_tokens=20)
    world = World(Profile(number=1, seconds=0.3, most=10_000), job)
    spans, last = world.profile(1)
    assert last.left_out == 0
    steps = [span for span in spans if span.lane == "steps"]
    assert [span.name for span in steps] == [f"step {n}" for n in range(1, len(steps) + 1)]
    assert len(steps) == world.runner.steps == 20
    assert steps[0].facts["prompts"] == 1
    assert steps[0].facts["prompt_positions"] == 70
    assert {span.facts["rows"] for span in steps} == {1}
    for name, lane in (("next_step", "planner"), ("settle", "planner"), ("launch", "loop"), ("wait", "loop")):
        numbers = [span.facts["step"] for span in spans if span.name == name and span.lane == lane]
        assert sorted(numbers) == list(range(1, len(steps) + 1)), name
    for lane in ("steps", "planner", "loop"):
        ordered = sorted((span for span in spans if span.lane == lane), key=lambda span: span.began_ns)
        assert all(span.began_ns <= span.ended_ns for span in ordered)
        if lane != "loop":  # on a fake device, a step is launched during the wait for another
            assert all(a.ended_ns <= b.began_ns for a, b in itertools.pairwise(ordered)), lane


def test_what_has_no_room_is_counted_and_the_worker_goes_on():
    first, second = (make_job(name, tuple(range(70)), max_tokens=count) for name, count in (("a", 20), ("b", 5)))
    world = World(Profile(number=1, seconds=0.3, most=5), first, then=[second])
    spans, last = world.profile(1)
    assert len(spans) == 5
    assert last.left_out > 20
    assert world.runner.begins is nobody
    ended = [message.job for message in world.told if isinstance(message, Delta) and message.finish == "length"]
    assert ended == ["a", "b"]
    assert world.runner.steps == 25


def test_a_later_one_ends_an_earlier_one():
    world = World(Profile(number=1, seconds=30, most=100), Profile(number=2, seconds=0.05, most=100))
    world.profile(2)
    assert {message.number for message in world.told if isinstance(message, Profiled)} == {2}
    assert world.runner.begins is nobody


def test_spans_leave_in_the_order_in_which_they_came():
    spans = SpanBuffer(3)
    for number in range(5):
        spans.add("lane", str(number), number, number)
    assert [span.name for span in spans.take(2)] == ["0", "1"]
    assert ([span.name for span in spans.take(9)], spans.left_out) == (["2"], 2)


@pytest.mark.skipif(native.find_compiler() is None, reason="the kernels record their own times")
def test_a_cpus_kernels_say_when_each_op_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each op of a step is within that step's `forward` span or the neighbouring spans, on the same clock."""
    asked = list[ProfileRecording]()

    def profiling(*args: Any) -> ProfileRecording:
        asked.append(ProfileRecording(*args))
        return asked[0]

    monkeypatch.setattr(profile, "ProfileRecording", profiling)
    random_checkpoint(tmp_path, kernel_config(vocab_size=TINY_VOCAB))
    with Engine.open(write_tiny_tokenizer(tmp_path), EngineConfig(device="cpu", kv_memory=20 << 20)) as engine:
        outbox = engine._outbox
        heard: list[Profiled] = []
        put = outbox.put
        outbox.put = lambda message: heard.append(message) if isinstance(message, Profiled) else put(message)
        engine._inbox.put(Profile(number=1, seconds=3600.0, most=100_000))
        prompt = tuple(range(10, 40))
        engine.generate([hashed_job(JobId("a"), prompt, Sampling(max_tokens=8, temperature=0), engine.fingerprint)])
        asked[0]._until = 0  # the end of the window is in the past
        until(lambda: heard and heard[-1].last)
    spans = [span for message in heard for span in spans_of(message.data)]
    ops = [span for span in spans if span.lane == "kernels"]
    steps = [span for span in spans if span.lane == "steps"]
    layers = engine.engine.model.config.num_hidden_layers
    assert len(steps) == 8
    for name in ("mla_qkv", "moe"):
        assert sum(op.name == name for op in ops) == layers * len(steps), name
    assert sum(op.name == "mla_prefill" for op in ops) == layers, "exactly one step has the prompt"
    assert sum(op.name == "best" for op in ops) == len(steps)
    for op in ops:
        assert op.began_ns <= op.ended_ns
        assert any(step.began_ns <= op.began_ns and op.ended_ns <= step.ended_ns for step in steps)
    parts = [span.name for span in spans if span.lane == "runner"]
    assert set(parts) == {"begin", "inputs", "forward", "choose"}


@pytest.mark.skipif(native.library() is None, reason="the kernels record their own times")
def test_ops_that_find_no_room_are_counted_and_nobody_else_is_watched():
    logits = torch.randn(1, 64)
    watched = OpTimes()
    for _ in range(ROOM + 3):
        best(logits)
    other = threading.Thread(target=best, args=[logits])
    other.start()
    other.join()
    times, missed = watched.taken()
    assert ({op.name for op in times}, len(times), missed) == ({"best"}, ROOM, 3)
    assert watched.taken() == ([], 0)
    watched.close()
    best(logits)
    assert watched.taken() == ([], 0)
