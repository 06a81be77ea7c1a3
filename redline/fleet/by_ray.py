"""Agents that Ray starts: for each worker an actor, in a bundle of one placement group, on whichever machine has room.

Ray places agents and starts them again with their machine; an agent then joins the server as any other does, and no
order, prompt or token goes through Ray. A process beside the server is Ray's driver, so the API imports none of it. Its
actors end with it, and it ends with the server.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from redline import clock
from redline.errors import ConfigError
from redline.fleet.agent import AgentConfig, agent_of
from redline.fleet.config import Place, ServeConfig
from redline.fleet.lines import lines_on_stderr
from redline.fleet.process import STOP_SIGNALS
from redline.wire.base import Record

AGAIN_S = 5.0  # before the driver is started again: a cluster may be late, or have gone
LOOK_S = 5.0  # between two words that there is no room yet
END_S = 15.0  # for the driver to take its actors away

log = logging.getLogger("redline.fleet")


class Bundle(Record, frozen=True):
    """What the agent of one worker is given of one machine."""

    name: str  # of the worker, and of its machine
    cpus: int
    gpus: int


class Told(Record, frozen=True):
    """One line of JSON on the driver's standard input. The key stays in its file, which each machine has."""

    join: str
    key_file: str
    bundles: tuple[Bundle, ...]


def bundle_of(place: Place) -> Bundle:
    """GPUs by its ranks, unless it is told to run on the CPU; processors by its cores, one for each rank otherwise."""
    gpus = 0 if place.engine.device == "cpu" else place.engine.ranks
    return Bundle(name=place.name, cpus=len(place.cores) or place.engine.ranks, gpus=gpus)


def check_ray() -> None:
    """Raises ConfigError where Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("cluster.kind is \"ray\", which is not installed: pip install 'redline[ray]'")


@asynccontextmanager
async def agents_by_ray(config: ServeConfig, join: str) -> AsyncGenerator[None]:
    """While inside, Ray has an agent for each worker, which joins at `join`."""
    assert config.cluster is not None
    told = Told(join=join, key_file=config.cluster.key_file, bundles=tuple(map(bundle_of, config.places)))
    keeping = asyncio.create_task(_keep(told))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})


async def _keep(told: Told) -> None:
    """One driver after another, until cancelled."""
    while True:
        driver = _start(told)
        try:
            while driver.poll() is None:
                await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            _end(driver)
            raise
        log.error("Ray's driver has ended with code %d; it is started again in %g s", driver.returncode, AGAIN_S)
        _end(driver)
        await asyncio.sleep(AGAIN_S)


def _start(told: Told) -> "subprocess.Popen[bytes]":
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as a worker: it ends with its pipe alone
    try:
        driver = subprocess.Popen([sys.executable, "-m", "redline.fleet.by_ray"], stdin=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert driver.stdin is not None
    with suppress(BrokenPipeError):
        driver.stdin.write(msgspec.json.encode(told) + b"\n")
        driver.stdin.flush()
    return driver


def _end(driver: "subprocess.Popen[bytes]") -> None:
    if driver.stdin is not None:
        with suppress(BrokenPipeError):
            driver.stdin.close()
    try:
        driver.wait(END_S)
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.wait()


# -------------------------------------------------------------------------------------------------- the driver itself


class AgentActor:
    """An agent in a process of Ray's; where Ray starts the process again, there is a new one."""

    def __init__(self, join: str, key_file: str, name: str) -> None:
        """Raises ConfigError for a key file that this machine does not have."""
        agent = agent_of(AgentConfig(join, Path(key_file), name))

        def live() -> None:
            try:
                with lines_on_stderr("info", as_json=False):
                    asyncio.run(agent.live())
            finally:
                os._exit(1)  # an actor without an agent would be of no use to anybody

        threading.Thread(target=live, name="agent", daemon=True).start()
        threading.Thread(target=_leave_with, args=(os.getppid(),), name="parent", daemon=True).start()

    def is_there(self) -> bool:
        """Once it answers, it is."""
        return True


def _leave_with(parent: int) -> None:
    """Where Ray's own process of this machine has ended, Ray starts the actor elsewhere, and does not always end it
    here: two agents of one name would be left."""
    while os.getppid() == parent:
        clock.sleep(1.0)
    os._exit(1)


def main() -> int:
    """The driver: what is told on standard input is kept running until that ends."""
    told = msgspec.json.decode(sys.stdin.buffer.readline(), type=Told)
    ended = threading.Event()

    def until_the_end() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=until_the_end, daemon=True).start()
    with lines_on_stderr("info", as_json=False):
        try:
            _drive(told, ended)
        except Exception as error:  # the last place: one line, and the server starts another
            log.error("Ray: %s", str(error).strip().splitlines()[-1])
            return 1
    return 0


def _drive(told: Told, ended: threading.Event) -> None:
    ray: Any = import_module("ray")
    groups: Any = import_module("ray.util.placement_group")
    strategies: Any = import_module("ray.util.scheduling_strategies")
    ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)  # the cluster, as RAY_ADDRESS has it
    try:
        bundles = [_resources(bundle) for bundle in told.bundles]
        group = groups.placement_group(bundles, strategy="SPREAD")
        while not group.wait(LOOK_S):
            if ended.is_set():
                return
            log.warning("Ray has no room yet for %s", bundles)
        remote = ray.remote(AgentActor)
        actors = [
            remote.options(
                num_cpus=bundle.cpus,
                num_gpus=bundle.gpus,
                max_restarts=-1,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, number),
            ).remote(told.join, told.key_file, bundle.name)
            for number, bundle in enumerate(told.bundles)
        ]
        ray.get([actor.is_there.remote() for actor in actors])
        log.info("Ray has an agent for each of %s", ", ".join(bundle.name for bundle in told.bundles))
        ended.wait()
        for actor in actors:
            ray.kill(actor)
        groups.remove_placement_group(group)
    finally:
        ray.shutdown()


def _resources(bundle: Bundle) -> dict[str, float]:
    return {name: float(count) for name, count in (("CPU", bundle.cpus), ("GPU", bundle.gpus)) if count}


if __name__ == "__main__":
    # By its own name: an actor's class travels as where it is imported from, and "__main__" is another thing there.
    sys.exit(import_module("redline.fleet.by_ray").main())
