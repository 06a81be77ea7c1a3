"""The process that simulates roles: a simulation of some hundred requests takes a second, during which it would block
the streams of the server process (GIL).

Reads a `SimulationInput` from standard input; writes the attainment of each split to standard output; both in msgpack.
"""

import os
import sys

import msgspec

from redline.messages.base import Record
from redline.policy.expected import Roles, Traffic, WorkerModel
from redline.policy.targets import Targets
from redline.simulate.fleet import tried

NICE = 10  # lower priority than the serving processes


class SimulationInput(Record, frozen=True):
    """The input of a simulation; the fields are the arguments of `simulate.fleet.tried`."""

    traffic: Traffic
    model: WorkerModel
    targets: dict[str, Targets]
    splits: tuple[Roles, ...]


def main() -> None:
    """Simulate the `SimulationInput` on standard input."""
    os.nice(NICE)
    trial = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SimulationInput)
    shares = tried(trial.traffic, trial.model, trial.targets, trial.splits)
    sys.stdout.buffer.write(msgspec.msgpack.encode([shares[roles] for roles in trial.splits]))


if __name__ == "__main__":
    main()
