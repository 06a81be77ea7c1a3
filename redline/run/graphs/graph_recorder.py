"""CUDA graphs: capture work once and replay it; on a CPU, plain calls.

Captured work must consist of torch operations on tensors that keep their addresses: nothing that waits for the device,
no shapes that depend on data. So the same functions run, and are tested, on a CPU.
"""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

Piece = Callable[[], None]


class Recorder:
    """Captures pieces of work on one device.

    The captured graphs share their temporary memory, so only one of them may run at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._graphs: list[torch.cuda.CUDAGraph] = []  # all graphs share the memory pool of the first

    def record(self, *pieces: Piece) -> tuple[Piece, ...]:
        """Captures the pieces, in this order, and returns for each a call that replays it.

        On a GPU each piece runs once first, to warm up, and its exceptions are raised; on a CPU the pieces are returned
        as they are.
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
        """Captures the piece on the current stream."""
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[0].pool() if self._graphs else None
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            piece()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture was aborted, which is known
                graph.capture_end()
            raise
        graph.capture_end()
        self._graphs.append(graph)
        return graph.replay

    def close(self) -> None:
        """Releases all graphs; none may be replayed after this. Must come before NCCL communicators are destroyed:
        NCCL waits for as long as any graph contains one of their all-reduces."""
        with contextlib.suppress(RuntimeError):  # the device has failed, which is known
            if self._graphs:
                torch.cuda.synchronize(self._device)
        while self._graphs:
            self._graphs.pop().reset()

    def host_tensor(self, like: Tensor) -> Tensor:
        """Zeros of this shape and type on the host; pinned if there is a GPU, for asynchronous copies."""
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=self._cuda)

    def mark(self) -> Callable[[], None]:
        """Records an event and returns a call that waits until the device has finished all work launched before it."""
        if not self._cuda:
            return _done
        event = torch.cuda.Event()
        event.record()
        return event.synchronize


def _done() -> None:
    """On a CPU work is finished when its call returns."""
