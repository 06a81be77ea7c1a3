"""Roles are tried in a process of their own, which ends with what it says (`redline.simulate.trial`)."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from redline.errors import RedlineError
from redline.simulate.trial import Trial
from redline.tune.expected import Roles, Traffic
from redline.tune.roles import Fleet
from redline.tune.targets import Targets

LONGEST_S = 60.0  # for all splits; a core of its own needs about one


async def tried(
    traffic: Traffic, fleet: Fleet, targets: Mapping[str, Targets], splits: Sequence[Roles]
) -> dict[Roles, float]:
    """Of the requests that came, as they came, the share that is good with each split (`simulate.fleet.tried`).

    Raises RedlineError where it took longer than LONGEST_S, or the process could not be started or did not say it.
    """
    trial = Trial(traffic=traffic, model=fleet.model, targets=dict(targets), splits=tuple(splits))
    pipe = asyncio.subprocess.PIPE
    command = sys.executable, "-m", "redline.simulate.trial"
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a Ctrl-C is for the server
        )  # fmt: skip
    except OSError as error:
        raise RedlineError(f"roles cannot be tried: {error}") from None
    try:
        async with asyncio.timeout(LONGEST_S):
            said, _ = await process.communicate(msgspec.msgpack.encode(trial))
    except TimeoutError:
        raise RedlineError(f"roles were tried for more than {LONGEST_S:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        raise RedlineError(f"the process that tries roles ended with code {process.returncode}")
    return dict(zip(splits, msgspec.msgpack.decode(said, type=list[float]), strict=True))
