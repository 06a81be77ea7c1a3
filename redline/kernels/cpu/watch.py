"""Timestamps of each op of this thread, recorded by the CPU kernels, since a whole step is one native call.

Recording is off by default; then its cost is one pointer check per op.
"""

import ctypes
import functools
from typing import NamedTuple

import torch

from redline.kernels.cpu import native

ROOM = 1 << 14  # maximum ops between two calls of `taken`: a step of Kimi-Nano has 70, one of Kimi K2 550

_watch = native.function("watch")


class OpTime(NamedTuple):
    """One op. Nanoseconds of the monotonic clock, as in time.monotonic_ns."""

    name: str
    began_ns: int
    ended_ns: int


class OpTimes:
    """Records the ops of the creating thread until `close`. Requires the kernels (`native.library`)."""

    def __init__(self) -> None:
        self._times = torch.zeros(ROOM, 3, dtype=torch.int64)
        self._count = torch.zeros(2, dtype=torch.int64)
        _watch(times=self._times, count=self._count, room=ROOM)

    def taken(self) -> tuple[list[OpTime], int]:
        """The ops since the last call, in the order of their ends, and the number of ops dropped for lack of space."""
        count, missed = self._count.tolist()
        rows: list[list[int]] = self._times[:count].tolist()
        self._count.zero_()
        return [OpTime(_name(name), began, ended) for name, began, ended in rows], missed

    def close(self) -> None:
        """Stops recording. Call it in the same thread."""
        _watch(times=None, count=None, room=0)


@functools.cache
def _name(address: int) -> str:
    """The name of an op, a C string in the library, which stays loaded for the life of the process."""
    return ctypes.string_at(address).decode()
