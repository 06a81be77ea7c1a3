"""Roles are simulated in a separate process: the result equals that of a simulation here, and an error is one line."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from redline.deploy import trials
from redline.errors import RedlineError
from redline.policy.expected import RequestTokens, Roles, Traffic
from redline.policy.roles import FleetRoles
from redline.policy.targets import Targets
from redline.simulate import fleet as played
from redline.simulate.models import KIMI_8_H200
from tests.clocks import FakeClock
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio

TARGETS = {"": Targets(ttft_s=1.0), "batch": Targets(itl_s=0.05)}
TRAFFIC = Traffic(
    4.0, [RequestTokens(100, 2000, 200), RequestTokens(0, 30_000, 50, "batch")], [RequestTokens(0, 9000, 100)]
)
SPLITS = Roles(both=4), Roles(prefill=1, decode=3)


LONGEST_S = 600.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def busy_machines_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "LONGEST_S", LONGEST_S)


async def ask() -> dict[Roles, float]:
    return await trials.tried(TRAFFIC, FleetRoles(4, KIMI_8_H200), TARGETS, SPLITS)


async def test_a_process_says_what_playing_it_here_says() -> None:
    assert await ask() == played.tried(TRAFFIC, KIMI_8_H200, TARGETS, SPLITS)


async def test_a_process_that_ends_with_an_error_is_said() -> None:
    with pytest.raises(RedlineError, match="simulation of roles ended with code 1"):
        await trials.tried(TRAFFIC._replace(rate=0.0), FleetRoles(4, KIMI_8_H200), TARGETS, SPLITS)


async def test_one_that_takes_too_long_or_whose_server_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def slow(*_: str, **how: Any) -> asyncio.subprocess.Process:
        started.append(await start("sleep", "100", **how))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    with FakeClock().drives(asyncio.get_running_loop()) as clock:
        asked = asyncio.create_task(ask())
        await eventually(lambda: len(started) == 1)
        clock.advance(LONGEST_S - 1)
        await turns(5)
        assert not asked.done()
        clock.advance(1)
        with pytest.raises(RedlineError, match="took more than"):
            await asked
    asked = asyncio.create_task(ask())
    await eventually(lambda: len(started) == 2)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert [process.returncode for process in started] == [-9, -9]


async def test_one_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(Path(os.devnull) / "python"))
    with pytest.raises(RedlineError, match="simulation of roles cannot be started"):
        await ask()
