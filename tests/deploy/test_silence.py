"""When a server gives a silent worker up: the timeout counts seconds awake, and is not read from a clock."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redline.deploy.supervised_process import SILENCE_S, until_silent


def seconds_until_silent(monkeypatch: pytest.MonkeyPatch, last_beat_s: int, every_s: int = 1) -> int:
    """The second at which a worker is given up that sends a heartbeat every `every_s` seconds until `last_beat_s`."""
    link, now = SimpleNamespace(beats=0, ready=True), 0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += round(seconds)
        link.beats += now <= last_beat_s and now % every_s == 0

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(until_silent(cast("Any", link)))
    return now


def test_a_worker_is_given_up_a_minute_after_its_last_beat(monkeypatch: pytest.MonkeyPatch):
    assert seconds_until_silent(monkeypatch, last_beat_s=100) == 100 + SILENCE_S


def test_a_day_of_beats_that_come_late_is_no_end(monkeypatch: pytest.MonkeyPatch):
    day = 24 * 3600
    assert seconds_until_silent(monkeypatch, last_beat_s=day, every_s=50) == day // 50 * 50 + SILENCE_S
