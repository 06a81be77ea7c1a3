"""How far the device is with a step's prompts while it runs: how many of the model's layers are computed.

Whoever hands a prompt over sends the layers of a step while the device computes the next ones (`worker/exchange.py`).
The thread that launches the step marks the end of each layer on its stream, and the loop's thread looks which of these
marks the device has passed. Where steps are led by the host, or run in one call, there are no marks, and what is
computed is known at the step's end.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

Meanwhile = Callable[[int], object]
"""Called while a step runs, with how many layers of its prompts are computed; it waits a moment by itself."""


class Mark(Protocol):
    """A place on the device's stream."""

    def query(self) -> bool:
        """Whether the device has passed it. Raises the device's own error."""
        ...


def mark_stream() -> Mark:
    """The end of what is launched now on the current stream of a GPU."""
    event = torch.cuda.Event()
    event.record()
    return event


class LayerMarks:
    """The marks of one step. One thread marks and ends, another looks."""

    def __init__(self, mark: Callable[[], Mark] = mark_stream) -> None:
        self._mark = mark
        self._marks: deque[tuple[int, Mark]] = deque()
        self._passed = 0
        self._ended = False

    def launched(self, layers: int) -> None:
        """The work of the first so many layers is launched."""
        self._marks.append((layers, self._mark()))

    def end(self) -> None:
        """There will be no further marks: all is launched, or something has failed."""
        self._ended = True

    def passed(self) -> int:
        """How many layers are computed. Raises the device's own error."""
        while self._marks and self._marks[0][1].query():
            self._passed = self._marks.popleft()[0]
        return self._passed

    @property
    def over(self) -> bool:
        """Whether there is nothing left to look for."""
        return self._ended and not self._marks
