"""Where parcels lie while they wait and when they come: in the host's memory, or in the GPU's, whose work is launched.

In the host's everything is done when a call returns. In a GPU's, gathering and adding up go to a stream of their own,
so a parcel waits for no step, and are asked about later: the host launches, and touches no byte. Pinned memory of the
host is between the two: parcels lie in it, and a GPU copies them and does the rest.

B bytes.
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
from redline.ops.checksum import number
from redline.run.handoff import PARCEL_BYTES, Parcels
from redline.transport.base import Memory
from redline.transport.memory import host_memory
from redline.wire.handoff import Piece
from redline.worker.config import AREA_BYTES

# Of a rank's GPU, for what is copied from another's, or from pinned memory, and waits for the steps' stream.
STAGED_BYTES = 128 << 20

Ended = Callable[[], bool]


class Summed(NamedTuple):
    """A checksum that is being added up."""

    ended: Ended
    number: Callable[[], int]  # once it has ended: in [0, 2^64)


class Sizes(NamedTuple):
    """Bytes of what a transport's parcels take."""

    parcel: int  # at most
    area: int  # of those that are offered and not read yet
    landing: int  # that may be under way at once


class ParcelMemory(Protocol):
    """One kind of memory. The loop's thread uses it."""

    sizes: Sizes
    fill_s: float
    """To wait for parcels that are being filled: the next turn may be a prompt's chunk later."""
    patience_s: float
    """To wait for parcels that come: the next turn is a decode step later."""

    def make(self, size: int) -> Memory:
        """New memory for parcels that come."""
        ...

    def tensor(self, memory: Memory) -> Tensor:
        """uint8 [size] over memory of this kind, which has to outlive it."""
        ...

    def gather(self, parcels: Parcels, piece: Piece, pages: Sequence[int], into_B: Tensor, seed: int) -> Summed:
        """Fills a parcel from computed pages, and adds it up. Steps that are launched from now on may write to the
        pages."""
        ...

    def sum(self, parcel_B: Tensor, seed: int) -> Summed:
        """Adds up a parcel that has come."""
        ...

    def scatter(self, parcels: Parcels, piece: Piece, pages: Sequence[int], from_B: Tensor) -> Ended:
        """Puts a parcel into pages: steps that are launched from now on find it there. Once it has ended the parcel's
        bytes may go."""
        ...


class HostParcels:
    """The host's memory, whatever has the pages."""

    sizes = Sizes(parcel=PARCEL_BYTES, area=AREA_BYTES, landing=32 << 20)  # eight of the largest come at once
    fill_s = patience_s = 0.0

    def make(self, size: int) -> Memory:
        """As `ParcelMemory.make`."""
        return host_memory(size)

    def tensor(self, memory: Memory) -> Tensor:
        """As `ParcelMemory.tensor`."""
        held = (ctypes.c_char * memory.size).from_address(memory.address)
        return torch.frombuffer(memoryview(held), dtype=torch.uint8)

    def gather(self, parcels: Parcels, piece: Piece, pages: Sequence[int], into_B: Tensor, seed: int) -> Summed:
        """As `ParcelMemory.gather`. On a GPU it waits for the steps that were launched."""
        parcels.gather(piece, pages, into_B)
        return self.sum(into_B, seed)

    def sum(self, parcel_B: Tensor, seed: int) -> Summed:
        """As `ParcelMemory.sum`."""
        found = checksum.of_memory(parcel_B.data_ptr(), parcel_B.numel(), seed)
        return Summed(_ended, lambda: found)

    def scatter(self, parcels: Parcels, piece: Piece, pages: Sequence[int], from_B: Tensor) -> Ended:
        """As `ParcelMemory.scatter`."""
        parcels.scatter(piece, pages, from_B)
        return _ended


class GpuParcels:
    """Memory of the GPU that has the pages.

    Gathers need not wait for the step that runs: a step's result is read behind all of its work, so what the planner
    calls computed is there. Steps that come later wait for them, since they may write to the same pages.
    """

    # A piece costs the host as much whatever its size, and a chunk of 2,048 tokens has 144 MB at Kimi's sizes.
    # Gathered, verified and placed on H100s: 4 MiB at 8 GB/s, 16 at 23, 64 at 84 (pools-deep-h100.json).
    sizes = Sizes(parcel=32 << 20, area=256 << 20, landing=256 << 20)
    fill_s = 0.01  # the step that runs lets its blocks in between its own
    patience_s = 0.002  # 32 MiB come in 0.1 ms

    def __init__(self, device: torch.device) -> None:
        """It compiles what it launches, so that no prompt waits for that."""
        self._device = torch.empty(0, device=device).device  # with its number
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # before the blocks of steps that wait
        self.sum(torch.zeros(1 << 20, dtype=torch.uint8, device=self._device), 1 << 63).number()
        torch.cuda.synchronize(self._device)

    def make(self, size: int) -> Memory:
        """As `ParcelMemory.make`."""
        made = torch.empty(size, dtype=torch.uint8, device=self._device)
        return Memory(made.data_ptr(), size, self._device.index, owner=made)

    def tensor(self, memory: Memory) -> Tensor:
        """As `ParcelMemory.tensor`."""
        return torch.as_tensor(_Array(memory), device=self._device)

    def gather(self, parcels: Parcels, piece: Piece, pages: Sequence[int], into_B: Tensor, seed: int) -> Summed:
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

    def scatter(self, parcels: Parcels, piece: Piece, pages: Sequence[int], from_B: Tensor) -> Ended:
        """As `ParcelMemory.scatter`: on the steps' own stream, so behind whatever still uses the pages."""
        with torch.cuda.stream(torch.cuda.default_stream(self._device)):
            parcels.scatter(piece, pages, from_B)
            placed = torch.cuda.Event()
            placed.record()
        parcels.placed(placed)
        return placed.query


class PinnedParcels(GpuParcels):
    """The host's memory, which the GPU that has the pages copies from and to: as in its own, nobody waits for a step.

    What comes is copied twice, to be added up and, once it is verified, for its pages.
    """

    # A piece costs the host as much whatever its size, as of a GPU's own memory.
    sizes = Sizes(parcel=16 << 20, area=AREA_BYTES, landing=64 << 20)

    def make(self, size: int) -> Memory:
        """As `ParcelMemory.make`."""
        return host_memory(size)

    def tensor(self, memory: Memory) -> Tensor:
        """As `ParcelMemory.tensor`. Raises ConfigError where the driver does not pin it."""
        memory_B = HostParcels().tensor(memory)
        try:
            pin(memory_B, memory)
        except RuntimeError as error:
            raise ConfigError(f"handoff.transport: {memory.size:,} bytes cannot be pinned ({error})") from error
        return memory_B

    def gather(self, parcels: Parcels, piece: Piece, pages: Sequence[int], into_B: Tensor, seed: int) -> Summed:
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

    def scatter(self, parcels: Parcels, piece: Piece, pages: Sequence[int], from_B: Tensor) -> Ended:
        """As `ParcelMemory.scatter`."""
        staged_B, _ = stage(from_B, self._device, self._stream)
        return super().scatter(parcels, piece, pages, staged_B)


_pinned: list[object] = []  # what is pinned stays, so that its addresses are nobody else's


def pin(memory_B: Tensor, owner: object = None) -> None:
    """Has the GPU's driver keep memory of the host in its place, so that copies from and to it run by themselves; it
    stays there until the process ends. owner: whatever keeps it alive, beside the tensor. Raises RuntimeError where
    that is refused."""
    if not memory_B.is_pinned():  # as NIXL does with areas of the host's: the driver refuses to do it twice
        runtime: Any = torch.cuda.cudart()
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(memory_B.data_ptr(), memory_B.numel(), 0))
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # CUDA tells the next launch of it too: this one, and no step
            raise
    _pinned.append((memory_B, owner))


def stage(parcel_B: Tensor, device: torch.device, stream: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
    """A copy in the GPU of what lies in pinned memory, by a stream of its own: steps' work that is launched from now on
    comes behind it. -> the copy, and the event of its end: then the pinned bytes may go."""
    steps = torch.cuda.default_stream(device)
    with torch.cuda.stream(stream):
        staged_B = parcel_B.to(device, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    steps.wait_event(copied)
    staged_B.record_stream(steps)
    return staged_B, copied


class _Array:
    """Memory of a GPU as torch takes it from others (`__cuda_array_interface__`)."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory  # torch keeps this one as long as its tensor
        self.__cuda_array_interface__ = {
            "shape": (memory.size,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "strides": None,
            "version": 3,
        }


def _ended() -> bool:
    """The host has done a thing when its call returns."""
    return True
