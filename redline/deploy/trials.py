"""Replays recent traffic with other roles in a separate process, which exits with its result
(`redline.simulate.trial`)."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from redline.errors import RedlineError
from redline.policy.expected import Roles, Traffic
from redline.policy.roles import FleetRoles
from redline.policy.targets import Targets
from redline.simulate.trial import SimulationInput

LONGEST_S = 60.0  # timeout for all splits; on a core of its own the process needs about 1 s


async def tried(
    traffic: Traffic, fleet: FleetRoles, targets: Mapping[str, Targets], splits: Sequence[Roles]
) -> dict[Roles, float]:
    """The share of recent requests that would meet their SLO targets with each split (`simulate.fleet.tried`).

    Raises RedlineError if the process cannot be started, fails, or takes longer than LONGEST_S.
    """
    trial = SimulationInput(traffic=traffic, model=fleet.model, targets=dict(targets), splits=tuple(splits))
    pipe = asyncio.subprocess.PIPE
    command = sys.executable, "-m", "redline.simulate.trial"
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C must not reach it
        )  # fmt: skip
    except OSError as error:
        raise RedlineError(f"the simulation of roles cannot be started: {error}") from None
    try:
        async with asyncio.timeout(LONGEST_S):
            said, _ = await process.communicate(msgspec.msgpack.encode(trial))
    except TimeoutError:
        raise RedlineError(f"the simulation of roles took more than {LONGEST_S:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        raise RedlineError(f"the simulation of roles ended with code {process.returncode}")
    return dict(zip(splits, msgspec.msgpack.decode(said, type=list[float]), strict=True))
