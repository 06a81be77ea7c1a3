"""Signs of life: that this process runs, and how long its loop has been in one turn.

They come from a thread and not from the loop: a step may take minutes (a GPU's first prefill compiles its kernels, a
slow CPU computes a long chunk), and a worker in it is not dead. But a thread alone would hide a step that never ends.
So it also counts for how many beats the loop has been in the same turn, and ends the worker past a limit.

Time is counted in beats and no clock is read: a process that was stopped for an hour and goes on has not been in its
turn for an hour.
"""

import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

from redline.wire.channel import Outbox
from redline.wire.news import Beat
from redline.wire.replicas import Replica
from redline.worker.hearers import Hearers

BEAT_S = 0.25  # between two beats; a worker that misses four is taken for silent (route.links.MOVE_S)
# A turn is one step. The first of a shape compiles kernels, for up to some minutes, and no CPU that is of use takes two
# seconds for a token, and no GPU a tenth: of 8,192 tokens two seconds each would be four hours and a half.
TURN_S, TURN_S_PER_TOKEN = 300, {"cpu": 2.0, "cuda": 0.1}


class Pulse:
    """How far the loop is: it counts its turns, and says whether it waits. The loop writes, a `Heart` reads."""

    def __init__(self) -> None:
        self.turns = 0
        self.waits = True  # for messages, as there is nothing to do
        self.knocks = Counter[str]()  # the newest that it has heard, of each that knocks (`hearers`)
        self.replicas: tuple[Replica, ...] = ()  # of the API, that hear the worker


class Heart:
    """Sends a Beat every BEAT_S seconds while inside, from its own thread and through outboxes that nobody else uses.

    step_tokens: the most positions of a step; the limit `most_s`, in seconds, grows with it, on each kind of device as
    fast as suits it. hung: called, in that thread, with one line once the loop has been in one turn for longer.
    """

    def __init__(
        self, pulse: Pulse, outbox: Outbox, step_tokens: int, hung: Callable[[str], object], device: str = "cpu"
    ) -> None:
        """device: by whose kind steps are run, "cpu" or "cuda"."""
        self.most_s = TURN_S + TURN_S_PER_TOKEN[device] * step_tokens
        self._pulse = pulse
        self._hearers = Hearers(outbox)
        self._hung = hung
        self._turn = pulse.turns
        self._turn_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="heart", daemon=True)

    def beat(self) -> None:
        """Sends a Beat, and calls `hung` past the limit; called each time that another BEAT_S seconds have passed."""
        same = self._pulse.turns == self._turn and not self._pulse.waits
        self._turn, self._turn_s = self._pulse.turns, self._turn_s + BEAT_S if same else 0.0
        self._hearers.follow(self._pulse.replicas)
        for name, outbox in self._hearers:
            outbox.put(Beat(turn_s=self._turn_s, knock=self._pulse.knocks[name]))
        if self._turn_s > self.most_s:
            self._hung(f"a step has not ended in {self._turn_s:.0f} s: a kernel, or the device, hangs")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self._hearers.close()

    def _beat_on(self) -> None:
        while not self._end.wait(BEAT_S):
            self.beat()
