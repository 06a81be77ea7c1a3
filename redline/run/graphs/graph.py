"""Work that a device does again and again without being told how: CUDA graphs, and on a CPU plain calls.

What is recorded must be torch operations over tensors that stay where they are: nothing that waits for the device, no
shape that depends on data. So the same pieces run, and are tested, on a CPU.
"""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

Piece = Callable[[], None]


class Recorder:
    """Records pieces of work on one device.

    Recorded pieces share their temporary memory, so only one of them may run at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._graphs: list[torch.cuda.CUDAGraph] = []  # the others share the memory of the first

    def record(self, *pieces: Piece) -> tuple[Piece, ...]:
        """For each piece a call that does the same again. They are recorded in this order.

        On a GPU each runs once here, to warm up, and raises what it raises; on a CPU a piece is its own recording.
        """
        if self._stream is None:
            return pieces
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                piece()
            torch.cuda.synchronize(self._device)
            return tuple([self._capture(piece) for piece in pieces])

    def _capture(self, piece: Piece) -> Piece:
        """Records what the piece does on the current stream."""
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[0].pool() if self._graphs else None
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            piece()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # that the capture was broken off, which is known
                graph.capture_end()
            raise
        graph.capture_end()
        self._graphs.append(graph)
        return graph.replay

    def close(self) -> None:
        """Lets go of all that was recorded, which must run no more. NCCL waits, as ranks part, for as long as anything
        that was recorded has a sum of theirs in it."""
        with contextlib.suppress(RuntimeError):  # of a device that has failed, which is known
            if self._graphs:
                torch.cuda.synchronize(self._device)
        while self._graphs:
            self._graphs.pop().reset()

    def host_tensor(self, like: Tensor) -> Tensor:
        """Zeros of this shape and type on the host; pinned where there is a GPU, for copies that nobody waits for."""
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=self._cuda)

    def mark(self) -> Callable[[], None]:
        """A call that waits until the device has done all that it was given before this one."""
        if not self._cuda:
            return _done
        event = torch.cuda.Event()
        event.record()
        return event.synchronize


def _done() -> None:
    """A CPU has done a piece when its call returns."""
