"""Agents that Ray starts: one actor per worker, in a bundle of one placement group, on any machine with room.

Ray places agents and restarts them when their machine fails; an agent then joins the server as any other does, and no
order, prompt or token goes through Ray. The Ray driver is a separate process next to the server, so the API process
does not import Ray. The actors end with the driver, and the driver ends with the server.
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
from redline.deploy.agent import AgentConfig, agent_of
from redline.deploy.config import ServeConfig, WorkerSpec
from redline.deploy.lines import lines_on_stderr
from redline.deploy.process import STOP_SIGNALS
from redline.errors import ConfigError
from redline.messages.base import Record

AGAIN_S = 5.0  # pause before the driver is restarted: the Ray cluster may not be up yet, or may be down
LOOK_S = 5.0  # between two warnings that the placement group has no room yet
END_S = 15.0  # for the driver to remove its actors

log = logging.getLogger("redline.deploy")


class Bundle(Record, frozen=True):
    """The resources of one worker's agent on one machine."""

    name: str  # of the worker, and of the agent
    cpus: int
    gpus: int


class Told(Record, frozen=True):
    """One line of JSON on the driver's standard input. The key stays in its file, which each machine has."""

    join: str
    key_file: str
    bundles: tuple[Bundle, ...]


def bundle_of(place: WorkerSpec) -> Bundle:
    """One GPU per rank, or none with device = "cpu"; one CPU per entry of `cores`, by default one per rank."""
    gpus = 0 if place.engine.device == "cpu" else place.engine.ranks
    return Bundle(name=place.name, cpus=len(place.cores) or place.engine.ranks, gpus=gpus)


def check_ray() -> None:
    """Raises ConfigError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("cluster.kind is \"ray\", which is not installed: pip install 'redline[ray]'")


@asynccontextmanager
async def agents_by_ray(config: ServeConfig, join: str) -> AsyncGenerator[None]:
    """While inside, Ray runs an agent for each worker, which joins at `join`."""
    assert config.cluster is not None
    told = Told(join=join, key_file=config.cluster.key_file, bundles=tuple(map(bundle_of, config.places)))
    keeping = asyncio.create_task(_keep(told))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})


async def _keep(told: Told) -> None:
    """Run a driver, and restart it when it ends, until cancelled."""
    while True:
        driver = _start(told)
        try:
            while driver.poll() is None:
                await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            _end(driver)
            raise
        log.error("the Ray driver has ended with code %d; it is restarted in %g s", driver.returncode, AGAIN_S)
        _end(driver)
        await asyncio.sleep(AGAIN_S)


def _start(told: Told) -> "subprocess.Popen[bytes]":
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as for a worker: it ends only with its pipe
    try:
        driver = subprocess.Popen([sys.executable, "-m", "redline.deploy.by_ray"], stdin=subprocess.PIPE)
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
    """An agent in a Ray worker process. If Ray restarts the process, a new agent is created."""

    def __init__(self, join: str, key_file: str, name: str) -> None:
        """Raises ConfigError for a key file that this machine does not have."""
        agent = agent_of(AgentConfig(join, Path(key_file), name))

        def live() -> None:
            try:
                with lines_on_stderr("info", as_json=False):
                    asyncio.run(agent.live())
            finally:
                os._exit(1)  # an actor without an agent is useless; Ray restarts it

        threading.Thread(target=live, name="agent", daemon=True).start()
        threading.Thread(target=_leave_with, args=(os.getppid(),), name="parent", daemon=True).start()

    def is_there(self) -> bool:
        """Ray answers the call once the actor has started."""
        return True


def _leave_with(parent: int) -> None:
    """Exit when the parent process ends. If the raylet of this machine dies, Ray starts the actor elsewhere but does
    not always kill it here, which would leave two agents with one name."""
    while os.getppid() == parent:
        clock.sleep(1.0)
    os._exit(1)


def main() -> int:
    """The driver: keeps the agents that it reads from standard input running until standard input is closed."""
    told = msgspec.json.decode(sys.stdin.buffer.readline(), type=Told)
    ended = threading.Event()

    def until_the_end() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=until_the_end, daemon=True).start()
    with lines_on_stderr("info", as_json=False):
        try:
            _drive(told, ended)
        except Exception as error:  # the outermost handler: one line, and the server starts another driver
            log.error("Ray: %s", str(error).strip().splitlines()[-1])
            return 1
    return 0


def _drive(told: Told, ended: threading.Event) -> None:
    ray: Any = import_module("ray")
    groups: Any = import_module("ray.util.placement_group")
    strategies: Any = import_module("ray.util.scheduling_strategies")
    ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)  # the cluster at RAY_ADDRESS
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
    # Ray pickles an actor's class by its module name, and "__main__" is another module in the actor's process.
    sys.exit(import_module("redline.deploy.by_ray").main())
