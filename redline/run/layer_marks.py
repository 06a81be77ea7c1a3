"""Progress of a step's prefill while the device runs it: the number of model layers computed.

With KV transfer, a prefill worker sends the layers of a step while the device computes the next ones
(`kv_transfer/manager.py`). The thread that launches the step records an event after each layer on its stream, and the
loop's thread polls which of these events the device has passed. Steps that run eagerly, or in one call, have no marks;
their layers count as computed at the step's end.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

Meanwhile = Callable[[int], object]
"""Called while a step runs, with the number of computed layers of its prompts. The callback itself waits a moment."""


class StreamEvent(Protocol):
    """An event on the device's stream."""

    def query(self) -> bool:
        """Whether the device has passed it. Raises errors of the device."""
        ...


def mark_stream() -> StreamEvent:
    """Records an event after the work launched so far on the current GPU stream."""
    event = torch.cuda.Event()
    event.record()
    return event


class LayerMarks:
    """The marks of one step. One thread records and ends, another one polls."""

    def __init__(self, mark: Callable[[], StreamEvent] = mark_stream) -> None:
        self._mark = mark
        self._marks: deque[tuple[int, StreamEvent]] = deque()
        self._passed = 0
        self._ended = False

    def launched(self, layers: int) -> None:
        """Marks that the work of the first `layers` layers is launched."""
        self._marks.append((layers, self._mark()))

    def end(self) -> None:
        """Ends the marks: all work is launched, or the launch has failed."""
        self._ended = True

    def passed(self) -> int:
        """Number of computed layers. Raises errors of the device."""
        while self._marks and self._marks[0][1].query():
            self._passed = self._marks.popleft()[0]
        return self._passed

    @property
    def over(self) -> bool:
        """Whether no mark is left to poll."""
        return self._ended and not self._marks
