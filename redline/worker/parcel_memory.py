"""The memory of the send and receive buffers for KV chunks: host memory, GPU memory, or pinned host memory.

In host memory, every operation is complete when its call returns. In GPU memory, gathering and checksums are launched
on a CUDA stream of their own, so a chunk waits for no step, and are polled later: the host only launches and touches no
bytes. With pinned host memory, the buffers are on the host, and a GPU copies the chunks and does the rest.

Shapes: B bytes.
"""

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from redline.errors import ConfigError
from redline.kernels.by_chip import checksum as checksum_on
from redline.kernels.cpu import checksum
from redline.messages.handoff import Piece
from redline.ops.checksum import number
from redline.run.kv_chunks import PARCEL_BYTES, KvChunkLayout
from redline.transport.base import MemoryRange
from redline.transport.memory import host_memory
from redline.worker.config import AREA_BYTES

# Bytes of a rank's GPU for chunks copied from another GPU or from pinned memory that wait for the steps' stream.
STAGED_BYTES = 128 << 20

Ended = Callable[[], bool]


class Summed(NamedTuple):
    """A checksum that is being computed."""

    ended: Ended
    number: Callable[[], int]  # the checksum in [0, 2^64); call it once `ended` returns True


class BufferSizes(NamedTuple):
    """Sizes of a transport's chunks and buffers, in bytes."""

    parcel: int  # most bytes of a chunk
    area: int  # size of the send buffer: chunks that are offered and not read yet
    landing: int  # size of the receive buffer: chunks that are being read at once


class ParcelMemory(Protocol):
    """One kind of memory. Only the loop's thread may use it."""

    sizes: BufferSizes
    fill_s: float
    """Most seconds to wait for chunks that are being filled: the next loop iteration may come after a whole prefill
    chunk."""
    patience_s: float
    """Most seconds to wait for chunks that are being received: the next loop iteration comes after a decode step."""

    def make(self, size: int) -> MemoryRange:
        """Allocates memory for a receive buffer."""
        ...

    def tensor(self, memory: MemoryRange) -> Tensor:
        """A uint8 [size] tensor over memory of this kind. The memory has to outlive the tensor."""
        ...

    def gather(self, parcels: KvChunkLayout, piece: Piece, pages: Sequence[int], into_B: Tensor, seed: int) -> Summed:
        """Fills a chunk from computed pages, and computes its checksum. Steps that are launched from now on may write
        to the pages."""
        ...

    def sum(self, parcel_B: Tensor, seed: int) -> Summed:
        """Computes the checksum of a received chunk."""
        ...

    def scatter(self, parcels: KvChunkLayout, piece: Piece, pages: Sequence[int], from_B: Tensor) -> Ended:
        """Scatters a chunk into pages, before all steps that are launched from now on. Once it has ended, the chunk's
        bytes may be reused."""
        ...


class HostParcels:
    """Host memory, for pages on any device."""

    sizes = BufferSizes(parcel=PARCEL_BYTES, area=AREA_BYTES, landing=32 << 20)  # eight of the largest chunks at once
    fill_s = patience_s = 0.0

    def make(self, size: int) -> MemoryRange:
        """As `ParcelMemory.make`."""
        return host_memory(size)

    def tensor(self, memory: MemoryRange) -> Tensor:
        """As `ParcelMemory.tensor`."""
        held = (ctypes.c_char * memory.size).from_address(memory.address)
        return torch.frombuffer(memoryview(held), dtype=torch.uint8)

    def gather(self, parcels: KvChunkLayout, piece: Piece, pages: Sequence[int], into_B: Tensor, seed: int) -> Summed:
        """As `ParcelMemory.gather`. If the pages are on a GPU, it waits for the steps that have been launched."""
        parcels.gather(piece, pages, into_B)
        return self.sum(into_B, seed)

    def sum(self, parcel_B: Tensor, seed: int) -> Summed:
        """As `ParcelMemory.sum`."""
        found = checksum.of_memory(parcel_B.data_ptr(), parcel_B.numel(), seed)
        return Summed(_ended, lambda: found)

    def scatter(self, parcels: KvChunkLayout, piece: Piece, pages: Sequence[int], from_B: Tensor) -> Ended:
        """As `ParcelMemory.scatter`."""
        parcels.scatter(piece, pages, from_B)
        return _ended


class GpuParcels:
    """Memory of the GPU that has the pages.

    Gathers need not wait for the running step: a step's result is read after all of its work, so positions that the
    planner reports as computed are in the pages. Later steps wait for the gathers, since they may write to the same
    pages.
    """

    # The host's time per chunk does not depend on its size, and a prefill chunk of 2,048 tokens has 144 MB at Kimi's
    # sizes. Gathered, verified and placed on H100s: 4 MiB at 8 GB/s, 16 MiB at 23, 64 MiB at 84 (pools-deep-h100.json).
    sizes = BufferSizes(parcel=32 << 20, area=256 << 20, landing=256 << 20)
    fill_s = 0.01  # thread blocks of the gather are scheduled between those of the running step
    patience_s = 0.002  # 32 MiB arrive in 0.1 ms

    def __init__(self, device: torch.device) -> None:
        """Compiles the kernels that it launches, so that no prompt waits for their compilation."""
        self._device = torch.empty(0, device=device).device  # the device with its index
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # priority over waiting thread blocks of steps
        self.sum(torch.zeros(1 << 20, dtype=torch.uint8, device=self._device), 1 << 63).number()
        torch.cuda.synchronize(self._device)

    def make(self, size: int) -> MemoryRange:
        """As `ParcelMemory.make`."""
        made = torch.empty(size, dtype=torch.uint8, device=self._device)
        return MemoryRange(made.data_ptr(), size, self._device.index, owner=made)

    def tensor(self, memory: MemoryRange) -> Tensor:
        """As `ParcelMemory.tensor`."""
        return torch.as_tensor(_Array(memory), device=self._device)

    def gather(self, parcels: KvChunkLayout, piece: Piece, pages: Sequence[int], into_B: Tensor, seed: int) -> Summed:
        """As `ParcelMemory.gather`."""
        with torch.cuda.stream(self._stream):
            parcels.gather(piece, pages, into_B)
            gathered = torch.cuda.Event()
            gathered.record()
        torch.cuda.default_stream(self._device).wait_event(gathered)
        return self.sum(into_B, seed)

    def sum(self, parcel_B: Tensor, seed: int) -> Summed:
        """As `ParcelMemory.sum`."""
        with torch.cuda.stream(self._stream):
            on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
            on_host.copy_(checksum_on(parcel_B, seed), non_blocking=True)
            added = torch.cuda.Event()
            added.record()

        def found() -> int:
            added.synchronize()
            return number(on_host)

        return Summed(added.query, found)

    def scatter(self, parcels: KvChunkLayout, piece: Piece, pages: Sequence[int], from_B: Tensor) -> Ended:
        """As `ParcelMemory.scatter`: on the steps' own stream, so after all work that still uses the pages."""
        with torch.cuda.stream(torch.cuda.default_stream(self._device)):
            parcels.scatter(piece, pages, from_B)
            placed = torch.cuda.Event()
            placed.record()
        parcels.placed(placed)
        return placed.query


class PinnedParcels(GpuParcels):
    """Pinned host memory, from and to which the GPU that has the pages copies: as with GPU memory, no chunk waits for a
    step.

    A received chunk is copied twice, for its checksum and, once it is verified, for its pages.
    """

    # The host's time per chunk does not depend on its size, as with GPU memory.
    sizes = BufferSizes(parcel=16 << 20, area=AREA_BYTES, landing=64 << 20)

    def make(self, size: int) -> MemoryRange:
        """As `ParcelMemory.make`."""
        return host_memory(size)

    def tensor(self, memory: MemoryRange) -> Tensor:
        """As `ParcelMemory.tensor`. Raises ConfigError if the driver cannot pin the memory."""
        memory_B = HostParcels().tensor(memory)
        try:
            pin(memory_B, memory)
        except RuntimeError as error:
            raise ConfigError(f"handoff.transport: {memory.size:,} bytes cannot be pinned ({error})") from error
        return memory_B

    def gather(self, parcels: KvChunkLayout, piece: Piece, pages: Sequence[int], into_B: Tensor, seed: int) -> Summed:
        """As `ParcelMemory.gather`."""
        with torch.cuda.stream(self._stream):
            gathered_B = torch.empty_like(into_B, device=self._device)
        summed = super().gather(parcels, piece, pages, gathered_B, seed)
        with torch.cuda.stream(self._stream):
            into_B.copy_(gathered_B, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return Summed(copied.query, summed.number)

    def sum(self, parcel_B: Tensor, seed: int) -> Summed:
        """As `ParcelMemory.sum`."""
        with torch.cuda.stream(self._stream):
            parcel_B = parcel_B.to(self._device, non_blocking=True)
        return super().sum(parcel_B, seed)

    def scatter(self, parcels: KvChunkLayout, piece: Piece, pages: Sequence[int], from_B: Tensor) -> Ended:
        """As `ParcelMemory.scatter`."""
        staged_B, _ = stage(from_B, self._device, self._stream)
        return super().scatter(parcels, piece, pages, staged_B)


_pinned: list[object] = []  # pinned memory is never freed, so that its addresses are not allocated again


def pin(memory_B: Tensor, owner: object = None) -> None:
    """Pins host memory (cudaHostRegister) until the process ends, so that copies from and to it are asynchronous.
    owner: an object, apart from the tensor, that keeps the memory allocated. Raises RuntimeError if the driver cannot
    pin it."""
    if not memory_B.is_pinned():  # NIXL pins host areas itself, and the driver refuses to pin memory twice
        runtime: Any = torch.cuda.cudart()
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(memory_B.data_ptr(), memory_B.numel(), 0))
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # the next launch gets the error too: let it be this one, and no step
            raise
    _pinned.append((memory_B, owner))


def stage(parcel_B: Tensor, device: torch.device, stream: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
    """Copies pinned memory to the GPU on `stream`; work of steps that is launched from now on runs after the copy. ->
    the copy, and the event of its end, after which the pinned bytes may be reused."""
    steps = torch.cuda.default_stream(device)
    with torch.cuda.stream(stream):
        staged_B = parcel_B.to(device, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    steps.wait_event(copied)
    staged_B.record_stream(steps)
    return staged_B, copied


class _Array:
    """GPU memory in the form that torch can wrap (`__cuda_array_interface__`)."""

    def __init__(self, memory: MemoryRange) -> None:
        self._memory = memory  # torch keeps a reference to this object while the tensor exists
        self.__cuda_array_interface__ = {
            "shape": (memory.size,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "strides": None,
            "version": 3,
        }


def _ended() -> bool:
    """Operations on host memory are complete when their call returns."""
    return True
