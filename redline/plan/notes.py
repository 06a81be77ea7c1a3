"""What is noted of a job, for whoever asks why its answer came when it did. Private to plan.

Most jobs have nothing to note, and cost nothing here.
"""

from collections.abc import Callable

from redline.wire.delta import Drafted, Resumed

Clock = Callable[[], float]

FIRST_TOLD = 4  # steps with drafts, after which their times are told; then after twice as many, and at the end


class Pause:
    """A job was pre-empted, and has had no token since."""

    __slots__ = ("_at", "_clock", "_lost", "_waited_s", "again_tokens")

    def __init__(self, lost_tokens: int, clock: Clock | None) -> None:
        """lost_tokens: positions of it that were computed."""
        self._lost, self._clock = lost_tokens, clock
        self._at = 0.0 if clock is None else clock()
        self._waited_s: float | None = None
        self.again_tokens = lost_tokens

    def ends(self, first: int) -> None:
        """It has slot and pages again, and is computed from position `first` on."""
        self.again_tokens = max(0, self._lost - first)
        self._waited_s = self._since()

    def resumed(self) -> Resumed:
        """It has a token."""
        return Resumed(again_tokens=self.again_tokens, waited_s=self._waited_s, paused_s=self._since())

    def _since(self) -> float | None:
        return None if self._clock is None else self._clock() - self._at


class Rounds:
    """Steps that verified drafts of a job, and were timed (`Speculation.predicted_ms`)."""

    __slots__ = ("_next_told", "_predicted_ms", "_seconds", "_steps", "_without_ms")

    def __init__(self) -> None:
        self._steps, self._next_told = 0, FIRST_TOLD
        self._seconds = self._predicted_ms = self._without_ms = 0.0

    def add(self, seconds: float, predicted_ms: float, without_ms: float) -> None:
        """One more, and what it was predicted to take with the drafts that it had, and without any."""
        self._steps += 1
        self._seconds += seconds
        self._predicted_ms += predicted_ms
        self._without_ms += without_ms

    @property
    def due(self) -> bool:
        """Whether they are to be told before the job's end."""
        return self._steps >= self._next_told

    def told(self) -> Drafted:
        """All of them together, which is not due again before there are twice as many."""
        self._next_told = max(FIRST_TOLD, 2 * self._steps)
        predicted_s, without_s = self._predicted_ms / 1e3, self._without_ms / 1e3
        return Drafted(steps=self._steps, seconds=self._seconds, predicted_s=predicted_s, without_s=without_s)
