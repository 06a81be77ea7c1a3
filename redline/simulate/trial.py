"""The process in which roles are tried: playing some hundred requests takes a second, in which a server's streams would
wait for the interpreter.

Standard input has a `Trial`, standard output the shares of requests that are good, one for each split; both msgpack.
"""

import os
import sys

import msgspec

from redline.simulate.fleet import tried
from redline.tune.expected import Roles, Traffic, WorkerModel
from redline.tune.targets import Targets
from redline.wire.base import Record

NICE = 10  # whoever serves goes first


class Trial(Record, frozen=True):
    """What is to be tried; the fields as `simulate.fleet.tried` has them."""

    traffic: Traffic
    model: WorkerModel
    targets: dict[str, Targets]
    splits: tuple[Roles, ...]


def main() -> None:
    """Try what standard input has."""
    os.nice(NICE)
    trial = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Trial)
    shares = tried(trial.traffic, trial.model, trial.targets, trial.splits)
    sys.stdout.buffer.write(msgspec.msgpack.encode([shares[roles] for roles in trial.splits]))


if __name__ == "__main__":
    main()
