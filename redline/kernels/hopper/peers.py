"""A GPU's memory that other processes map, and copies out of theirs: the driver behind the transport `peer`.

Copies have a stream of their own, and between two GPUs the copy engines do them: they take nothing of what steps
compute with. The calls are those by which ranks open one another's inboxes (`driver.SharedMemory`, `open_shared`).
"""

from collections.abc import Callable

import torch

from redline.kernels.hopper import driver

URGENT = -1  # of a stream: its work goes before that of steps, where both wait for the same


class PeerGpu:
    """The GPU of one process. `device`: CUDA's number of it. Whatever the driver refuses is a RuntimeError."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).get_device()  # which a device without a number lacks
        self._stream = torch.cuda.Stream(self.device, priority=URGENT)

    def export(self, size: int) -> driver.SharedMemory:
        """New memory, zeros, that others may map."""
        with torch.cuda.device(self.device):
            memory = driver.SharedMemory(size)
            memory.fill(0)
        return memory

    def map(self, handle: bytes) -> int:
        """The address at which this GPU reads what another process has exported."""
        with torch.cuda.device(self.device):
            return driver.open_shared(handle)

    def unmap(self, address: int) -> None:
        """Ends what `map` began."""
        driver.close_shared(address)

    def copy(self, into: int, source: int, count: int) -> Callable[[], bool]:
        """Launches a copy between two addresses of any GPUs, and returns a call that tells whether it has ended."""
        driver.copy(into, source, count, self._stream.cuda_stream)
        copied = torch.cuda.Event()
        copied.record(self._stream)
        return copied.query
