"""When each op of this thread began and ended, as the CPU's kernels write it down: a whole step is one native call.

Nobody watches at first, and then an op pays one look at a pointer.
"""

import ctypes
import functools
from typing import NamedTuple

import torch

from redline.kernels.cpu import native

ROOM = 1 << 14  # ops between two calls of `taken`: a step of Kimi-Nano has 70, one of Kimi K2 550

_watch = native.function("watch")


class OpTime(NamedTuple):
    """One op. Nanoseconds of the monotonic clock, as time.monotonic_ns tells."""

    name: str
    began_ns: int
    ended_ns: int


class OpTimes:
    """Watches the ops of the thread that makes it, until `close`. Needs the kernels (`native.library`)."""

    def __init__(self) -> None:
        self._times = torch.zeros(ROOM, 3, dtype=torch.int64)
        self._count = torch.zeros(2, dtype=torch.int64)
        _watch(times=self._times, count=self._count, room=ROOM)

    def taken(self) -> tuple[list[OpTime], int]:
        """What has run since the last call, in the order of their ends, and how many found no room."""
        count, missed = self._count.tolist()
        rows: list[list[int]] = self._times[:count].tolist()
        self._count.zero_()
        return [OpTime(_name(name), began, ended) for name, began, ended in rows], missed

    def close(self) -> None:
        """Nobody watches any more. Called in the same thread."""
        _watch(times=None, count=None, room=0)


@functools.cache
def _name(address: int) -> str:
    """An op's name lies in the library, for as long as this process runs."""
    return ctypes.string_at(address).decode()
