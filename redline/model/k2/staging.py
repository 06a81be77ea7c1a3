"""Tensors of mapped files onto a GPU, through pinned memory: the next is fetched while the last is still on its way.

A copy from mapped memory itself makes the host wait for every byte, and one thread of the driver fetches them.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

STAGING_BYTES = 128 << 20  # of a process, while it loads
PIECE_BYTES = 32 << 20  # that are copied together, at most


class Event(Protocol):
    """A place in a device's work, as torch has it."""

    def synchronize(self) -> None:
        """Returns once the device is there."""
        ...


def recorded_on(device: torch.device) -> Event:
    """An event behind what the current stream of this GPU has, which need not be torch's current GPU."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class Staging:
    """A ring of pinned memory. All copies go by the device's current stream, so what is launched later finds them."""

    def __init__(
        self,
        device: torch.device,
        size: int = STAGING_BYTES,
        piece: int = PIECE_BYTES,
        recorded: Callable[[torch.device], Event] = recorded_on,
    ) -> None:
        """size: of the ring; piece: of what goes together, at most; both in bytes. recorded: gives an event behind all
        that a device's current stream has."""
        self._device = device
        self._ring = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._piece = piece
        self._recorded = recorded
        self._next = 0
        self._under_way: deque[tuple[int, int, Event]] = deque()  # bytes [first, last) of the ring, oldest first

    def put(self, view: Tensor) -> Tensor:
        """A copy of a tensor of the host on the device, contiguous. The host's may be gone once this returns."""
        out = torch.empty(view.shape, dtype=view.dtype, device=self._device)
        rows, places = (view, out) if view.dim() else (view[None], out[None])
        row_bytes = max(1, rows.nbytes // max(1, len(rows)))
        if row_bytes > self._piece:  # of no matrix of a model
            return out.copy_(view)
        together = self._piece // row_bytes
        for first in range(0, len(rows), together):
            part = rows[first : first + together]
            start = self._room(part.nbytes)
            staged = self._ring[start : start + part.nbytes].view(part.dtype).view(part.shape)
            staged.copy_(part)  # by torch's threads, which fetch different pages of the file
            places[first : first + together].copy_(staged, non_blocking=True)
            self._under_way.append((start, start + part.nbytes, self._recorded(self._device)))
        return out

    def wait(self) -> None:
        """Returns once everything has come."""
        while self._under_way:
            self._under_way.popleft()[2].synchronize()

    def _room(self, size: int) -> int:
        """Where so many bytes have room in the ring. It waits for what lies there to have come."""
        start, under_way = self._next, self._under_way
        if start + size > self._ring.numel():
            while under_way and under_way[0][0] >= start:  # of the turn before this one: nothing comes there any more
                under_way.popleft()[2].synchronize()
            start = 0
        # Places are taken in turn, so it is the oldest that are in the way.
        while under_way and under_way[0][0] < start + size and start < under_way[0][1]:
            under_way.popleft()[2].synchronize()
        self._next = -(-(start + size) // 256) * 256  # where every format may begin
        return start
