"""The ranks of one model on a CPU: processes, or threads of one, that add up partial sums in memory that they share.

T tokens, D hidden, R rows, V vocabulary.
"""

import mmap
import os
from collections.abc import Callable
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from redline.errors import ConfigError, RankLost
from redline.kernels.cpu import native
from redline.kernels.group import START_S

_APART = 64  # bytes between the ranks' epochs
_ROOM = 1 << 18  # floats of a rank in a room: larger tensors are added up piece by piece
_LOOK_S = 0.1  # of a wait, between two looks at whether a rank is known to be lost, and for signals
_meet = native.function("meet")


class SharedMemoryGroup:
    """A `Group` over a file of shared memory. Every rank has its own object, which one thread at a time may use.

    seconds: that a rank may keep this one waiting in one call. Whoever has waited in vain, or was interrupted, has left
    the group: each later call raises RankLost too, since its words would be taken for those of another sum.
    """

    def __init__(self, path: Path | str, rank: int, ranks: int, seconds: float = START_S) -> None:
        """path: a file of `create`, for the same number of ranks. Rank 0 takes the name away once all have met."""
        self.rank, self.ranks = rank, ranks
        self.seconds = seconds
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _bytes(ranks))
        self._floats = torch.frombuffer(self._memory, dtype=torch.float32)
        self._epochs = self._floats.data_ptr()
        self._rooms = self._epochs + ranks * _APART
        self._missing = torch.zeros(1, dtype=torch.int32)
        self._calls = 0
        self._lost: str | None = None
        self._name = Path(path) if rank == 0 else None

    @staticmethod
    def create(path: Path | str, ranks: int) -> None:
        """Makes the file, which only this user may read.

        Raises FileExistsError where there is one, and ConfigError where there is no room for it.
        """
        file = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "wb")
        try:
            with file:
                file.write(bytes(_bytes(ranks)))  # taken now: who writes to a mapped page that has no room is killed
        except OSError as error:
            Path(path).unlink()
            size = f"{_bytes(ranks) / 1e6:.0f} MB"
            raise ConfigError(f"engine.ranks is {ranks}: they share {size} at {path} ({error.strerror})") from error

    def add(self, partial: Tensor) -> Tensor:
        """As `Group.add`: float32 [T, D], in new memory."""
        flat = partial.float().flatten()
        whole = torch.empty_like(flat)
        for first in range(0, len(flat), _ROOM):
            part = flat[first : first + _ROOM]
            self._call(part, whole[first : first + _ROOM], 0)
        return whole.view(partial.shape)

    def begin_add(self, partial: Tensor) -> Callable[[], Tensor]:
        """As `Group.begin_add`, and ends it: a CPU has nothing else to do meanwhile."""
        whole = self.add(partial)
        return lambda: whole

    def begin_add_rows(self, partial: Tensor) -> Callable[[], Tensor]:
        """As `Group.begin_add_rows`, and ends it: float32, in new memory."""
        own = self.add(partial).chunk(self.ranks)[self.rank]
        return lambda: own

    def begin_gather_rows(self, own: Tensor, whole: Tensor) -> Callable[[], None]:
        """As `Group.begin_gather_rows`, and ends it: by way of float32."""
        whole.copy_(self.gather(own).unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(0, 1))
        return lambda: None

    def gather(self, part_RV: Tensor) -> Tensor:
        """As `Group.gather`: float32 [R, V], in new memory. V / ranks is at most 262,144."""
        part_RV = part_RV.float().contiguous()
        rows, width = part_RV.shape
        whole = torch.empty(rows, self.ranks * width)
        most = _ROOM // width
        for first in range(0, rows, most):
            self._call(part_RV[first : first + most], whole[first : first + most], width)
        return whole

    def check(self) -> None:
        """The call that waited has raised already, and the next one would."""

    def allow(self, seconds: float) -> None:
        """As `Group.allow`."""
        self.seconds = seconds

    def lose(self, reason: str) -> None:
        """As `Group.lose`: within a tenth of a second."""
        self._lost = reason

    def close(self) -> None:
        """Lets the memory go."""
        self._unlink()
        del self._floats
        self._memory.close()

    def _call(self, part: Tensor, whole: Tensor, width: int) -> None:
        if self._lost is not None:
            raise RankLost(self._lost)
        self._calls += 1
        missing: int | None = None
        try:
            # Slices are counted, not a clock read: where all were stopped for a while, nobody is late.
            for _ in range(max(1, ceil(self.seconds / _LOOK_S))):
                missing = self._meet(part, whole, width, min(self.seconds, _LOOK_S))
                if missing is None:
                    self._unlink()
                    return
                if self._lost is not None:
                    break
            else:
                kept = f"rank {missing} has kept rank {self.rank} waiting for {self.seconds:g} s"
                self._lost = f"{kept} in sum {self._calls:,}"
        except BaseException:
            self._lost = f"rank {self.rank} was interrupted in sum {self._calls:,}"
            raise
        raise RankLost(self._lost)

    def _unlink(self) -> None:
        """Takes the file's name away, so that it ends with the last of those that have it mapped."""
        if self._name is not None:
            self._name.unlink(missing_ok=True)
            self._name = None

    def _meet(self, part: Tensor, whole: Tensor, width: int, seconds: float) -> int | None:
        """The rank that did not come in time. It may be called again: the others then find the same words once more."""
        _meet(
            epochs=self._epochs,
            rooms=self._rooms,
            part=part,
            whole=whole,
            missing=self._missing,
            count=part.numel(),
            room=_ROOM,
            width=width,
            wait_ns=int(seconds * 1e9),
            epoch=self._calls,
            rank=self.rank,
            ranks=self.ranks,
        )
        missing = int(self._missing[0])
        return None if missing < 0 else missing


def _bytes(ranks: int) -> int:
    return ranks * _APART + 2 * ranks * _ROOM * 4
