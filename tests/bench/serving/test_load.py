"""Loads with and without a schedule, and runs that end early."""

import asyncio
import math
import os
import signal
import threading

import pytest

from redline.bench.serving.load import Live, load, run_load
from redline.bench.serving.records import LoadRequest, LoadRun
from redline.bench.serving.target import LoadPace
from redline.errors import ConfigError
from tests.bench.serving.odd_servers import CHUNKED, DONE, IDLE_S, chunk, event, serving, target
from tests.clocks import FakeClock
from tests.waiting import LIMIT_S

ASKS = tuple(LoadRequest(max_tokens=1, text=f"question {place}") for place in range(12))


class _Slow:
    """A server with slow answers; most: its maximum number of concurrent requests."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = self.most = 0

    async def reply(self, _: bytes, writer: asyncio.StreamWriter) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        writer.write(CHUNKED + chunk(event({"content": "a"})))
        await asyncio.sleep(self.seconds)
        writer.write(chunk(event(finish="stop") + DONE) + b"0\r\n\r\n")
        self.now -= 1


async def _loaded(server: _Slow, pace: LoadPace, watched: list[Live] | None = None) -> tuple[LoadRun, list[bytes]]:
    """Run a load with a clock that jumps ahead whenever the event loop is idle."""
    clock = FakeClock()
    with clock.installed(), clock.jumps(asyncio.get_running_loop(), IDLE_S):
        async with serving(server.reply) as (port, requests):
            run = await load(target(port), ASKS, pace, watched.append if watched is not None else None)
            return run, list(requests)


def test_places_are_filled_as_they_come_free():
    server = _Slow(0.1)
    watched: list[Live] = []
    run, requests = asyncio.run(_loaded(server, LoadPace(max_concurrency=3, warmups=2), watched))
    assert server.most == 3
    assert len(requests) == 12
    assert all(b"question 0" in request or b"question 1" in request for request in requests[:2])
    assert [answer.ask.text for answer in run.answers] == [ask.text for ask in ASKS[2:]]  # each is sent once
    assert [answer.index for answer in run.answers] == list(range(10))
    assert all(answer.failure is None and answer.text == "a" for answer in run.answers)
    assert 0.3 <= run.seconds < 3
    assert not run.stopped
    # Planned when a place was free: in four groups of at most three requests.
    assert run.answers[3].planned == pytest.approx(min(answer.end for answer in run.answers[:3]), abs=0.05)
    assert watched[-1][:5] == (10, 10, 0, 0, 10)
    assert run.generator.cpu_share > 0
    assert 0 <= run.generator.lag_p50 <= run.generator.lag_p99 <= run.generator.lag_most


def test_a_request_that_is_held_up_keeps_its_planned_time():
    run, _ = asyncio.run(_loaded(_Slow(0.1), LoadPace(rate=50, burstiness=math.inf, max_concurrency=1)))
    assert [answer.planned for answer in run.answers] == pytest.approx([0.02 * place for place in range(1, 13)])
    waits = [(answer.taken or 0.0) - answer.planned for answer in run.answers]
    assert waits[0] < 0.05
    assert waits[-1] > 0.7  # eleven answers of 0.1 s came before it, and it was due at 0.24 s


def test_a_schedule_is_kept_where_nothing_holds_it_up():
    run, _ = asyncio.run(_loaded(_Slow(0.3), LoadPace(rate=40, burstiness=math.inf)))
    late = [(answer.sent or math.inf) - answer.planned for answer in run.answers]
    assert min(late) >= 0
    assert sorted(late)[6] < 0.01


def test_the_deadline_ends_what_runs_and_skips_the_rest():
    run, _ = asyncio.run(_loaded(_Slow(0.2), LoadPace(max_concurrency=2, deadline=0.3)))
    assert run.stopped
    assert [answer.failure for answer in run.answers] == [None] * 2 + ["deadline"] * 2 + ["skipped"] * 8
    assert all(answer.text == "a" for answer in run.answers[:4])
    assert "0.3 s" in (run.answers[3].error or "")
    assert run.answers[5].sent is None
    assert run.seconds < 2


def test_the_deadline_wakes_who_waits_for_the_schedule():
    run, _ = asyncio.run(_loaded(_Slow(0), LoadPace(rate=0.01, burstiness=math.inf, deadline=0.2)))
    assert {answer.failure for answer in run.answers} == {"skipped"}


def test_ctrl_c_gives_what_there_is():
    started: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def serve() -> None:
        async with serving(_Slow(0.2).reply) as (port, _):
            started.append((port, asyncio.get_running_loop(), asyncio.Event()))
            ready.set()
            await started[0][2].wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(LIMIT_S)
    port, loop, ended = started[0]

    def interrupt(live: Live) -> None:
        if live.done >= 2 and not sent:
            sent.append(live.done)
            os.kill(os.getpid(), signal.SIGINT)

    sent: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    try:
        run = run_load(target(port), ASKS, LoadPace(max_concurrency=2), interrupt)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(LIMIT_S)
    assert run.stopped
    kinds = [answer.failure for answer in run.answers]
    assert kinds[:2] == [None, None]
    assert kinds[-1] == "skipped"
    assert signal.getsignal(signal.SIGINT) is before


def test_what_cannot_be_asked_is_said_before_anything_is_sent():
    async def ask() -> None:
        async with serving(_Slow(0).reply) as (port, requests):
            with pytest.raises(ConfigError, match="--backend"):
                await load(target(port), [*ASKS, LoadRequest(max_tokens=1, ids=(1,))], LoadPace())
            with pytest.raises(ConfigError, match="--request-rate"):
                await load(target(port), ASKS, LoadPace(rate=-1))
            assert requests == []

    asyncio.run(ask())


def test_a_load_of_nothing_is_a_run_of_nothing():
    run = run_load(target(1), [], LoadPace(max_concurrency=2, warmups=1))
    assert (run.answers, run.stopped, run.seconds) == ((), False, 0.0)
