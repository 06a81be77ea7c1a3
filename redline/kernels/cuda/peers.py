"""GPU memory that other processes map, and copies from their memory: the driver side of the transport `peer`.

Copies run on a stream of their own, and between two GPUs on the copy engines, so they take no compute resources from
steps. Memory is mapped with the same calls that ranks use for one another's inboxes (`driver.SharedMemory`,
`open_shared`).
"""

from collections.abc import Callable

import torch

from redline.kernels.cuda import driver

URGENT = -1  # stream priority: its work precedes that of steps if both wait for the same resource


class PeerGpu:
    """The GPU of one process. `device`: CUDA's number of it. Errors of the driver are RuntimeErrors."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).get_device()  # resolves a device without an index
        self._stream = torch.cuda.Stream(self.device, priority=URGENT)

    def export(self, size: int) -> driver.SharedMemory:
        """New zeroed memory that other processes may map."""
        with torch.cuda.device(self.device):
            memory = driver.SharedMemory(size)
            memory.fill(0)
        return memory

    def map(self, handle: bytes) -> int:
        """The address at which this GPU reads memory exported by another process."""
        with torch.cuda.device(self.device):
            return driver.open_shared(handle)

    def unmap(self, address: int) -> None:
        """Ends a mapping made by `map`."""
        driver.close_shared(address)

    def copy(self, into: int, source: int, count: int) -> Callable[[], bool]:
        """Launches a copy between two addresses of any GPUs; returns a function that reports whether it has ended."""
        driver.copy(into, source, count, self._stream.cuda_stream)
        copied = torch.cuda.Event()
        copied.record(self._stream)
        return copied.query
