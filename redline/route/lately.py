"""What was asked lately: when, how long prompts and answers are, and of which class, for whoever plans by it.

A request is known from its arrival on. So a wave of long prompts is seen while they wait, and not once the first of
them have been answered; how long an answer becomes that has not ended is taken from those that have, lately or before.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

MOST = 2048  # requests that are remembered
KNOWN = 128  # newest answers of a class that have ended, by which others are judged


class Came:
    """One job, from its arrival on."""

    __slots__ = ("at", "cached", "ended", "of", "output", "prompt")

    def __init__(self, at: float, of: str, prompt: int) -> None:
        """at: seconds of the clock. of: its class. prompt: tokens."""
        self.at = at
        self.of = of
        self.prompt = prompt
        self.cached = 0  # tokens of the prompt, as it was expected or found
        self.output = 0  # tokens, so far
        self.ended = False  # as it was to end: it would have had no more tokens


class Length(NamedTuple):
    """Tokens of one request, and its class."""

    cached: int
    uncached: int
    output: int
    of: str


class Lately:
    """The newest jobs, once somebody plans by them: none is remembered before. clock: tells seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._came: deque[Came] = deque(maxlen=0)

    def remember(self) -> None:
        """Somebody plans by them from now on."""
        self._since = self._clock()
        self._came = deque(maxlen=MOST)

    def came(self, of: str, prompt: int) -> Came:
        """A job has come, of a class, with so many tokens of its prompt. What is learnt of it is written there."""
        came = Came(self._clock(), of, prompt)
        self._came.append(came)
        return came

    def rate(self, window_s: float) -> float:
        """Jobs a second in the last so many seconds, or since there is a clock."""
        newest = self._newest(window_s)
        seconds = min(window_s, self._clock() - self._since)
        if len(self._came) == MOST == len(newest):  # those before are forgotten
            seconds = self._clock() - newest[0].at
        return len(newest) / seconds if seconds > 0 else 0.0

    def lengths(self, window_s: float) -> list[Length]:
        """Those of the last so many seconds. An answer that has not ended is taken to become as long as those of its
        class that became longer than it is, on the mean, or of all where none of its class has ended; where none became
        longer, as long as it is. Those that end in the window are the short ones where answers take as long as that, so
        what has ended before it counts too."""
        newest = self._newest(window_s)
        becomes = self._becomes(newest)
        return [
            Length(min(each.cached, each.prompt), max(0, each.prompt - each.cached), becomes(each), each.of)
            for each in newest
        ]

    def left(self, under_way: Sequence[Came]) -> list[Length]:
        """Of jobs that have not ended, what is left: an answer that has begun needs nothing more of its prompt."""
        becomes = self._becomes(under_way)
        found: list[Length] = []
        for each in under_way:
            there = each.prompt + each.output if each.output else min(each.cached, each.prompt)
            found.append(Length(there, max(0, each.prompt - there), max(1, becomes(each) - each.output), each.of))
        return found

    def _becomes(self, some: Sequence[Came]) -> Callable[[Came], int]:
        """How many tokens the answers of some jobs have, or are expected to come to."""
        of_all = _Ended([each.output for each in self._came if each.ended])
        ended = {
            of: _Ended([each.output for each in self._came if each.ended and each.of == of])
            for of in {each.of for each in some if not each.ended}
        }
        return lambda each: each.output if each.ended else (ended[each.of] or of_all).longer_than(each.output)

    def _newest(self, window_s: float) -> list[Came]:
        since = self._clock() - window_s
        return [each for each in self._came if each.at >= since]


class _Ended:
    """How long the newest of some answers became; true where there are any."""

    def __init__(self, outputs: Sequence[int]) -> None:
        self._outputs = sorted(outputs[-KNOWN:])
        self._sums = [0, *itertools.accumulate(self._outputs)]

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def longer_than(self, tokens: int) -> int:
        """The mean of those that became longer than so many tokens; where none did, so many."""
        place = bisect.bisect_right(self._outputs, tokens)
        longer = len(self._outputs) - place
        return round((self._sums[-1] - self._sums[place]) / longer) if longer else tokens
