"""KV chunks in GPU memory for NIXL: allocations of their own, which other processes can map.

UCX copies from GPU to GPU only if the memory is one allocation of the driver (`cuMemAlloc`) for which an IPC handle was
created. Torch's memory may be a part of a larger allocation or, with `expandable_segments`, mapped in a way that has no
such handle: then UCX copies through the host, and only logs a warning.
"""

import contextlib
import weakref

import torch

from redline.transport.base import MemoryRange
from redline.transport.peer import Exported, GpuDriver
from redline.worker.parcel_memory import GpuParcels


class ExportedParcels(GpuParcels):
    """As `GpuParcels`, in memory that is allocated by the driver."""

    def __init__(self, device: torch.device, chip: GpuDriver) -> None:
        """chip: the driver of that GPU."""
        super().__init__(device)
        self._chip = chip

    def make(self, size: int) -> MemoryRange:
        """As `ParcelMemory.make`, zeroed. Raises RuntimeError if the GPU has no room or cannot export memory."""
        exported = self._chip.export(size)
        memory = MemoryRange(exported.address, size, self._chip.device, owner=exported)
        weakref.finalize(memory, _free, exported).atexit = False  # at exit, the driver frees it
        return memory

    def settle(self) -> None:
        """Returns once the GPU has completed all queued work, including copies of other streams."""
        torch.cuda.synchronize(self._device)


def _free(exported: Exported) -> None:
    with contextlib.suppress(RuntimeError):  # the GPU has failed, and this process is ending
        exported.free()
