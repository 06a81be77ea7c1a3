"""Tensor parallel ranks on a CPU: processes, or threads of one process, that all-reduce through shared memory.

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

_APART = 64  # bytes between the ranks' epoch counters
_ROOM = 1 << 18  # floats per rank in the shared buffer: larger tensors are reduced in pieces
_LOOK_S = 0.1  # seconds of a wait between checks for lost ranks and for signals
_all_reduce = native.function("all_reduce")


class SharedMemoryGroup:
    """A `Group` over a file of shared memory. Every rank has its own object, used by one thread at a time.

    seconds: timeout of one call while waiting for another rank. After a timeout or an interrupt this rank has left the
    group: its later calls raise RankLost too, since its data would be mistaken for those of another all-reduce.
    """

    def __init__(self, path: Path | str, rank: int, ranks: int, seconds: float = START_S) -> None:
        """path: a file made by `create`, for the same number of ranks. Rank 0 unlinks it once all have joined."""
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
        """Creates the file, readable only by this user.

        Raises FileExistsError if it exists, and ConfigError if there is not enough space.
        """
        file = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "wb")
        try:
            with file:
                file.write(bytes(_bytes(ranks)))  # allocates the space: a write to a mapped page without any is fatal
        except OSError as error:
            Path(path).unlink()
            size = f"{_bytes(ranks) / 1e6:.0f} MB"
            raise ConfigError(f"engine.ranks is {ranks}: they share {size} at {path} ({error.strerror})") from error

    def all_reduce(self, partial: Tensor) -> Tensor:
        """As `Group.all_reduce`: float32 [T, D], in new memory."""
        flat = partial.float().flatten()
        whole = torch.empty_like(flat)
        for first in range(0, len(flat), _ROOM):
            part = flat[first : first + _ROOM]
            self._call(part, whole[first : first + _ROOM], 0)
        return whole.view(partial.shape)

    def begin_all_reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        """As `Group.begin_all_reduce`, but blocking: a CPU has nothing to overlap with it."""
        whole = self.all_reduce(partial)
        return lambda: whole

    def begin_reduce_scatter(self, partial: Tensor) -> Callable[[], Tensor]:
        """As `Group.begin_reduce_scatter`, but blocking: float32, in new memory."""
        own = self.all_reduce(partial).chunk(self.ranks)[self.rank]
        return lambda: own

    def begin_all_gather_rows(self, own: Tensor, whole: Tensor) -> Callable[[], Tensor]:
        """As `Group.begin_all_gather_rows`, but blocking, and through float32."""
        whole.copy_(self.all_gather(own).unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(0, 1))
        return lambda: whole

    def all_gather(self, part_RV: Tensor) -> Tensor:
        """As `Group.all_gather`: float32 [R, V], in new memory. V / ranks is at most 262,144."""
        part_RV = part_RV.float().contiguous()
        rows, width = part_RV.shape
        whole = torch.empty(rows, self.ranks * width)
        most = _ROOM // width
        for first in range(0, rows, most):
            self._call(part_RV[first : first + most], whole[first : first + most], width)
        return whole

    def check(self) -> None:
        """Does nothing: a call that timed out has already raised, and later calls raise too."""

    def set_timeout(self, seconds: float) -> None:
        """As `Group.set_timeout`."""
        self.seconds = seconds

    def abort(self, reason: str) -> None:
        """As `Group.abort`; takes effect within 0.1 s."""
        self._lost = reason

    def close(self) -> None:
        """Unmaps the memory."""
        self._unlink()
        del self._floats
        self._memory.close()

    def _call(self, part: Tensor, whole: Tensor, width: int) -> None:
        if self._lost is not None:
            raise RankLost(self._lost)
        self._calls += 1
        missing: int | None = None
        try:
            # Counts time slices instead of reading a clock: if all processes were suspended, no rank is late.
            for _ in range(max(1, ceil(self.seconds / _LOOK_S))):
                missing = self._exchange(part, whole, width, min(self.seconds, _LOOK_S))
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
        """Unlinks the file, so that it is freed when the last process unmaps it."""
        if self._name is not None:
            self._name.unlink(missing_ok=True)
            self._name = None

    def _exchange(self, part: Tensor, whole: Tensor, width: int, seconds: float) -> int | None:
        """Returns the rank that did not arrive in time, or None. Can be retried: the other ranks see the same data."""
        _all_reduce(
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
