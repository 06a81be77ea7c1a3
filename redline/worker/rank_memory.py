"""Memory that the ranks of one worker share: what rank 0 has there, every rank puts into its own pages.

That of the host has no name, so nothing is left of it, whoever is killed: ranks that follow inherit its file. That of
rank 0's GPU they map (CUDA IPC), and copy out of it with their own. In both cases a rank counts, in the host's, what it
has taken, so rank 0 sees when bytes may go, and asks nobody.
"""

import contextlib
import ctypes
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redline import clock, limits
from redline.disk import human
from redline.errors import ConfigError
from redline.run.handoff import Parcels, of_its_pages
from redline.run.kv import KvPool
from redline.transport.base import Memory
from redline.transport.peer import HANG_S, LOOK_S, Chip
from redline.wire.handoff import Piece
from redline.wire.job import PageId
from redline.wire.ranks import Export, Grow, Scatter
from redline.worker.parcel_memory import STAGED_BYTES, pin, stage

_APART = 8  # words of 8 bytes between two ranks' counts, which they write
_COMPILED = 1  # place of the count of grammars among a rank's; that of parcels is the first
_ROOM = mmap.ALLOCATIONGRANULARITY  # bytes of all counts, and what each part begins at a whole number of


class RankMemory:
    """Rank 0's end. `file`: what the others inherit."""

    def __init__(self, ranks: int) -> None:
        """ranks: how many there are, rank 0 included."""
        self.file = _without_a_name()
        self.told = 0  # parcels
        self._ranks = ranks
        self._bytes = _ROOM
        os.ftruncate(self.file, _ROOM)
        self._counts = _counts(self.file)
        self._parts: list[tuple[int, Memory]] = []
        self._exported: list[Memory] = []

    def export(self, chip: Chip, size: int) -> tuple[Memory, Export]:
        """So many bytes of rank 0's GPU, zeros, and what the others have to be told. Raises ConfigError where there is
        no room."""
        try:
            exported = chip.export(size)
        except RuntimeError as error:
            raise ConfigError(
                f"engine.ranks: they share {human(size)} of rank 0's GPU for pages that come, which it does not give "
                f"({error}); a smaller engine.kv_memory leaves it more"
            ) from error
        memory = Memory(exported.address, size, chip.device, owner=exported)
        self._exported.append(memory)
        return memory, Export(handle=exported.handle, size=size)

    def grow(self, size: int) -> tuple[Memory, Grow]:
        """So many bytes more, zeros, and what the others have to be told. Raises ConfigError where there is no room."""
        first, whole = self._bytes, -(-size // _ROOM) * _ROOM
        # The file has no bound of its own: whoever takes more than there is has processes killed, its own or others.
        if whole > (free := limits.free_memory()):
            raise ConfigError(f"engine.ranks: they share {human(size)} of memory for pages, and {human(free)} are free")
        try:
            os.posix_fallocate(self.file, first, whole)  # taken now: who writes to a page without room is killed
            mapped = mmap.mmap(self.file, whole, offset=first)
        except OSError as error:
            raise ConfigError(
                f"engine.ranks: they share {human(size)} of memory for pages ({error.strerror})"
            ) from error
        held = (ctypes.c_char * size).from_buffer(mapped)
        memory = Memory(ctypes.addressof(held), size, owner=held)
        self._parts.append((first, memory))
        self._bytes += whole
        return memory, Grow(bytes=self._bytes)

    def scatter(self, piece: Piece, pages: Sequence[PageId], from_B: Tensor) -> Scatter:
        """What the others are to be told of a parcel in this memory. pages: of the job, from its first on."""
        address, size = from_B.data_ptr(), from_B.numel()
        moved, its = of_its_pages(piece, pages)
        number = next((i for i, memory in enumerate(self._exported) if memory.holds(address, size)), None)
        if number is not None:
            first, memory = 0, self._exported[number]
        else:
            first, memory = next(part for part in self._parts if part[1].holds(address, size))
        self.told += 1
        return Scatter(piece=moved, pages=its, offset=first + address - memory.address, size=size, exported=number)

    def taken(self, rank: int) -> int:
        """Parcels of which a rank needs the bytes no more, of those that it was told of."""
        return self._counts[rank * _APART]

    def all_have(self, number: int) -> bool:
        """Whether no rank needs the bytes of the first so many parcels any more."""
        return all(self.taken(rank) >= number for rank in range(1, self._ranks))

    def compiled(self, number: int) -> bool:
        """Whether every other rank has compiled the first so many grammars that it was told of."""
        return all(self._counts[rank * _APART + _COMPILED] >= number for rank in range(1, self._ranks))

    def close(self) -> None:
        """Nobody else comes to have it. Who has it mapped keeps it."""
        with contextlib.suppress(OSError):
            os.close(self.file)


def peer_gpu(device: torch.device) -> Chip:
    """This process's GPU."""
    from redline.kernels.hopper.peers import PeerGpu

    return PeerGpu(device)


class FollowedMemory:
    """The end of a rank that follows: it puts parcels into its own pages."""

    def __init__(self, file: int, rank: int, kv: KvPool, chip_of: Callable[[torch.device], Chip] = peer_gpu) -> None:
        """file: inherited from rank 0. chip_of: opens this rank's GPU, once rank 0 exports memory of its own."""
        self._file, self._rank = file, rank
        self._chip_of = chip_of
        self._chip: Chip | None = None
        self._exported: list[Memory] = []  # as this rank's GPU sees it
        self._counts = _counts(file)
        self._parcels = Parcels(kv)
        self._device = kv.planes.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._staged: deque[tuple[int, torch.cuda.Event]] = deque()  # bytes that wait for the stream of steps
        self._bytes = _ROOM
        self._parts: list[tuple[int, Tensor]] = []

    def has_compiled(self) -> None:
        """Counts a grammar of those that rank 0 has told of. One thread calls this."""
        self._counts[self._rank * _APART + _COMPILED] += 1

    def grow(self, told: Grow) -> None:
        """Maps what has come, and pins it where a GPU reads it. Raises RuntimeError where that is refused."""
        part_B = torch.frombuffer(
            mmap.mmap(self._file, told.bytes - self._bytes, offset=self._bytes), dtype=torch.uint8
        )
        if self._stream is not None:
            pin(part_B)
        self._parts.append((self._bytes, part_B))
        self._bytes = told.bytes

    def map(self, told: Export) -> None:
        """Maps memory of rank 0's GPU. Raises RuntimeError where that is refused."""
        if self._chip is None:
            self._chip = self._chip_of(self._device)
        self._exported.append(Memory(self._chip.map(told.handle), told.size))

    def scatter(self, told: Scatter) -> None:
        """Puts a parcel into pages: steps that are launched from now on find it there. Then its bytes may go: a GPU has
        a copy of them, for which no step is waited for, but where many such wait already. Raises RuntimeError where a
        GPU does not copy."""
        if told.exported is not None:
            self._place(told, self._copied(told))
        else:
            first, part_B = next(part for part in reversed(self._parts) if part[0] <= told.offset)
            parcel_B = part_B[told.offset - first : told.offset - first + told.size]
            if self._stream is None:
                self._place(told, parcel_B)
            else:
                self._make_room(told.size)
                staged_B, copied = stage(parcel_B, self._device, self._stream)
                self._place(told, staged_B)
                copied.synchronize()
        self._counts[self._rank * _APART] += 1

    def _copied(self, told: Scatter) -> Tensor:
        """A parcel of rank 0's GPU, in this one's memory: it is there once this returns, some 0.1 ms for 32 MiB."""
        assert self._chip is not None, "memory that was mapped"
        assert told.exported is not None, "a parcel of it"
        source = self._exported[told.exported]
        self._make_room(told.size)
        # Memory of the stream of copies: its parcels before have been copied, and steps that place them are recorded.
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            staged_B = torch.empty(told.size, dtype=torch.uint8, device=self._device)
        ended = self._chip.copy(staged_B.data_ptr(), source.address + told.offset, told.size)
        until = clock.monotonic() + HANG_S
        while not ended():
            if clock.monotonic() > until:
                raise RuntimeError(f"the GPU has not ended a copy from rank 0's in {HANG_S:g} s")
            clock.sleep(LOOK_S)
        if self._stream is not None:
            staged_B.record_stream(torch.cuda.default_stream(self._device))
        return staged_B

    def _place(self, told: Scatter, parcel_B: Tensor) -> None:
        """On a GPU by the stream of steps, behind whatever still uses the pages."""
        if self._stream is None:
            self._parcels.scatter(told.piece, told.pages, parcel_B)
            return
        with torch.cuda.stream(torch.cuda.default_stream(self._device)):
            self._parcels.scatter(told.piece, told.pages, parcel_B)
            placed = torch.cuda.Event()
            placed.record()
        self._staged.append((told.size, placed))

    def _make_room(self, size: int) -> None:
        """Waits for the stream of steps, where more copies would wait for it than there is room for."""
        while self._staged:
            waiting = sum(each for each, _ in self._staged)
            if waiting + size <= STAGED_BYTES and not self._staged[0][1].query():
                return
            self._staged.popleft()[1].synchronize()


def _counts(file: int) -> "ctypes.Array[ctypes.c_int64]":
    return (ctypes.c_int64 * (_ROOM // 8)).from_buffer(mmap.mmap(file, _ROOM))


def _without_a_name() -> int:
    """A file in memory, where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("redline-ranks", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
