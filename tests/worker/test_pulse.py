"""Heartbeats distinguish a running process from one that is stopped, and a long step from one that never ends."""

import threading

import pytest

from redline.messages.channel import MemoryChannel
from redline.messages.news import Heartbeat, Ping, Ready, Stop
from redline.messages.step import Step, StepResult
from redline.router.worker_registry import MOVE_S, WorkerHandle, WorkerRegistry
from redline.scheduler.config import PlanConfig
from redline.scheduler.planner import Planner
from redline.worker import heartbeat as module
from redline.worker.heartbeat import BEAT_S, LoopStatus, LoopWatchdog
from redline.worker.loop import lead
from tests.fakes import FakePending, FakeRunner, hash_page, make_job
from tests.waiting import LIMIT_S


def seconds(outbox: MemoryChannel) -> list[float]:
    return [message.turn_s for message in outbox.drain(wait=False) if isinstance(message, Heartbeat)]


def test_a_beat_says_how_long_the_loop_has_been_in_one_turn():
    pulse, outbox = LoopStatus(), MemoryChannel()
    heart = LoopWatchdog(pulse, outbox, 64, pytest.fail)
    heart.beat()
    pulse.waits, pulse.turns = False, 1
    for _ in range(3):
        heart.beat()
    pulse.turns = 2
    heart.beat()
    assert seconds(outbox) == [0, 0, BEAT_S, 2 * BEAT_S, 0]


def test_a_beat_says_how_many_knocks_have_reached_the_loop():
    pulse, outbox = LoopStatus(), MemoryChannel()
    inbox, said = MemoryChannel(), MemoryChannel()
    for message in (Ping(number=1), Ping(number=2), Stop()):
        inbox.put(message)
    config = PlanConfig(max_running=4)
    lead(Planner(32, config, 400, hash_page), FakeRunner(32, config), inbox, said, pulse=pulse)
    LoopWatchdog(pulse, outbox, 64, pytest.fail).beat()
    assert [beat.knock for beat in outbox.drain(wait=False)] == [2]


def test_a_loop_that_waits_for_jobs_is_in_no_turn_however_long():
    pulse, outbox = LoopStatus(), MemoryChannel()
    heart = LoopWatchdog(pulse, outbox, 64, pytest.fail)
    for _ in range(24 * 3600):
        heart.beat()
    assert set(seconds(outbox)) == {0}


@pytest.mark.parametrize(
    ("device", "step_tokens", "most_s"), [("cpu", 1, 302), ("cpu", 512, 1324), ("cuda", 1, 300), ("cuda", 8192, 1119)]
)
def test_a_step_that_never_ends_is_called_hung_and_a_long_one_is_not(device: str, step_tokens: int, most_s: int):
    pulse, outbox = LoopStatus(), MemoryChannel()
    said: list[str] = []
    heart = LoopWatchdog(pulse, outbox, step_tokens, said.append, device)
    pulse.waits = False
    for _ in range(int(most_s / BEAT_S)):
        heart.beat()
    assert not said
    for _ in range(6):
        heart.beat()
    assert "a step has not ended in" in said[0]


def test_a_heart_beats_while_the_loop_is_in_a_step_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    started, done = threading.Event(), threading.Event()

    class Slow(FakeRunner):
        def launch(self, step: Step) -> FakePending:
            pending = super().launch(step)

            class Pending(FakePending):
                def wait(self) -> StepResult:
                    started.set()
                    assert done.wait(LIMIT_S)
                    return self.result

            return Pending(pending.result)

    config = PlanConfig(max_running=1)
    pulse, inbox, beats = LoopStatus(), MemoryChannel(), MemoryChannel()
    planner = Planner(8, config, 200, hash_page)
    inbox.put(make_job("a", (1, 2, 3), max_tokens=1))
    arguments = [planner, Slow(8, config), inbox, MemoryChannel()]
    thread = threading.Thread(target=lead, args=arguments, kwargs={"pulse": pulse})
    with LoopWatchdog(pulse, beats, 64, pytest.fail):
        thread.start()
        assert started.wait(LIMIT_S)
        told: list[float] = []
        while max(told, default=0) < 0.05:
            assert beats.drain(wait=True, timeout=LIMIT_S), "no beat while a step runs"
            told += [message.turn_s for message in beats.drain(wait=True, timeout=LIMIT_S)]
        done.set()
        inbox.put(Stop())
        thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_worker_whose_beats_come_a_little_late_is_never_taken_for_silent():
    now, next_beat, next_look, told_gone, most_silent = 0.0, 0.0, 0.0, 0, 0.0
    links = WorkerRegistry(lambda: now)
    link = WorkerHandle("worker", MemoryChannel())
    links.join(link)
    links.set_ready(link, Ready(max_model_len=1, pages=1, fingerprint="", summary=""))
    for millisecond in range(600_000):  # ten minutes, in which heartbeats and polls meet at every phase
        now = millisecond / 1000
        if now >= next_beat:
            link.record_heartbeat(Heartbeat(), now)
            next_beat = now + BEAT_S + 0.003
        if now >= next_look:
            told_gone += len(links.newly_down())
            most_silent = max(most_silent, links.silent_s(link))
            next_look = now + 0.251
    assert told_gone == 0
    assert most_silent < MOVE_S / 2, "two heartbeats may be lost without a timeout"
