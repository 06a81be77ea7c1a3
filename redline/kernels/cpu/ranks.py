"""The ranks of one model on a CPU: processes, or threads of one, that add up partial sums in memory that they share.

T tokens, D hidden, R rows, V vocabulary.
"""

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from redline.errors import RankLost
from redline.kernels.cpu import native

_APART = 64  # bytes between the ranks' epochs
_ROOM = 1 << 18  # floats of a rank in a room: larger tensors are added up piece by piece
_meet = native.function("meet")


class SharedMemoryGroup:
    """A `Group` over a file of shared memory. Every rank has its own object, which one thread at a time may use.

    seconds: that a rank may keep another waiting in one call; it may be changed at any time, by each rank for itself.
    """

    def __init__(self, path: Path | str, rank: int, ranks: int, seconds: float) -> None:
        """path: a file of `create`, for the same number of ranks."""
        self.rank, self.ranks = rank, ranks
        self.seconds = seconds
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _bytes(ranks))
        self._floats = torch.frombuffer(self._memory, dtype=torch.float32)
        self._epochs = self._floats.data_ptr()
        self._rooms = self._epochs + ranks * _APART
        self._missing = torch.zeros(1, dtype=torch.int32)
        self._calls = 0

    @staticmethod
    def create(path: Path | str, ranks: int) -> None:
        """Makes the file, which only this user may read. Raises FileExistsError where there is one."""
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.truncate(descriptor, _bytes(ranks))
        finally:
            os.close(descriptor)

    def add(self, partial: Tensor) -> Tensor:
        """As `Group.add`: float32 [T, D], in new memory."""
        flat = partial.float().flatten()
        whole = torch.empty_like(flat)
        for first in range(0, len(flat), _ROOM):
            part = flat[first : first + _ROOM]
            self._call(part, whole[first : first + _ROOM], 0)
        return whole.view(partial.shape)

    def gather(self, part_RV: Tensor) -> Tensor:
        """As `Group.gather`: float32 [R, V], in new memory. V / ranks is at most 262,144."""
        part_RV = part_RV.float().contiguous()
        rows, width = part_RV.shape
        whole = torch.empty(rows, self.ranks * width)
        most = _ROOM // width
        for first in range(0, rows, most):
            self._call(part_RV[first : first + most], whole[first : first + most], width)
        return whole

    def meet(self) -> None:
        """Returns once every rank has come here."""
        self.add(torch.zeros(1))

    def check(self) -> None:
        """A rank that is lost has been told by the call that waited for it."""

    def close(self) -> None:
        """Lets the memory go."""
        del self._floats
        self._memory.close()

    def _call(self, part: Tensor, whole: Tensor, width: int) -> None:
        self._calls += 1
        _meet(
            epochs=self._epochs,
            rooms=self._rooms,
            part=part,
            whole=whole,
            missing=self._missing,
            count=part.numel(),
            room=_ROOM,
            width=width,
            wait_ns=int(self.seconds * 1e9),
            epoch=self._calls,
            rank=self.rank,
            ranks=self.ranks,
        )
        if (missing := int(self._missing[0])) >= 0:
            raise RankLost(
                f"rank {missing} has kept rank {self.rank} waiting for {self.seconds:g} s in sum {self._calls:,}"
            )


def _bytes(ranks: int) -> int:
    return ranks * _APART + 2 * ranks * _ROOM * 4
