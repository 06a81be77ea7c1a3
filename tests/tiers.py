"""Engines with KV offload tiers below the prefix cache, driven iteration by iteration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from redline.messages.delta import Delta
from redline.messages.job import Job
from redline.messages.news import TierLoad
from redline.run.tiers.tables import Tier
from redline.worker.engine import EngineCore
from redline.worker.tiers import Tiers
from redline.worker.turn import StepInFlight, turn
from tests.tiny_model import Answer, joined, open_engine, tiny_model

WAIT_S = 120.0  # timeout for the store's thread


def open_tiers(
    disk: Path | None = None, *, host_memory: int = 64 << 20, disk_size: int = 256 << 20, **engine: Any
) -> EngineCore:
    """An engine with few pages; default: host memory as the only tier. Close it with `close`."""
    below: dict[str, Any] = {"host_memory": host_memory}
    if disk is not None:
        below |= {"disk": str(disk), "disk_size": disk_size}
    few: dict[str, Any] = {"pages": 12, "step_tokens": 100, "max_model_len": 640}
    return open_engine(tiny_model(), **few | below | engine)


def tiers_of(engine: EngineCore) -> Tiers:
    assert engine.tiers is not None
    return engine.tiers


def tier(engine: EngineCore, name: Tier) -> TierLoad:
    return next(one for one in tiers_of(engine).figures() if one.name == name)


def run(engine: EngineCore, jobs: Sequence[Job], *, settle: bool = True) -> dict[str, Answer]:
    """Run all jobs to their ends, as `worker.loop.lead` does. settle: wait for the store's thread in each iteration."""
    return {name: joined(parts) for name, parts in told(engine, jobs, settle=settle).items()}


def told(engine: EngineCore, jobs: Sequence[Job], *, settle: bool = True) -> dict[str, list[Delta]]:
    """As `run`, but returns the deltas of the jobs."""
    tiers, deltas = tiers_of(engine), {str(job.id): list[Delta]() for job in jobs}
    flight: StepInFlight | None = None
    with torch.inference_mode():
        first = [delta for job in jobs for delta in engine.planner.submit(job)]
        while first or flight or not (engine.planner.idle and tiers.idle):
            flight, settled = turn(engine.planner, engine.runner, flight)
            for delta in first + settled:
                deltas[delta.job].append(delta)
            first = []
            tiers.work()
            if settle:
                assert tiers.store.settle(WAIT_S)
                tiers.store.check()
            tiers.check()
            engine.planner.check()
    assert engine.planner.load().pages_used == 0
    return deltas


def close(engine: EngineCore) -> None:
    """Close the engine, as a worker does at Stop."""
    engine.planner.abort_all()
    engine.planner.check()
    tiers_of(engine).stop()
    engine.runner.close()
