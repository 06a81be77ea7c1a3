"""Heartbeats and watchdog of a worker: the process is alive, and how long its loop has been in the current iteration.

A thread sends them, not the loop: a step may take minutes (a GPU's first prefill compiles its kernels, a slow CPU
computes a long chunk), and the worker is alive during it. But the thread alone would hide a step that never ends. So it
also counts for how many heartbeats the loop has been in the same iteration, and ends the worker after a limit.

Time is counted in heartbeats and no clock is read: a process that was suspended for an hour has not been in its
iteration for an hour.
"""

import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

from redline.messages.channel import Outbox
from redline.messages.news import Heartbeat
from redline.messages.replicas import Replica
from redline.worker.delta_router import DeltaRouter

BEAT_S = 0.25  # heartbeat interval in seconds; four missed ones make a worker silent (`worker_registry.MOVE_S`)
# An iteration is one step. The first step of a shape compiles kernels, which takes up to some minutes; and no usable
# CPU takes two seconds per token, and no GPU 0.1 s: 8,192 tokens at two seconds each would take four and a half hours.
TURN_S, TURN_S_PER_TOKEN = 300, {"cpu": 2.0, "cuda": 0.1}


class LoopStatus:
    """The loop's progress: the number of its iterations, and whether it is waiting. Written by the loop, read by
    `LoopWatchdog`."""

    def __init__(self) -> None:
        self.turns = 0
        self.waits = True  # the loop is idle and waits for messages
        self.knocks = Counter[str]()  # number of the last received `Knock` (ping) of each sender (`delta_router`)
        self.replicas: tuple[Replica, ...] = ()  # the API replicas that receive the worker's messages


class LoopWatchdog:
    """A context manager that sends a `Heartbeat` every BEAT_S seconds, from a thread and outboxes of its own.

    step_tokens: most positions of a step; the limit `most_s`, in seconds, grows with it at a rate that depends on the
    kind of device. hung: called in that thread, with a one-line reason, once the loop has been in one iteration for
    longer than the limit.
    """

    def __init__(
        self, pulse: LoopStatus, outbox: Outbox, step_tokens: int, hung: Callable[[str], object], device: str = "cpu"
    ) -> None:
        """device: kind of the device that runs the steps, "cpu" or "cuda"."""
        self.most_s = TURN_S + TURN_S_PER_TOKEN[device] * step_tokens
        self._pulse = pulse
        self._hearers = DeltaRouter(outbox)
        self._hung = hung
        self._turn = pulse.turns
        self._turn_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="heart", daemon=True)

    def beat(self) -> None:
        """Sends a `Heartbeat`, and calls `hung` after the limit. Called every BEAT_S seconds."""
        same = self._pulse.turns == self._turn and not self._pulse.waits
        self._turn, self._turn_s = self._pulse.turns, self._turn_s + BEAT_S if same else 0.0
        self._hearers.follow(self._pulse.replicas)
        for name, outbox in self._hearers:
            outbox.put(Heartbeat(turn_s=self._turn_s, knock=self._pulse.knocks[name]))
        if self._turn_s > self.most_s:
            self._hung(f"a step has not ended in {self._turn_s:.0f} s: a kernel or the device hangs")

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
