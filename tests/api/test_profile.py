"""Recording a profile in the API process: one at a time, within its limits."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redline.api.errors import Refusal
from redline.api.telemetry.profile import Profiler
from redline.api.telemetry.request_span import Passages, RequestSpan
from tests.clocks import FakeClock
from tests.waiting import turns

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def clock() -> AsyncIterator[FakeClock]:
    """The clock of the package, and of this event loop's timers."""
    clock = FakeClock()
    with clock.installed(), clock.drives(asyncio.get_running_loop()):
        yield clock


async def refused(profiler: Profiler, seconds: float) -> int:
    with pytest.raises(Refusal) as refusal:
        await profiler.take(seconds)
    return refusal.value.status


async def test_one_is_taken_at_a_time_and_leaves_nothing_behind(clock: FakeClock):
    gateway, passages = SimpleNamespace(monitor=SimpleNamespace(recorder=None), workers=[]), Passages()
    profiler = Profiler(cast(Any, gateway), passages)
    assert [await refused(profiler, seconds) for seconds in (0.0, 60.5, float("nan"))] == [400] * 3
    first = asyncio.create_task(profiler.take(5))
    await turns()
    assert await refused(profiler, 5) == 409
    ended, open_one = RequestSpan("a", "GET", "/live"), RequestSpan("b", "GET", "/health")
    passages.begin(ended)
    passages.begin(open_one)
    ended.did("read", ended.began)
    passages.end(ended, 200)
    clock.advance(5)
    trace = json.loads(gzip.decompress(await first))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    told = [(e["name"], e["args"].get("status"), e["args"].get("ended")) for e in slices]
    assert told == [("GET /live", 200, True), ("read", None, None), ("GET /health", None, False)]
    assert (passages.watchers, gateway.monitor.recorder) == ([], None)
    cut = asyncio.create_task(profiler.take(30))
    await turns()
    cut.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cut
    assert (passages.watchers, gateway.monitor.recorder) == ([], None)
