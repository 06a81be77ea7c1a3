"""A supervisor whose workers cannot be started, and where it puts what they hand over."""

import asyncio
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redline.fleet import kept, process, supervisor
from redline.fleet.config import ServeConfig, Workers
from redline.fleet.kept import MOST_ENDS
from redline.fleet.supervisor import Supervisor
from redline.worker.config import WorkerConfig
from tests.api.world import World, answer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class NoProcess:
    """As `start_worker`, where the system has none left."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.alone: set[bool] = set()

    def __call__(self, config: WorkerConfig, *_: Any) -> "subprocess.Popen[bytes]":
        self.epochs.append(config.epoch)
        self.alone.add(config.alone)
        raise BlockingIOError(11, "Resource temporarily unavailable")


async def given_up(all_: Supervisor) -> str:
    """What `given_up` returns of workers that have been ready once."""
    for worker in all_.workers:
        worker.ready.set()
    all_._lives = [asyncio.create_task(worker.live()) for worker in all_.workers]
    return await asyncio.wait_for(all_.given_up(), 10)


async def test_a_worker_that_cannot_be_started_is_tried_again_and_given_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = NoProcess()
    monkeypatch.setattr(supervisor, "start_worker", start)
    monkeypatch.setattr(kept, "AGAIN_S", 0.001)
    async with World(answer("a"), resume_s=5.0) as world:
        one = Supervisor(ServeConfig(weights=""), world.gateway, tmp_path / "sockets")
        world.gateway.lose(world.link, "not used")
        why = await given_up(one)
        assert start.epochs == list(range(1, MOST_ENDS + 1))
        assert start.alone == {True}, "there is one worker"
        assert "could not be started: [Errno 11]" in why
        assert world.gateway.links.lost is not None, "those who wait are told"
        assert [link.lost is not None for link in world.gateway.links] == [True]


async def test_a_worker_that_could_not_be_started_once_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = NoProcess()
    monkeypatch.setattr(supervisor, "start_worker", start)
    async with World(answer("a"), resume_s=5.0) as world:
        world.gateway.lose(world.link, "not used")
        one = Supervisor(ServeConfig(weights=""), world.gateway, tmp_path / "sockets").workers[0]
        one.ready.set()
        life = asyncio.create_task(one.live())
        async with asyncio.timeout(10):
            while len(start.epochs) < 2:
                await asyncio.sleep(0.01)
        one.stop()
        await asyncio.wait_for(life, 10)
        assert one.given_up is None


async def test_a_worker_that_need_not_run_is_started_when_it_is_wanted_and_left_out_where_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = NoProcess()
    monkeypatch.setattr(supervisor, "start_worker", start)
    config = ServeConfig(weights="", workers=(Workers(count=2, least=1),))
    async with World(answer("a"), resume_s=5.0) as world:
        world.gateway.lose(world.link, "not used")
        all_ = Supervisor(config, world.gateway, tmp_path / "sockets")
        one = all_.workers[1]
        life = asyncio.create_task(one.live())
        await asyncio.sleep(0.05)
        assert start.epochs == []
        assert [seat.state for seat in all_.seats] == ["starting", "idle"]
        assert all_.spare("worker-1") == "worker-1 is idle"
        assert all_.spare("worker-0") == "worker-0 runs in any case"
        for epoch in (1, 2):
            assert all_.want("worker-1", "decode") is None
            assert all_.want("worker-1", "decode") == "worker-1 is starting"
            async with asyncio.timeout(10):
                while one.seat.state != "idle":
                    await asyncio.sleep(0.01)
            assert start.epochs == [*range(1, epoch + 1)], "once, and not five times in a row"
            assert "Resource temporarily unavailable" in (one.seat.failed or "")
            assert one.role == "decode"
        one.stop()
        await asyncio.wait_for(life, 10)
        assert one.given_up is None
        with pytest.raises(KeyError):
            all_.want("cook", "both")


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_parcels_are_put_into_the_hosts_memory_only_where_it_has_room_for_them(
    free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    where: list[Path | None] = []

    def made(prefix: str, dir: Path | None) -> str:
        where.append(dir)
        return str(tmp_path / prefix)

    monkeypatch.setattr(process.os, "access", lambda *_: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(tempfile, "mkdtemp", made)
    process.folder_for_parcels(2)
    assert where == [Path("/dev/shm") if free else None]
