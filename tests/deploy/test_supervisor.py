"""A supervisor with workers that fail to start or are killed, and its folder for KV transfer buffers."""

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redline.api.gateway.gateway import Gateway
from redline.deploy import process, supervised_process, supervisor
from redline.deploy.config import ServeConfig, Workers
from redline.deploy.supervised_process import MOST_ENDS
from redline.deploy.supervisor import Supervisor
from redline.errors import ConfigError, WorkerLost
from redline.messages.news import Ready
from redline.worker.config import WorkerConfig
from tests.api.world import World, answer
from tests.waiting import LIMIT_S, eventually, turns

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class NoProcess:
    """Stands in for `start_worker` when the system has no process left."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.alone: set[bool] = set()

    def __call__(self, config: WorkerConfig, *_: Any) -> "subprocess.Popen[bytes]":
        self.epochs.append(config.epoch)
        self.alone.add(config.alone)
        raise BlockingIOError(11, "Resource temporarily unavailable")


class Alive:
    """Stands in for `LocalProcess`: a worker's process, which ends when the test ends it."""

    gone = False

    def __init__(self, config: WorkerConfig, _: Path | None) -> None:
        self.config = config
        self.pid: int | None = None
        self.leaving = asyncio.Event()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        self.end(" with code -9")

    def end(self, how: str) -> None:
        if not self.ended.done():
            self.ended.set_result(how)

    def close(self) -> None:
        """There is nothing to clean up."""


class Crew:
    """A supervisor of workers that load until the test makes them ready or ends them."""

    def __init__(self, config: ServeConfig, gateway: Gateway, sockets: Path) -> None:
        self.supervisor = Supervisor(config, gateway.monitor, sockets)
        self.stop = asyncio.Event()
        self._gateway = gateway
        self._started: dict[str, Alive] = {}
        self._serving = asyncio.create_task(asyncio.Event().wait())

    def start(self) -> "asyncio.Task[Ready | None]":
        return asyncio.create_task(self.supervisor.start(self.stop, self._serving))  # type: ignore[arg-type]

    def process(self, config: WorkerConfig, parcels: Path | None) -> Alive:
        self._started[config.name] = Alive(config, parcels)
        return self._started[config.name]

    async def started(self, name: str, epoch: int) -> Alive:
        """The process of a worker's start, once it runs."""
        return await eventually(lambda: (p := self._started.get(name)) and p.config.epoch == epoch and p, name)

    async def ready(self, name: str, epoch: int = 1) -> Alive:
        process = await self.started(name, epoch)
        (link,) = (link for link in self._gateway.workers if link.name == name)
        said = Ready(max_model_len=64, pages=8, fingerprint="tiny", summary="a fake")
        self._gateway.monitor.receive(link, [said])
        await eventually(lambda: self.state(name) == "ready", name)
        return process

    def state(self, name: str) -> str:
        return next(seat.state for seat in self.supervisor.seats if seat.name == name)


@asynccontextmanager
async def crew(monkeypatch: pytest.MonkeyPatch, sockets: Path, **config: Any) -> AsyncIterator[Crew]:
    async with World(answer("a"), resume_s=5.0) as world:
        world.gateway.monitor.mark_down(world.link, "not used")
        made = Crew(ServeConfig(weights="", **config), world.gateway, sockets)
        monkeypatch.setattr(supervisor, "start_worker", lambda config, _: config)
        monkeypatch.setattr(supervisor, "LocalProcess", made.process)
        monkeypatch.setattr(supervisor, "STOP_S", 0.0)
        monkeypatch.setattr(supervisor, "WORDS_S", 0.0)
        monkeypatch.setattr(supervised_process, "AGAIN_S", 0.001)
        yield made
        made.supervisor.end()
        await made.supervisor.ended()
        made._serving.cancel()


TWO = (Workers(count=2),)


async def test_a_worker_that_is_killed_during_its_first_load_is_started_again_while_another_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with crew(monkeypatch, tmp_path, workers=TWO) as two:
        starting = two.start()
        await two.ready("worker-0")
        assert not starting.done(), "the other one still loads"
        (await two.started("worker-1", 1)).kill()
        assert await starting is not None
        (link,) = (link for link in two._gateway.workers if link.name == "worker-0")
        assert link.lost is None, "the worker that serves stays up"
        (await two.started("worker-1", 2)).kill()
        await two.ready("worker-1", 3)
        assert caplog.text.count("while it was loading the model; it is restarted") == 2
        assert all(worker.given_up is None for worker in two.supervisor.workers)


async def test_a_worker_that_is_killed_during_its_first_load_waits_for_another_to_be_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with crew(monkeypatch, tmp_path, workers=TWO) as two:
        starting = two.start()
        await two.started("worker-1", 1)
        (await two.started("worker-0", 1)).kill()
        await eventually(lambda: "worker-0: the worker has ended with code -9 while it was loading" in caplog.text)
        assert not starting.done()
        assert "restarted once another worker is ready" in caplog.text
        await two.ready("worker-1")
        assert await starting is not None
        await two.ready("worker-0", 2)


@pytest.mark.parametrize("resume_s", [0.0, 5.0])
async def test_where_no_worker_becomes_ready_the_deployment_ends_with_the_reason(
    resume_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with crew(monkeypatch, tmp_path, workers=TWO, resume_s=resume_s) as two:
        starting = two.start()
        (await two.started("worker-0", 1)).kill()
        (await two.started("worker-1", 1)).end(" with code 1")
        with pytest.raises(WorkerLost, match="with code -9 while it was loading the model"):
            await starting


async def test_where_all_that_answer_fail_again_and_again_the_deployment_ends_with_their_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pools = (Workers(role="prefill", name="cook"), Workers(role="decode", name="waiter"))
    async with crew(monkeypatch, tmp_path, workers=pools) as two:
        starting = two.start()
        await two.ready("cook")
        for epoch in range(1, MOST_ENDS + 1):
            (await two.started("waiter", epoch)).kill()
        with pytest.raises(WorkerLost, match="with code -9 while it was loading the model"):
            await starting


async def test_a_server_that_is_told_to_end_while_some_load_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with crew(monkeypatch, tmp_path, workers=TWO) as two:
        starting = two.start()
        await two.ready("worker-0")
        two.stop.set()
        assert await starting is None
        assert two._gateway.ready is not None, "so that it is drained"


async def test_a_worker_that_was_given_up_is_started_anew_when_it_is_to_be_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with crew(monkeypatch, tmp_path, workers=TWO) as two:
        starting = two.start()
        await two.ready("worker-0")
        await two.ready("worker-1")
        assert await starting is not None
        for epoch in range(1, MOST_ENDS + 1):
            (await two.started("worker-1", epoch)).kill()
        await eventually(lambda: two.state("worker-1") == "given up")
        assert "worker-1 does not run" in str(two.supervisor.turn("worker-1", "decode"))
        assert two.supervisor.replace("worker-1") == ("starting", "")
        assert two.supervisor.replace("worker-1") == (None, "worker-1 is being started already")
        for epoch in range(MOST_ENDS + 1, 2 * MOST_ENDS):
            (await two.started("worker-1", epoch)).kill()
        await two.ready("worker-1", 2 * MOST_ENDS)


async def test_which_workers_can_be_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with crew(monkeypatch, tmp_path, workers=(Workers(count=2, least=1),)) as two:
        starting = two.start()
        await two.started("worker-0", 1)
        assert two.supervisor.replace("worker-0") == (None, "worker-0 is being started already")
        await two.ready("worker-0")
        assert await starting is not None
        assert two.supervisor.replace("worker-1")[0] is None, "it is idle"
        assert "worker-1 does not run" in str(two.supervisor.turn("worker-1", "both"))
        assert [two.supervisor.replace("worker-0") for _ in range(2)] == [("draining", "")] * 2
        await two.ready("worker-0", 2)
        with pytest.raises(KeyError):
            two.supervisor.replace("cook")


async def given_up(all_: Supervisor) -> str:
    """The result of `given_up` for workers that have been ready once."""
    all_._proven.set()
    all_._lives = [asyncio.create_task(worker.live()) for worker in all_.workers]
    return await asyncio.wait_for(all_.given_up(), LIMIT_S)


async def test_a_worker_that_cannot_be_started_is_tried_again_and_given_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = NoProcess()
    monkeypatch.setattr(supervisor, "start_worker", start)
    monkeypatch.setattr(supervised_process, "AGAIN_S", 0.001)
    async with World(answer("a"), resume_s=5.0) as world:
        one = Supervisor(ServeConfig(weights=""), world.gateway.monitor, tmp_path / "sockets")
        world.gateway.monitor.mark_down(world.link, "not used")
        why = await given_up(one)
        assert start.epochs == list(range(1, MOST_ENDS + 1))
        assert start.alone == {True}, "there is one worker"
        assert "could not be started: [Errno 11]" in why
        assert world.gateway.workers.lost is not None, "waiting clients get the error"
        assert [link.lost is not None for link in world.gateway.workers] == [True]


async def test_a_worker_that_could_not_be_started_once_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = NoProcess()
    monkeypatch.setattr(supervisor, "start_worker", start)
    async with World(answer("a"), resume_s=5.0) as world:
        world.gateway.monitor.mark_down(world.link, "not used")
        all_ = Supervisor(ServeConfig(weights=""), world.gateway.monitor, tmp_path / "sockets")
        all_._proven.set()
        one = all_.workers[0]
        life = asyncio.create_task(one.live())
        await eventually(lambda: len(start.epochs) >= 2)
        one.stop()
        await asyncio.wait_for(life, LIMIT_S)
        assert one.given_up is None


async def test_a_worker_that_need_not_run_is_started_when_it_is_wanted_and_left_out_where_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = NoProcess()
    monkeypatch.setattr(supervisor, "start_worker", start)
    config = ServeConfig(weights="", workers=(Workers(count=2, least=1),))
    async with World(answer("a"), resume_s=5.0) as world:
        world.gateway.monitor.mark_down(world.link, "not used")
        all_ = Supervisor(config, world.gateway.monitor, tmp_path / "sockets")
        one = all_.workers[1]
        life = asyncio.create_task(one.live())
        await turns(20)
        assert start.epochs == []
        assert [seat.state for seat in all_.seats] == ["starting", "idle"]
        assert all_.spare("worker-1") == "worker-1 is idle"
        assert all_.spare("worker-0") == "worker-0 always runs"
        for epoch in (1, 2):
            assert all_.want("worker-1", "decode") is None
            assert all_.want("worker-1", "decode") == "worker-1 is starting"
            await eventually(lambda: one.seat.state == "idle")
            assert start.epochs == [*range(1, epoch + 1)], "once, and not five times in a row"
            assert "Resource temporarily unavailable" in (one.seat.failed or "")
            assert one.role == "decode"
        one.stop()
        await asyncio.wait_for(life, LIMIT_S)
        assert one.given_up is None
        with pytest.raises(KeyError):
            all_.want("cook", "both")


def test_a_process_that_is_given_too_little_says_what_and_how_to_give_more(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: dict[int, int] = {process.resource.RLIMIT_NOFILE: 4096, process.resource.RLIMIT_AS: -1}
    monkeypatch.setattr(process.resource, "getrlimit", lambda kind: (bounds[kind], bounds[kind]))
    process.check_process()
    for files in (16, 128):
        bounds[process.resource.RLIMIT_NOFILE] = files
        with pytest.raises(ConfigError, match=rf"may open {files} files; expected at least 256: ulimit -n 256"):
            process.check_process()
    bounds[process.resource.RLIMIT_NOFILE] = 4096
    bounds[process.resource.RLIMIT_AS] = 600_000 << 10
    with pytest.raises(ConfigError, match=r"limited to 0\.6 GiB of address space; .* ulimit -v unlimited"):
        process.check_process()


def test_a_package_that_workers_want_is_looked_for_before_one_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(ConfigError, match=r"torch is not installed for .*: run `make serve` in "):
        process.check_process()


def test_a_folder_that_has_been_deleted_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="the working directory has been deleted: cd to one that exists"):
        process.check_process()


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
