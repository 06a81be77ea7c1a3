"""Parcels in a GPU's memory as NIXL wants it: pieces of their own, which other processes can map.

UCX copies from GPU to GPU only where the memory came from the driver as one piece (`cuMemAlloc`), and has been asked
for a handle by which others map it. What torch gives may be a part of a larger piece or, with `expandable_segments`,
mapped in a way that has no such handle: then UCX copies through the host, and says so in a warning only.
"""

import contextlib
import weakref

import torch

from redline.transport.base import Memory
from redline.transport.peer import Chip, Exported
from redline.worker.parcel_memory import GpuParcels


class ExportedParcels(GpuParcels):
    """As `GpuParcels`, in memory that the driver gives."""

    def __init__(self, device: torch.device, chip: Chip) -> None:
        """chip: the driver of that GPU."""
        super().__init__(device)
        self._chip = chip

    def make(self, size: int) -> Memory:
        """As `ParcelMemory.make`: zeros. Raises RuntimeError where the GPU has not so many bytes, or exports none."""
        exported = self._chip.export(size)
        memory = Memory(exported.address, size, self._chip.device, owner=exported)
        weakref.finalize(memory, _free, exported).atexit = False  # the driver takes back what a process leaves
        return memory

    def settle(self) -> None:
        """Returns once the GPU has ended all that it was told to do, copies of other streams too."""
        torch.cuda.synchronize(self._device)


def _free(exported: Exported) -> None:
    with contextlib.suppress(RuntimeError):  # of a GPU that has failed, whose process ends
        exported.free()
