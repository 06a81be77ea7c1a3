"""Memory that the tensor parallel ranks of one worker share: every rank copies KV chunks from there into its own pages.

The shared host memory is an unnamed file that the other ranks inherit, so it is freed even if processes are killed. The
shared memory of rank 0's GPU is mapped by the other ranks (CUDA IPC), which copy from it with their own GPUs. In both
cases each rank counts the chunks that it has copied in the shared host memory, so rank 0 knows without any message when
a chunk's bytes may be reused.
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
from redline.messages.handoff import Piece
from redline.messages.job import PageId
from redline.messages.ranks import Export, Grow, Scatter
from redline.run.kv import KvPool
from redline.run.kv_chunks import KvChunkLayout, of_its_pages
from redline.transport.base import MemoryRange
from redline.transport.peer import HANG_S, LOOK_S, GpuDriver
from redline.worker.parcel_memory import STAGED_BYTES, pin, stage

_APART = 8  # distance between the counters of two ranks, in words of 8 bytes: each rank writes its own cache line
_COMPILED = 1  # index of a rank's counter of compiled grammars; index 0 is its counter of copied chunks
_ROOM = mmap.ALLOCATIONGRANULARITY  # bytes reserved for all counters, and alignment of each part


class RankMemory:
    """Rank 0's side. `file`: descriptor of the shared host memory, which the other ranks inherit."""

    def __init__(self, ranks: int) -> None:
        """ranks: number of ranks, including rank 0."""
        self.file = _without_a_name()
        self.told = 0  # number of chunks that were announced to the other ranks
        self._ranks = ranks
        self._bytes = _ROOM
        os.ftruncate(self.file, _ROOM)
        self._counts = _counts(self.file)
        self._parts: list[tuple[int, MemoryRange]] = []
        self._exported: list[MemoryRange] = []

    def export(self, chip: GpuDriver, size: int) -> tuple[MemoryRange, Export]:
        """Allocates `size` zeroed bytes on rank 0's GPU. -> the memory, and the command that announces it to the other
        ranks. Raises ConfigError if there is no room."""
        try:
            exported = chip.export(size)
        except RuntimeError as error:
            raise ConfigError(
                f"engine.ranks: rank 0's GPU has no room for {human(size)} of shared memory for received pages "
                f"({error}); lower engine.kv_memory"
            ) from error
        memory = MemoryRange(exported.address, size, chip.device, owner=exported)
        self._exported.append(memory)
        return memory, Export(handle=exported.handle, size=size)

    def grow(self, size: int) -> tuple[MemoryRange, Grow]:
        """Adds `size` zeroed bytes to the shared host memory. -> the memory, and the command that announces it to the
        other ranks. Raises ConfigError if there is no room."""
        first, whole = self._bytes, -(-size // _ROOM) * _ROOM
        # The file itself has no size limit: using more than the free memory would let the kernel kill processes.
        if whole > (free := limits.free_memory()):
            raise ConfigError(f"engine.ranks: the ranks share {human(size)} for pages, but only {human(free)} are free")
        try:
            os.posix_fallocate(self.file, first, whole)  # reserve now: a write to a page without room raises SIGBUS
            mapped = mmap.mmap(self.file, whole, offset=first)
        except OSError as error:
            raise ConfigError(
                f"engine.ranks: cannot allocate {human(size)} of memory shared by the ranks ({error.strerror})"
            ) from error
        held = (ctypes.c_char * size).from_buffer(mapped)
        memory = MemoryRange(ctypes.addressof(held), size, owner=held)
        self._parts.append((first, memory))
        self._bytes += whole
        return memory, Grow(bytes=self._bytes)

    def scatter(self, piece: Piece, pages: Sequence[PageId], from_B: Tensor) -> Scatter:
        """The command by which the other ranks copy a chunk in this memory into their pages. pages: all of the job's
        pages, from its first on."""
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
        """Number of announced chunks that a rank has copied: it no longer needs their bytes."""
        return self._counts[rank * _APART]

    def all_have(self, number: int) -> bool:
        """Whether every other rank has copied the first `number` chunks."""
        return all(self.taken(rank) >= number for rank in range(1, self._ranks))

    def compiled(self, number: int) -> bool:
        """Whether every other rank has compiled the first `number` grammars that it has received."""
        return all(self._counts[rank * _APART + _COMPILED] >= number for rank in range(1, self._ranks))

    def close(self) -> None:
        """Closes the file. Processes that have it mapped keep the memory."""
        with contextlib.suppress(OSError):
            os.close(self.file)


def peer_gpu(device: torch.device) -> GpuDriver:
    """This process's GPU."""
    from redline.kernels.cuda.peers import PeerGpu

    return PeerGpu(device)


class FollowedMemory:
    """The side of the other ranks: copies KV chunks into the rank's own pages."""

    def __init__(
        self, file: int, rank: int, kv: KvPool, chip_of: Callable[[torch.device], GpuDriver] = peer_gpu
    ) -> None:
        """file: inherited from rank 0. chip_of: opens this rank's GPU; called when rank 0 exports GPU memory."""
        self._file, self._rank = file, rank
        self._chip_of = chip_of
        self._chip: GpuDriver | None = None
        self._exported: list[MemoryRange] = []  # rank 0's memory at the addresses where this rank's GPU has mapped it
        self._counts = _counts(file)
        self._parcels = KvChunkLayout(kv)
        self._device = kv.planes.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._staged: deque[tuple[int, torch.cuda.Event]] = deque()  # sizes of copies that wait for the steps' stream
        self._bytes = _ROOM
        self._parts: list[tuple[int, Tensor]] = []

    def has_compiled(self) -> None:
        """Counts a compiled grammar that rank 0 has sent. Only one thread may call this."""
        self._counts[self._rank * _APART + _COMPILED] += 1

    def grow(self, told: Grow) -> None:
        """Maps newly added host memory, and pins it if this rank has a GPU. Raises RuntimeError if that fails."""
        part_B = torch.frombuffer(
            mmap.mmap(self._file, told.bytes - self._bytes, offset=self._bytes), dtype=torch.uint8
        )
        if self._stream is not None:
            pin(part_B)
        self._parts.append((self._bytes, part_B))
        self._bytes = told.bytes

    def map(self, told: Export) -> None:
        """Maps memory of rank 0's GPU. Raises RuntimeError if that fails."""
        if self._chip is None:
            self._chip = self._chip_of(self._device)
        self._exported.append(MemoryRange(self._chip.map(told.handle), told.size))

    def scatter(self, told: Scatter) -> None:
        """Copies a chunk into pages, before all steps that are launched from now on. When it returns, the chunk's bytes
        may be reused: a GPU has made a staged copy of them, which waits for running steps only if many staged copies
        are waiting already. Raises RuntimeError if a GPU copy fails."""
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
        """Copies a chunk from rank 0's GPU into this rank's GPU memory and waits for the end of the copy, about 0.1 ms
        for 32 MiB."""
        assert self._chip is not None, "rank 0's GPU memory is not mapped"
        assert told.exported is not None, "the chunk is not in rank 0's GPU memory"
        source = self._exported[told.exported]
        self._make_room(told.size)
        # Allocated on the stream of copies: earlier chunks in this memory have been copied, and `record_stream` keeps
        # the memory until the stream of steps has scattered them.
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            staged_B = torch.empty(told.size, dtype=torch.uint8, device=self._device)
        ended = self._chip.copy(staged_B.data_ptr(), source.address + told.offset, told.size)
        until = clock.monotonic() + HANG_S
        while not ended():
            if clock.monotonic() > until:
                raise RuntimeError(f"the GPU has not completed a copy from rank 0's GPU within {HANG_S:g} s")
            clock.sleep(LOOK_S)
        if self._stream is not None:
            staged_B.record_stream(torch.cuda.default_stream(self._device))
        return staged_B

    def _place(self, told: Scatter, parcel_B: Tensor) -> None:
        """Scatters a chunk into pages; on a GPU on the stream of steps, after all work that still uses the pages."""
        if self._stream is None:
            self._parcels.scatter(told.piece, told.pages, parcel_B)
            return
        with torch.cuda.stream(torch.cuda.default_stream(self._device)):
            self._parcels.scatter(told.piece, told.pages, parcel_B)
            placed = torch.cuda.Event()
            placed.record()
        self._staged.append((told.size, placed))

    def _make_room(self, size: int) -> None:
        """Waits for the stream of steps if staged copies would otherwise exceed STAGED_BYTES."""
        while self._staged:
            waiting = sum(each for each, _ in self._staged)
            if waiting + size <= STAGED_BYTES and not self._staged[0][1].query():
                return
            self._staged.popleft()[1].synchronize()


def _counts(file: int) -> "ctypes.Array[ctypes.c_int64]":
    return (ctypes.c_int64 * (_ROOM // 8)).from_buffer(mmap.mmap(file, _ROOM))


def _without_a_name() -> int:
    """A file in memory (memfd), or an unlinked temporary file if the system has no memfd."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("redline-ranks", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
