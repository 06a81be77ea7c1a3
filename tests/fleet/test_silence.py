"""When a server gives its worker up: counted in waking seconds, not read from a clock."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redline.errors import ConfigError
from redline.fleet import serve
from redline.fleet.serve import SILENCE_S
from redline.wire.news import Failed


def seconds_until_silent(monkeypatch: pytest.MonkeyPatch, last_beat_s: int, every_s: int = 1) -> int:
    """A worker's heart beats every so many seconds until its last beat."""
    gateway, now = SimpleNamespace(beats=0), 0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += round(seconds)
        gateway.beats += now <= last_beat_s and now % every_s == 0

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(serve._until_silent(cast("Any", gateway)))
    return now


def test_a_worker_is_given_up_a_minute_after_its_last_beat(monkeypatch: pytest.MonkeyPatch):
    assert seconds_until_silent(monkeypatch, last_beat_s=100) == 100 + SILENCE_S


def test_a_day_of_beats_that_come_late_is_no_end(monkeypatch: pytest.MonkeyPatch):
    day = 24 * 3600
    assert seconds_until_silent(monkeypatch, last_beat_s=day, every_s=50) == day // 50 * 50 + SILENCE_S


def test_what_a_worker_said_just_before_it_ended_is_the_reason_that_is_told():
    async def run() -> None:
        async def get() -> list[Failed]:
            await asyncio.sleep(0.05)
            return [Failed(reason="no room")]

        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        ended.set_result(1)
        forever = asyncio.get_running_loop().create_future()
        gateway, inbox = SimpleNamespace(ready=None), SimpleNamespace(get=get)
        given: Any = gateway, inbox, ended, forever, asyncio.Event()
        await serve._until_ready(*given)

    with pytest.raises(ConfigError, match="no room"):
        asyncio.run(run())
