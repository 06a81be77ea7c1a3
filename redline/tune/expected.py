"""What a split of a fleet into roles does with the requests that come: predicted, from the step model.

A sample of requests as they came is looked at, so that long prompts with short answers and short ones with long answers
are not averaged away. Workers for prompts are a queue with so many servers; answers fill steps until as many begin as
end; prompts that would wait too long are computed where answers are, in chunks as `tune.chunks` cuts them where steps
beside answers are bounded. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from redline.tune.chunks import Answers, Prompt, chunk_tokens
from redline.tune.steps import StepModel
from redline.tune.targets import Targets
from redline.wire.base import Record

SAMPLE = 512  # requests that are looked at: more change nothing
MOST_USE = 0.995  # of a queue's servers: beyond, it is taken to grow for as long as one looks
RATES = 0.8, 1.0, 1.25  # times the rate: what comes next is not known better, and room is worth something
COSTS_TWICE = 2  # what is not cached counts about as often where a job is sent (`route/choose.py`)
HELD_UP = 0.5  # likewise, of an answer that a prompt holds up: there it is weighed by what is promised
TURNS = 48  # of finding how many answers there are at once
ANY = 1e9  # seconds, where nothing is promised

_Array = NDArray[np.float64]


class WorkerModel(Record, frozen=True):
    """What one worker does and holds.

    gpus: that it has; 0: none, its cost counts as one. step_tokens: positions of a step at most. slots: answers at
    once at most. kv_tokens: of all its pages. tokens_per_step: of an answer, more than 1 with a drafter. handoff_ms
    and handoff_token_ms: from the end of a prompt to its first token at another worker, and what a token of it adds.
    step_ms: that a step with prompts beside answers may take (`tune.chunks`); None: any time.
    """

    name: str
    steps: StepModel
    step_tokens: int
    slots: int
    kv_tokens: int
    gpus: int = 1
    tokens_per_step: float = 1.0
    handoff_ms: float = 0.0
    handoff_token_ms: float = 0.0
    step_ms: float | None = None


class Asked(NamedTuple):
    """Tokens of one request: what of its prompt was cached and what was not, and its answer. of: its class."""

    cached: int
    uncached: int
    output: int
    of: str = ""


class Traffic(NamedTuple):
    """What comes: requests a second, and requests as they came lately, for the joint distribution of their lengths.

    under_way: what is left of those that have not ended: of prompts and answers. It is for who plays them; predictions
    are of what comes.
    """

    rate: float
    requests: Sequence[Asked]
    under_way: Sequence[Asked] = ()


class Roles(NamedTuple):
    """How many workers have each role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @property
    def workers(self) -> int:
        """All of them."""
        return self.prefill + self.decode + self.both

    def flips(self, other: "Roles") -> int:
        """How many of as many workers change their role to become `other`. Between "decode" and "both" nothing has to
        change where a worker is concerned; it counts all the same, since prompts then go elsewhere."""
        return sum(max(0, b - a) for a, b in zip(self, other, strict=True))


class Predicted(NamedTuple):
    """What a split is expected to do.

    goodput: good requests a second. steady: of all requests the share that is good, on the mean over RATES. prefill,
    decode: the share of their time, or of the answers that they can hold, that is in use; beyond 1 their queue grows.
    """

    roles: Roles
    goodput: float
    attainment: float
    steady: float
    prefill: float
    decode: float

    @property
    def rank(self) -> tuple[float, float]:
        """The larger the better: good requests, and of none or as many the split with more room."""
        return round(self.steady, 4), -max(self.prefill, self.decode)


class Sample:
    """Requests as arrays, those with the shortest prompts first, and what a split does with them."""

    def __init__(self, traffic: Traffic, model: WorkerModel, targets: Mapping[str, Targets], horizon_s: float) -> None:
        some = traffic.requests[:: max(1, len(traffic.requests) // SAMPLE)]
        pair = model.steps.prompt, model.steps.pair
        requests = sorted(
            some, key=lambda each: each.uncached * (pair[0] + pair[1] * (each.cached + each.uncached / 2))
        )
        self.rate = traffic.rate if requests else 0.0
        self._model, self._horizon_s = model, horizon_s
        self._bounded = model.step_ms is not None
        if not self.rate:
            return
        wanted = [targets.get(each.of, targets[""]) for each in requests]
        self._ttft_s: _Array = np.array([min(each.ttft_s, ANY) for each in wanted])
        self._itl_s: _Array = np.array([min(each.itl_s, ANY) for each in wanted])
        self._cached: _Array = np.array([each.cached for each in requests], dtype=float)
        self._uncached: _Array = np.array([each.uncached for each in requests], dtype=float)
        self._output: _Array = np.array([max(1, each.output) for each in requests], dtype=float)
        self._steps = self._output / model.tokens_per_step
        lengths = self._cached + self._uncached
        self._context = float((self._steps * (lengths + self._output / 2)).sum() / self._steps.sum())
        held = float((self._steps * (lengths + self._output)).sum() / self._steps.sum())
        self._most = max(1.0, min(model.slots, model.kv_tokens / held))  # answers of a worker at once
        self._beside: dict[tuple[int, bool], _Beside] = {}
        self._chosen: dict[int, _Array] = {}  # chunks, by how many answers are beside them
        self._alone_s = self._prompts_s(0.0, self._whole(0.0))
        self._handoff_s = (model.handoff_ms + model.handoff_token_ms * lengths) / 1e3

    def predict(self, roles: Roles) -> Predicted:
        """Roles with some that do both and some for prompts alone count those that do both as if they answered."""
        if not self.rate:
            return Predicted(roles, 0.0, 1.0, 1.0, 0.0, 0.0)
        answering = roles.decode + roles.both
        if not answering:
            return Predicted(roles, 0.0, 0.0, 0.0, math.inf, math.inf)
        at = {times: self._split(times * self.rate, roles.prefill, answering) for times in RATES}
        share, prefill, decode = at[1.0]
        steady = sum(each[0] for each in at.values()) / len(RATES)
        return Predicted(roles, self.rate * share, share, steady, prefill, decode)

    def share(self, roles: Roles, times: float) -> float:
        """Of all requests those that are good, at so many times the rate. At least one worker answers."""
        return self._split(times * self.rate, roles.prefill, roles.decode + roles.both)[0]

    def keeps(self, roles: Roles, times: float, share: float) -> bool:
        """Whether so large a share of requests is good, at so many times the rate, and no queue grows: where a promise
        cannot be kept by anybody requests are to be answered all the same."""
        good, prefill, decode = self._split(times * self.rate, roles.prefill, roles.decode + roles.both)
        return good >= share and prefill <= MOST_USE and decode <= 1

    def _split(self, rate: float, prefill: int, decode: int) -> tuple[float, float, float]:
        """(share of requests that are good, use of those who compute prompts, of those who answer).

        Where steps beside answers are bounded and prompts cannot keep up so, they are computed in chunks as long as
        first tokens need (`tune.chunks`): it is then the better of both.
        """
        found = self._good(rate, prefill, decode)
        if self._model.step_ms is None or found[1] <= MOST_USE:
            return found
        self._bounded = False
        try:
            return max(found, self._good(rate, prefill, decode))
        finally:
            self._bounded = True

    def _good(self, rate: float, prefill: int, decode: int) -> tuple[float, float, float]:
        here, count = self._here(rate, prefill, decode), len(self._output)
        each = rate / count
        rows, full = self._rows(rate / decode, here, each / decode)
        used, in_time = 0.0, np.zeros(count)
        if here < count:
            within_s = (self._ttft_s - self._handoff_s)[here:]
            used, in_time[here:] = self._in_time((count - here) * each, self._alone_s[here:], prefill, within_s)
        if here:
            service_s = self._prompts(rows).service_s[:here]
            used_here, in_time[:here] = self._in_time(here * each, service_s, decode, self._ttft_s[:here])
            if self._bounded:
                quick = self._in_time_before_longer(rows, here, each / decode)
                in_time[:here] = np.maximum(in_time[:here], quick)
            used = max(used, used_here)
        good = in_time * self._in_pace(rows, here, each / decode, decode) * self._room(full)
        return float(good.mean()), used, full

    def _here(self, rate: float, prefill: int, decode: int) -> int:
        """How many of the sample's prompts, the shortest, are computed where their answers are: none, until one would
        wait with the workers for prompts for longer than what it costs there. That is weighed by the answers that it
        holds up (`route/choose.py`), and less for a short one, so that short ones go first."""
        count = len(self._output)
        if not prefill:
            return count
        each = rate / count

        def may_be(here: int) -> bool:
            """Whether the shortest of the others waits no longer than that."""
            wait_s = self._wait_s((count - here) * each, self._alone_s[here:], prefill)[2]
            rows, _ = self._rows(rate / decode, here, each / decode)
            return wait_s <= COSTS_TWICE * float(self._alone_s[here]) * max(1.0, HELD_UP * rows)

        if may_be(0):
            return 0
        low, high = 0, count
        while high - low > max(1, count // 64):
            middle = (low + high) // 2
            low, high = (low, middle) if may_be(middle) else (middle, high)
        return high

    def _prompts_s(self, rows: float, chunk: _Array) -> _Array:
        """Seconds of each prompt's steps, beside so many rows, with so many of its tokens in each."""
        model = self._model.steps
        sizes, which = np.unique(chunk, return_inverse=True)
        share: _Array = np.array([model.share(size / 2 + rows) for size in sizes])  # of a chunk of some length
        count = np.ceil(self._uncached / chunk)
        beside = model.base + rows * (model.row + model.context * self._context)
        shares = count * share[which]
        pairs = self._uncached * (self._cached + (self._uncached + 1) / 2)
        expanded = count * self._cached + chunk * count * (count - 1) / 2 + self._uncached  # each chunk's end
        own = model.prompt * self._uncached + model.pair * pairs + model.expand * expanded
        return (count * beside + model.experts * shares + own) / 1e3

    def _prompts(self, rows: float) -> "_Beside":
        """All prompts beside so many rows, to half a row."""
        near = round(2 * rows), self._bounded
        if near not in self._beside:
            self._beside[near] = self._beside_rows(near[0] / 2)
        return self._beside[near]

    def _beside_rows(self, rows: float) -> "_Beside":
        whole = self._whole(rows)
        service_s = steps_s = self._prompts_s(rows, whole)
        steps = np.ceil(self._uncached / self._model.step_tokens)
        if self._bounded:
            # Answers come and go: at times none is there, and chunks are whole.
            some = -math.expm1(-rows)
            chunk = np.minimum(self._chunks(round(2 * math.log2(max(rows, 1.0)))), whole)
            steps, steps_s = np.ceil(self._uncached / chunk), self._prompts_s(rows, chunk)
            service_s = some * steps_s + (1 - some) * service_s
        return _Beside(service_s, _summed(service_s), _summed(service_s**2), _summed(steps), _summed(steps_s))

    def _whole(self, rows: float) -> _Array:
        """Of each prompt the tokens in a step, where nothing bounds it."""
        return np.full_like(self._uncached, max(1.0, self._model.step_tokens - rows))

    def _chunks(self, double: int) -> _Array:
        """Of each prompt the tokens in a step beside two to the power of half so many answers, as a worker chooses
        them: by kinds of prompts, at the middle of each."""
        if double in self._chosen:
            return self._chosen[double]
        rows = 2 ** (double / 2)
        model, chunks = self._model, self._whole(rows)
        assert model.step_ms is not None, "nothing bounds the steps"
        answers = Answers(max(1, round(rows)), rows * self._context)
        depth = self._cached + self._uncached / 2
        _, kinds = np.unique(
            np.stack([np.log2(self._uncached + 1), np.log2(depth + 1)]).round(), axis=1, return_inverse=True
        )
        most = math.ceil(chunks[0])
        for kind in range(int(kinds.max()) + 1):
            those = kinds.reshape(-1) == kind
            prompt = Prompt(max(1, round(self._uncached[those].mean())), round(depth[those].mean()))
            chunks[those] = chunk_tokens(model.steps.step_ms, most, model.step_ms, answers, [prompt])
        self._chosen[double] = np.maximum(chunks, 1.0)
        return self._chosen[double]

    def _decode_s(self, rows: float) -> float:
        return self._model.steps.decode_ms(rows, self._context) / 1e3

    def _wait_s(self, rate: float, service_s: _Array, servers: int) -> tuple[float, float, float]:
        """(use of the servers, share that waits, seconds that all wait on the mean): a queue with several servers and
        any distribution of service, by the approximation of Allen and Cunneen."""
        mean = float(service_s.mean())
        used = rate * mean / servers
        if used > MOST_USE:
            return used, 1.0, math.inf
        waits = used ** (math.sqrt(2 * (servers + 1)) - 1)
        spread = (1 + float(service_s.var()) / mean**2) / 2
        return used, waits, waits * spread * mean / (servers * (1 - used))

    def _in_time(self, rate: float, service_s: _Array, servers: int, within_s: _Array) -> tuple[float, _Array]:
        """(use of the servers, how likely each prompt is done within its time): waits are exponential."""
        used, waits, wait_s = self._wait_s(rate, service_s, servers)
        left = within_s - service_s
        if math.isinf(wait_s):  # who comes early finds a short queue; it grows by (used - 1) seconds a second
            return used, np.clip(left / (max(used - MOST_USE, 1e-3) * self._horizon_s), 0.0, 1.0)
        late = waits * np.exp(-np.maximum(left, 0) * waits / max(wait_s, 1e-9))
        return used, np.where(left > 0, 1 - late, 0.0)

    def _in_time_before_longer(self, rows: float, here: int, each: float) -> _Array:
        """How likely each prompt is done within its time by the half of each step that shorter ones than the oldest
        have, the least first: what is shorter is before it."""
        beside = self._prompts(rows)
        service_s = 2 * beside.service_s[:here]
        before = np.minimum(2 * each * beside.sums[:here], MOST_USE)  # of that half, by those that are shorter
        left, wait_s = self._ttft_s[:here] - service_s, before / (1 - before) * service_s
        return np.where(left > 0, 1 - before * np.exp(-np.maximum(left, 0) / np.maximum(wait_s, 1e-9)), 0.0)

    def _rows(self, rate: float, here: int, each: float) -> tuple[float, float]:
        """(answers of a worker at once, share of those that it can hold), where so many requests a second come to it,
        and it computes the first `here` prompts of the sample itself, each of them so often a second."""
        steps = float(self._steps.mean())
        rows = 0.0
        for _ in range(TURNS):
            last, rows = rows, rate * (steps * self._step_s(rows, here, each) + self._behind_s(rows, here, each))
            if rows > 4 * self._most or abs(rows - last) < 0.005 * rows:
                break
        return min(rows, self._most), rows / self._most

    def _step_s(self, rows: float, here: int, each: float) -> float:
        """Seconds between two tokens of an answer, on the mean, beside such prompts, and beside so many other answers:
        who comes finds as many as there are on the mean, and is one more."""
        plain = self._decode_s(rows + 1)
        if not here:
            return plain
        steps, steps_s = (float(of[here]) for of in self._prompts(rows)[-2:])
        busy = each * steps_s  # of a second
        if busy >= 1:
            return steps_s / steps if self._bounded else math.inf
        # In a second so many steps have a chunk, and what time is left is for plain ones.
        return 1 / (each * steps + (1 - busy) / plain)

    def _behind_s(self, rows: float, here: int, each: float) -> float:
        """Seconds for which an answer stands still at its beginning, on the mean: prompts that came while its own was
        computed are before it, and those that come meanwhile."""
        if not here or self._bounded:  # then it goes on beside them
            return 0.0
        beside = self._prompts(rows)
        left = 1 - each * float(beside.sums[here])
        return math.inf if left <= 0 else each * float(beside.squares[here]) / (2 * left**2)

    def _in_pace(self, rows: float, here: int, each: float, workers: int) -> _Array:
        """How likely each answer keeps its pace: rows vary as what comes by chance does, shared by the workers; and
        some answers are met by more prompts than others. Prompts come behind prompts, so their sum has a long tail:
        where there are any, the pace is taken to be distributed log-normally."""
        mean = self._step_s(rows, here, each)
        behind_s = self._behind_s(rows, here, each)
        if not math.isfinite(mean + behind_s):
            return np.zeros_like(self._itl_s)
        more = self._step_s(rows + 1, here, each) - mean  # what one more answer adds
        if not math.isfinite(more):
            more = mean
        deviation: _Array = np.full_like(self._itl_s, max(more, 0.0) * math.sqrt(rows / workers))
        if not here or self._bounded:
            if here:
                uneven_s, slowest_s = self._uneven_s(rows, here, each)
                deviation = np.where(self._itl_s < slowest_s, np.hypot(deviation, uneven_s), deviation)
            off = (self._itl_s - mean) / np.maximum(deviation, 1e-6)
        else:
            beside = self._prompts(rows)
            used, squares = each * float(beside.sums[here]), each * float(beside.squares[here])
            # Each prompt that meets an answer brings those behind it: of such a busy time the second moment.
            met = self._steps * self._decode_s(rows) * squares / (1 - used) ** 3
            still = behind_s**2 * (2 - used) / max(used, 1e-9)  # nobody is before most, and many before few
            means = mean + behind_s / self._steps
            deviation = np.hypot(deviation, np.sqrt(met + still) / self._steps)
            width = np.sqrt(np.log1p((deviation / means) ** 2))
            off = (np.log(self._itl_s / means) + width**2 / 2) / np.maximum(width, 1e-6)
        return 1 / (1 + np.exp(-1.702 * np.clip(off, -20, 20)))

    def _uneven_s(self, rows: float, here: int, each: float) -> tuple[_Array, float]:
        """(By how much the seconds between two tokens of an answer differ, where steps beside it are bounded: some are
        met by more steps with prompts than others; and those seconds where each step has some)."""
        beside, plain = self._prompts(rows), self._decode_s(rows + 1)
        steps_s = float(beside.steps_s[here])
        used = min(each * steps_s, 1.0)
        slower = max(0.0, steps_s / max(float(beside.steps[here]), 1.0) - plain)
        one_s = float(beside.squares[here]) / max(float(beside.sums[here]), 1e-9)
        met_s = one_s / max(1 - used, 1e-3)  # for which they come together
        parts = np.maximum(self._steps * self._step_s(rows, here, each) / (2 * met_s), 1.0)
        return slower * np.sqrt(used * (1 - used) / parts), plain + slower

    def _room(self, full: float) -> float:
        """Of answers, those that find room at a worker before their time is over."""
        if full <= MOST_USE:
            return 1.0
        patience = float(self._ttft_s.mean())
        return min(1.0, patience / (max(full - MOST_USE, 1e-3) * self._horizon_s))


class _Beside(NamedTuple):
    """Seconds that prompts take beside some rows: of each, and of the first so many the sum, and that of squares.

    steps, steps_s: of the first so many, how many steps they have together while an answer is there, and what these
    take.
    """

    service_s: _Array
    sums: _Array
    squares: _Array
    steps: _Array
    steps_s: _Array


def _summed(values: _Array) -> _Array:
    """Of the first so many, their sum: of none, of one ..."""
    return np.concatenate(([0.0], np.cumsum(values)))
