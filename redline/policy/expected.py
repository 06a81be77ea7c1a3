"""Predicted performance of a fleet's role split (prefill, decode or both), from the step model.

The prediction uses a sample of individual requests rather than means, because long prompts with short outputs and short
prompts with long outputs would average out. Prefill workers are a queue with several servers. Decode batches grow until
requests finish as fast as they arrive. Prompts that would wait too long for a prefill worker are computed on the decode
workers, in chunks that `policy.chunk_budget` chooses if the time of mixed steps is bounded. Pure functions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from redline.messages.base import Record
from redline.policy.chunk_budget import Answers, PrefillLeft, chunk_tokens
from redline.policy.steps import StepModel
from redline.policy.targets import Targets

SAMPLE = 512  # requests in the sample: more do not change the result
MOST_USE = 0.995  # utilization above which a queue counts as growing for the whole horizon
# factors of the request rate over which a split is averaged: the future rate is uncertain, and headroom has value
RATES = 0.8, 1.0, 1.25
COSTS_TWICE = 2  # factor of local prefill time in the router's decision (`router/placement.py`)
HELD_UP = 0.5  # factor per decoding request that a local prefill delays; the router weighs these by SLO strain
TURNS = 48  # iterations to find the number of concurrent decoding requests
ANY = 1e9  # seconds, in the place of an infinite SLO target

_Array = NDArray[np.float64]


class WorkerModel(Record, frozen=True):
    """A worker's performance and capacity.

    gpus: number of its GPUs; 0: none, its cost counts as one GPU. step_tokens: positions per step, at most. slots:
    running requests, at most. kv_tokens: tokens in all KV pages. tokens_per_step: tokens per decode row and step, more
    than 1 with a drafter. handoff_ms and handoff_token_ms: time of the KV transfer from the end of a prompt to its
    first token at another worker, fixed and per prompt token. step_ms: bound on the time of a mixed step
    (`policy.chunk_budget`); None: no bound.
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


class RequestTokens(NamedTuple):
    """Token counts of one request: cached and uncached prompt tokens, and output tokens. of: its SLO class."""

    cached: int
    uncached: int
    output: int
    of: str = ""


class Traffic(NamedTuple):
    """Incoming traffic: requests per second, and a sample of recent requests, which gives the joint distribution of
    lengths.

    under_way: remaining tokens of unfinished requests, of prompts and outputs. Used by simulation only; predictions are
    of requests that arrive.
    """

    rate: float
    requests: Sequence[RequestTokens]
    under_way: Sequence[RequestTokens] = ()


class Roles(NamedTuple):
    """Number of workers with each role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.prefill + self.decode + self.both

    def flips(self, other: "Roles") -> int:
        """How many workers change their role to reach `other`, a split of the same number of workers. A change between
        "decode" and "both" needs no action on the worker; it counts all the same, since prompts are then routed
        elsewhere."""
        return sum(max(0, b - a) for a, b in zip(self, other, strict=True))


class PredictedGoodput(NamedTuple):
    """Predicted performance of a split.

    goodput: requests per second that meet their SLO targets. attainment: their share of all requests. steady: that
    share, averaged over RATES. prefill, decode: utilization of the prefill workers' time and of the decode capacity;
    above 1 their queue grows.
    """

    roles: Roles
    goodput: float
    attainment: float
    steady: float
    prefill: float
    decode: float

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, larger is better: attainment averaged over RATES, then lower utilization."""
        return round(self.steady, 4), -max(self.prefill, self.decode)


class TrafficSample:
    """The sample as arrays, sorted by prefill time, shortest first, with the predictions for a split."""

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
        self._most = max(1.0, min(model.slots, model.kv_tokens / held))  # decoding requests per worker, at most
        self._beside: dict[tuple[int, bool], _MixedPrefills] = {}
        self._chosen: dict[int, _Array] = {}  # chunk sizes, by the number of decoding requests in the step
        self._alone_s = self._prompts_s(0.0, self._whole(0.0))
        self._handoff_s = (model.handoff_ms + model.handoff_token_ms * lengths) / 1e3

    def predict(self, roles: Roles) -> PredictedGoodput:
        """The predicted performance of a split. If some workers do both and others only prefill, those that do both
        count as decode workers."""
        if not self.rate:
            return PredictedGoodput(roles, 0.0, 1.0, 1.0, 0.0, 0.0)
        answering = roles.decode + roles.both
        if not answering:
            return PredictedGoodput(roles, 0.0, 0.0, 0.0, math.inf, math.inf)
        at = {times: self._split(times * self.rate, roles.prefill, answering) for times in RATES}
        share, prefill, decode = at[1.0]
        steady = sum(each[0] for each in at.values()) / len(RATES)
        return PredictedGoodput(roles, self.rate * share, share, steady, prefill, decode)

    def share(self, roles: Roles, times: float) -> float:
        """The share of requests that meet their targets, at `times` times the rate. Needs at least one worker that
        decodes."""
        return self._split(times * self.rate, roles.prefill, roles.decode + roles.both)[0]

    def keeps(self, roles: Roles, times: float, share: float) -> bool:
        """Whether at least `share` of the requests meet their targets at `times` times the rate, and no queue grows:
        if no worker can meet a target, its requests must be served all the same."""
        good, prefill, decode = self._split(times * self.rate, roles.prefill, roles.decode + roles.both)
        return good >= share and prefill <= MOST_USE and decode <= 1

    def _split(self, rate: float, prefill: int, decode: int) -> tuple[float, float, float]:
        """(share of requests that meet their targets, utilization of prefill workers, utilization of decode workers).

        If the time of mixed steps is bounded and prefill cannot keep up with such chunks, chunks are made long enough
        for the TTFT targets (`policy.chunk_budget`): the result is then the better of both.
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
        """How many of the sample's prompts, from the shortest on, are computed on the decode workers: none, until
        one would wait for a prefill worker longer than its local prefill costs. That cost is weighed by the decoding
        requests that it delays (`router/placement.py`). It is lower for short prompts, so they are moved first."""
        count = len(self._output)
        if not prefill:
            return count
        each = rate / count

        def may_be(here: int) -> bool:
            """Whether the shortest remaining prompt waits no longer than its local cost."""
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
        """Seconds of all steps of each prompt, in batches with `rows` decode rows and `chunk` prompt tokens per
        step."""
        model = self._model.steps
        sizes, which = np.unique(chunk, return_inverse=True)
        # share of experts read, by chunk size
        share: _Array = np.array([model.share(size / 2 + rows) for size in sizes])
        count = np.ceil(self._uncached / chunk)
        beside = model.base + rows * (model.row + model.context * self._context)
        shares = count * share[which]
        pairs = self._uncached * (self._cached + (self._uncached + 1) / 2)
        # positions up to each chunk's end, summed
        expanded = count * self._cached + chunk * count * (count - 1) / 2 + self._uncached
        own = model.prompt * self._uncached + model.pair * pairs + model.expand * expanded
        return (count * beside + model.experts * shares + own) / 1e3

    def _prompts(self, rows: float) -> "_MixedPrefills":
        """Times of all prompts in batches with `rows` decode rows, rounded to half a row."""
        near = round(2 * rows), self._bounded
        if near not in self._beside:
            self._beside[near] = self._beside_rows(near[0] / 2)
        return self._beside[near]

    def _beside_rows(self, rows: float) -> "_MixedPrefills":
        whole = self._whole(rows)
        service_s = steps_s = self._prompts_s(rows, whole)
        steps = np.ceil(self._uncached / self._model.step_tokens)
        if self._bounded:
            # The number of decode rows varies: at times there is none, and chunks are whole.
            some = -math.expm1(-rows)
            chunk = np.minimum(self._chunks(round(2 * math.log2(max(rows, 1.0)))), whole)
            steps, steps_s = np.ceil(self._uncached / chunk), self._prompts_s(rows, chunk)
            service_s = some * steps_s + (1 - some) * service_s
        return _MixedPrefills(service_s, _summed(service_s), _summed(service_s**2), _summed(steps), _summed(steps_s))

    def _whole(self, rows: float) -> _Array:
        """Tokens of each prompt per step if no bound limits the step's time."""
        return np.full_like(self._uncached, max(1.0, self._model.step_tokens - rows))

    def _chunks(self, double: int) -> _Array:
        """Tokens of each prompt per step with 2^(double / 2) decode rows, as a worker chooses them. Chosen once for
        each kind of prompt, at the kind's mean."""
        if double in self._chosen:
            return self._chosen[double]
        rows = 2 ** (double / 2)
        model, chunks = self._model, self._whole(rows)
        assert model.step_ms is not None, "step_ms is not set"
        answers = Answers(max(1, round(rows)), rows * self._context)
        depth = self._cached + self._uncached / 2
        _, kinds = np.unique(
            np.stack([np.log2(self._uncached + 1), np.log2(depth + 1)]).round(), axis=1, return_inverse=True
        )
        most = math.ceil(chunks[0])
        for kind in range(int(kinds.max()) + 1):
            those = kinds.reshape(-1) == kind
            prompt = PrefillLeft(max(1, round(self._uncached[those].mean())), round(depth[those].mean()))
            chunks[those] = chunk_tokens(model.steps.step_ms, most, model.step_ms, answers, [prompt])
        self._chosen[double] = np.maximum(chunks, 1.0)
        return self._chosen[double]

    def _decode_s(self, rows: float) -> float:
        return self._model.steps.decode_ms(rows, self._context) / 1e3

    def _wait_s(self, rate: float, service_s: _Array, servers: int) -> tuple[float, float, float]:
        """(utilization, probability of waiting, mean wait in seconds over all requests) of a queue with several
        servers and any distribution of service times: the Allen-Cunneen approximation."""
        mean = float(service_s.mean())
        used = rate * mean / servers
        if used > MOST_USE:
            return used, 1.0, math.inf
        waits = used ** (math.sqrt(2 * (servers + 1)) - 1)
        spread = (1 + float(service_s.var()) / mean**2) / 2
        return used, waits, waits * spread * mean / (servers * (1 - used))

    def _in_time(self, rate: float, service_s: _Array, servers: int, within_s: _Array) -> tuple[float, _Array]:
        """(utilization, probability that each prompt finishes within its time); waits are taken to be exponential."""
        used, waits, wait_s = self._wait_s(rate, service_s, servers)
        left = within_s - service_s
        if math.isinf(wait_s):  # early requests find a short queue; it grows by (used - 1) seconds per second
            return used, np.clip(left / (max(used - MOST_USE, 1e-3) * self._horizon_s), 0.0, 1.0)
        late = waits * np.exp(-np.maximum(left, 0) * waits / max(wait_s, 1e-9))
        return used, np.where(left > 0, 1 - late, 0.0)

    def _in_time_before_longer(self, rows: float, here: int, each: float) -> _Array:
        """Probability that each prompt finishes in time on the half of each step that is reserved for prompts
        shorter than the oldest one, shortest first: every shorter prompt goes before it."""
        beside = self._prompts(rows)
        service_s = 2 * beside.service_s[:here]
        before = np.minimum(2 * each * beside.sums[:here], MOST_USE)  # utilization of that half by shorter prompts
        left, wait_s = self._ttft_s[:here] - service_s, before / (1 - before) * service_s
        return np.where(left > 0, 1 - before * np.exp(-np.maximum(left, 0) / np.maximum(wait_s, 1e-9)), 0.0)

    def _rows(self, rate: float, here: int, each: float) -> tuple[float, float]:
        """(concurrent decoding requests per worker, their number over the worker's capacity), if `rate` requests per
        second arrive at a worker that also computes the first `here` prompts of the sample itself, each of them
        `each` times per second."""
        steps = float(self._steps.mean())
        rows = 0.0
        for _ in range(TURNS):
            last, rows = rows, rate * (steps * self._step_s(rows, here, each) + self._behind_s(rows, here, each))
            if rows > 4 * self._most or abs(rows - last) < 0.005 * rows:
                break
        return min(rows, self._most), rows / self._most

    def _step_s(self, rows: float, here: int, each: float) -> float:
        """Mean seconds between two tokens of a request, with local prefill of the first `here` prompts and `rows`
        other decoding requests: an arriving request finds the mean number and adds one."""
        plain = self._decode_s(rows + 1)
        if not here:
            return plain
        steps, steps_s = (float(of[here]) for of in self._prompts(rows)[-2:])
        busy = each * steps_s  # share of the time with a chunk in the step
        if busy >= 1:
            return steps_s / steps if self._bounded else math.inf
        # Per second, `each * steps` steps have a chunk, and the remaining time is for plain decode steps.
        return 1 / (each * steps + (1 - busy) / plain)

    def _behind_s(self, rows: float, here: int, each: float) -> float:
        """Mean seconds that a request waits before its second token: prompts that arrived while its own was computed
        are ahead of it, and so are prompts that arrive during this wait."""
        if not here or self._bounded:  # with bounded steps it decodes in the same batches
            return 0.0
        beside = self._prompts(rows)
        left = 1 - each * float(beside.sums[here])
        return math.inf if left <= 0 else each * float(beside.squares[here]) / (2 * left**2)

    def _in_pace(self, rows: float, here: int, each: float, workers: int) -> _Array:
        """Probability that each request meets its inter-token target. The number of rows varies like random arrivals
        divided among the workers, and some requests are delayed by more prompts than others. Prompts queue up after one
        another, so the sum of their times has a long tail: with local prefill the time per token is taken to be
        log-normal."""
        mean = self._step_s(rows, here, each)
        behind_s = self._behind_s(rows, here, each)
        if not math.isfinite(mean + behind_s):
            return np.zeros_like(self._itl_s)
        more = self._step_s(rows + 1, here, each) - mean  # seconds that one more decoding request adds
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
            # Each prompt that delays a request brings the prompts that queue after it: the second moment of such a busy
            # period.
            met = self._steps * self._decode_s(rows) * squares / (1 - used) ** 3
            # most requests have no prompt ahead of them, few have many
            still = behind_s**2 * (2 - used) / max(used, 1e-9)
            means = mean + behind_s / self._steps
            deviation = np.hypot(deviation, np.sqrt(met + still) / self._steps)
            width = np.sqrt(np.log1p((deviation / means) ** 2))
            off = (np.log(self._itl_s / means) + width**2 / 2) / np.maximum(width, 1e-6)
        return 1 / (1 + np.exp(-1.702 * np.clip(off, -20, 20)))

    def _uneven_s(self, rows: float, here: int, each: float) -> tuple[_Array, float]:
        """(standard deviation of the seconds between two tokens of each request if mixed steps are bounded, since
        some requests share their batches with more prefill steps than others; the seconds per token if every step
        has a chunk)."""
        beside, plain = self._prompts(rows), self._decode_s(rows + 1)
        steps_s = float(beside.steps_s[here])
        used = min(each * steps_s, 1.0)
        slower = max(0.0, steps_s / max(float(beside.steps[here]), 1.0) - plain)
        one_s = float(beside.squares[here]) / max(float(beside.sums[here]), 1e-9)
        met_s = one_s / max(1 - used, 1e-3)  # seconds of one run of consecutive steps with chunks
        parts = np.maximum(self._steps * self._step_s(rows, here, each) / (2 * met_s), 1.0)
        return slower * np.sqrt(used * (1 - used) / parts), plain + slower

    def _room(self, full: float) -> float:
        """The share of requests that are admitted to a worker's batch before their TTFT target is over."""
        if full <= MOST_USE:
            return 1.0
        patience = float(self._ttft_s.mean())
        return min(1.0, patience / (max(full - MOST_USE, 1e-3) * self._horizon_s))


class _MixedPrefills(NamedTuple):
    """Prefill times in batches with some number of decode rows.

    service_s: seconds of each prompt. sums, squares: prefix sums of service_s and of its square, at index n over the
    first n prompts. steps, steps_s: prefix sums of the steps that run while any request decodes, and of their seconds.
    """

    service_s: _Array
    sums: _Array
    squares: _Array
    steps: _Array
    steps_s: _Array


def _summed(values: _Array) -> _Array:
    """Prefix sums, starting with 0 for no value."""
    return np.concatenate(([0.0], np.cumsum(values)))
