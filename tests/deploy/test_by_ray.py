"""Which resources Ray is asked for, and how its driver is supervised. Ray itself is tested by `make test-ray`."""

import asyncio
import subprocess

import pytest

from redline.deploy import by_ray
from redline.deploy.by_ray import Bundle, Told, bundle_of, check_ray
from redline.deploy.config import WorkerSpec
from redline.errors import ConfigError
from redline.worker.config import EngineConfig
from tests.waiting import eventually

TOLD = Told(join="tcp://127.0.0.1:9", key_file="key", bundles=())


@pytest.mark.parametrize(
    ("place", "bundle"),
    [
        (WorkerSpec("a", "both", EngineConfig()), Bundle(name="a", cpus=1, gpus=1)),
        (WorkerSpec("a", "both", EngineConfig(ranks=8)), Bundle(name="a", cpus=8, gpus=8)),
        (WorkerSpec("a", "both", EngineConfig(device="cpu", ranks=2)), Bundle(name="a", cpus=2, gpus=0)),
        (WorkerSpec("a", "both", EngineConfig(device="cpu"), cores=(0, 1, 2)), Bundle(name="a", cpus=3, gpus=0)),
    ],
)
def test_a_worker_is_given_what_its_ranks_need(place: WorkerSpec, bundle: Bundle) -> None:
    assert bundle_of(place) == bundle


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_ray, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r'cluster.kind is "ray", .* pip install \'redline\[ray\]\''):
        check_ray()


def test_a_driver_that_ends_is_followed_by_another_which_ends_with_its_pipe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[subprocess.Popen[bytes]] = []

    def start(told: Told) -> "subprocess.Popen[bytes]":
        made.append(subprocess.Popen([["false"], ["cat"]][len(made)], stdin=subprocess.PIPE))
        return made[-1]

    monkeypatch.setattr(by_ray, "_start", start)
    monkeypatch.setattr(by_ray, "AGAIN_S", 0.01)

    async def live() -> None:
        keeping = asyncio.create_task(by_ray._keep(TOLD))
        await eventually(lambda: len(made) == 2)
        keeping.cancel()
        await asyncio.wait({keeping})

    asyncio.run(live())
    assert "the Ray driver has ended with code 1" in caplog.text
    assert [driver.returncode for driver in made] == [1, 0]
