"""Notes that explain a job's timing: preemptions, and steps with speculative decoding. Private to the scheduler.

Most jobs have no notes, and cost nothing here.
"""

from collections.abc import Callable

from redline.messages.delta import Drafted, Resumed

Clock = Callable[[], float]

# Steps with draft tokens before the first note; each further note after double the number, and one at the end.
FIRST_TOLD = 4


class Pause:
    """A preemption, until the job has its next token."""

    __slots__ = ("_at", "_clock", "_lost", "_waited_s", "again_tokens")

    def __init__(self, lost_tokens: int, clock: Clock | None) -> None:
        """lost_tokens: the job's computed positions at the preemption."""
        self._lost, self._clock = lost_tokens, clock
        self._at = 0.0 if clock is None else clock()
        self._waited_s: float | None = None
        self.again_tokens = lost_tokens

    def ends(self, first: int) -> None:
        """The job has slot and pages again, and is computed from position `first` on."""
        self.again_tokens = max(0, self._lost - first)
        self._waited_s = self._since()

    def resumed(self) -> Resumed:
        """The note to send with the job's next token."""
        return Resumed(again_tokens=self.again_tokens, waited_s=self._waited_s, paused_s=self._since())

    def _since(self) -> float | None:
        return None if self._clock is None else self._clock() - self._at


class Rounds:
    """Timed steps that verified draft tokens of a job (`Speculation.predicted_ms`)."""

    __slots__ = ("_next_told", "_predicted_ms", "_seconds", "_steps", "_without_ms")

    def __init__(self) -> None:
        self._steps, self._next_told = 0, FIRST_TOLD
        self._seconds = self._predicted_ms = self._without_ms = 0.0

    def add(self, seconds: float, predicted_ms: float, without_ms: float) -> None:
        """Add a step: its duration, the predicted duration, and the predicted duration without draft tokens."""
        self._steps += 1
        self._seconds += seconds
        self._predicted_ms += predicted_ms
        self._without_ms += without_ms

    @property
    def due(self) -> bool:
        """Whether a note is due before the job's end."""
        return self._steps >= self._next_told

    def told(self) -> Drafted:
        """The note over all steps so far. The next is due when their number has doubled."""
        self._next_told = max(FIRST_TOLD, 2 * self._steps)
        predicted_s, without_s = self._predicted_ms / 1e3, self._without_ms / 1e3
        return Drafted(steps=self._steps, seconds=self._seconds, predicted_s=predicted_s, without_s=without_s)
