"""History of recent requests, for role switching and autoscaling: arrival time, class, and lengths of prompt and
answer.

A request is recorded at its arrival, so a wave of long prompts is visible while they wait, and not only when the first
are complete. The final length of a running answer is estimated from completed answers.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

MOST = 2048  # requests kept
KNOWN = 128  # newest completed answers of a class, used for the estimate of others


class RequestRecord:
    """The record of one job, from its arrival on."""

    __slots__ = ("at", "cached", "ended", "of", "output", "prompt")

    def __init__(self, at: float, of: str, prompt: int) -> None:
        """at: arrival time in seconds. of: class of the job. prompt: number of prompt tokens."""
        self.at = at
        self.of = of
        self.prompt = prompt
        self.cached = 0  # cached tokens of the prompt, as predicted or found
        self.output = 0  # tokens so far
        self.ended = False  # the answer is complete; not set if it was cut off


class RequestLengths(NamedTuple):
    """Token counts of one request, and its class."""

    cached: int
    uncached: int
    output: int
    of: str


class RequestHistory:
    """The newest jobs, recorded from the first call of `start` on. clock: returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._records: deque[RequestRecord] = deque(maxlen=0)

    def start(self) -> None:
        """Start recording."""
        self._since = self._clock()
        self._records = deque(maxlen=MOST)

    def add(self, of: str, prompt: int) -> RequestRecord:
        """Record the arrival of a job of class `of` with `prompt` prompt tokens. The caller updates the returned
        record."""
        record = RequestRecord(self._clock(), of, prompt)
        self._records.append(record)
        return record

    def rate(self, window_s: float) -> float:
        """Jobs per second in the last `window_s` seconds, or since recording started if that is shorter."""
        newest = self._newest(window_s)
        seconds = min(window_s, self._clock() - self._since)
        if len(self._records) == MOST == len(newest):  # older records were dropped
            seconds = self._clock() - newest[0].at
        return len(newest) / seconds if seconds > 0 else 0.0

    def lengths(self, window_s: float) -> list[RequestLengths]:
        """Lengths of the requests of the last `window_s` seconds. A running answer is estimated as the mean of the
        completed answers of its class that are longer than it, or of all classes if its class has none; if no
        completed answer is longer, as its current length. Answers completed before the window count too, because
        with answers as long as the window only the short ones complete in it."""
        newest = self._newest(window_s)
        becomes = self._final_lengths(newest)
        return [
            RequestLengths(min(each.cached, each.prompt), max(0, each.prompt - each.cached), becomes(each), each.of)
            for each in newest
        ]

    def remaining(self, under_way: Sequence[RequestRecord]) -> list[RequestLengths]:
        """Remaining work of running jobs: an answer that has begun needs no more prefill."""
        becomes = self._final_lengths(under_way)
        found: list[RequestLengths] = []
        for each in under_way:
            there = each.prompt + each.output if each.output else min(each.cached, each.prompt)
            found.append(
                RequestLengths(there, max(0, each.prompt - there), max(1, becomes(each) - each.output), each.of)
            )
        return found

    def _final_lengths(self, some: Sequence[RequestRecord]) -> Callable[[RequestRecord], int]:
        """A function that returns the actual or estimated number of tokens of an answer."""
        of_all = _Ended([each.output for each in self._records if each.ended])
        ended = {
            of: _Ended([each.output for each in self._records if each.ended and each.of == of])
            for of in {each.of for each in some if not each.ended}
        }
        return lambda each: each.output if each.ended else (ended[each.of] or of_all).longer_than(each.output)

    def _newest(self, window_s: float) -> list[RequestRecord]:
        since = self._clock() - window_s
        return [each for each in self._records if each.at >= since]


class _Ended:
    """Lengths of the newest of some completed answers; false if there are none."""

    def __init__(self, outputs: Sequence[int]) -> None:
        self._outputs = sorted(outputs[-KNOWN:])
        self._sums = [0, *itertools.accumulate(self._outputs)]

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def longer_than(self, tokens: int) -> int:
        """Mean of the lengths greater than `tokens`; `tokens` if there are none."""
        place = bisect.bisect_right(self._outputs, tokens)
        longer = len(self._outputs) - place
        return round((self._sums[-1] - self._sums[place]) / longer) if longer else tokens
