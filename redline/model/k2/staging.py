"""Copies tensors of mapped files to a GPU through pinned memory, reading the next one while the last is being copied.

A direct copy from mapped memory blocks the host for every byte, and one driver thread reads the pages.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

STAGING_BYTES = 128 << 20  # pinned memory per process while loading
PIECE_BYTES = 32 << 20  # maximum size of one copy


class Event(Protocol):
    """A CUDA event, or a stand-in with its interface."""

    def synchronize(self) -> None:
        """Waits until the device has reached the event."""
        ...


def recorded_on(device: torch.device) -> Event:
    """An event recorded on the current stream of this GPU, which need not be torch's current GPU."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class Staging:
    """A ring of pinned memory. Copies are queued on the device's current stream, so later launches see their data."""

    def __init__(
        self,
        device: torch.device,
        size: int = STAGING_BYTES,
        piece: int = PIECE_BYTES,
        recorded: Callable[[torch.device], Event] = recorded_on,
    ) -> None:
        """size: bytes of the ring; piece: maximum bytes of one copy. recorded: returns an event after all work that is
        queued on a device's current stream."""
        self._device = device
        self._ring = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._piece = piece
        self._recorded = recorded
        self._next = 0
        self._under_way: deque[tuple[int, int, Event]] = deque()  # copies in flight: bytes [first, last) of the ring

    def put(self, view: Tensor) -> Tensor:
        """A contiguous copy of a host tensor on the device. The host tensor may be freed once this returns."""
        out = torch.empty(view.shape, dtype=view.dtype, device=self._device)
        rows, places = (view, out) if view.dim() else (view[None], out[None])
        row_bytes = max(1, rows.nbytes // max(1, len(rows)))
        if row_bytes > self._piece:  # not the case for any matrix of a model
            return out.copy_(view)
        together = self._piece // row_bytes
        for first in range(0, len(rows), together):
            part = rows[first : first + together]
            start = self._room(part.nbytes)
            staged = self._ring[start : start + part.nbytes].view(part.dtype).view(part.shape)
            staged.copy_(part)  # torch's threads read different pages of the file in parallel
            places[first : first + together].copy_(staged, non_blocking=True)
            self._under_way.append((start, start + part.nbytes, self._recorded(self._device)))
        return out

    def wait(self) -> None:
        """Waits until all copies are complete."""
        while self._under_way:
            self._under_way.popleft()[2].synchronize()

    def _room(self, size: int) -> int:
        """Offset of `size` free bytes in the ring. Waits for earlier copies out of that range to complete."""
        start, under_way = self._next, self._under_way
        if start + size > self._ring.numel():
            while under_way and under_way[0][0] >= start:  # from before the wrap-around
                under_way.popleft()[2].synchronize()
            start = 0
        # The ring is used in order, so the oldest copies are those that overlap.
        while under_way and under_way[0][0] < start + size and start < under_way[0][1]:
            under_way.popleft()[2].synchronize()
        self._next = -(-(start + size) // 256) * 256  # an alignment that suits every dtype
        return start
