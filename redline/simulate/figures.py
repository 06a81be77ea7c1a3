"""The results of a simulation as numbers: SLO attainment, cost, and both over time."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from redline.messages.base import Record
from redline.simulate.fleet import RequestResult, Simulation
from redline.simulate.worker import gap_ms

BUCKETS = 60  # of a run's time, at most
LEAST_BUCKET_S = 10.0


class Share(Record, frozen=True):
    """For the requests of a class: how many arrived, and how many met their SLO targets."""

    requests: int
    good: int


class FleetInterval(Record, frozen=True):
    """An interval of the run that begins at `at_s`.

    requests_s, good_s: requests per second that arrived in it, and those of them that met their targets. prefill,
    decode, both: workers of each role. running: mean number of workers that are paid for, including those that start
    or drain.
    """

    at_s: float
    requests_s: float
    good_s: float
    prefill: int
    decode: int
    both: int
    running: float


class Change(Record, frozen=True):
    """The target roles of the fleet from `at_s` on. running: workers that are paid for."""

    at_s: float
    prefill: int
    decode: int
    both: int
    running: int
    why: str


class Figures(Record, frozen=True):
    """One run. Times are in seconds unless the name has another unit; infinite times (unfinished requests) are null.

    goodput: requests per second that met their targets, over `seconds` of the trace. itl_ms_p50, itl_ms_p99: of all
    inter-token gaps; a request's target applies to its own mean. remote: share of requests with prefill and decode on
    different workers. workers, gpus: of the whole fleet, including those that do not run. cost: of the GPUs of running
    workers over `seconds`, in the unit of the price; without a price, in GPU-hours. use: fraction of their running time
    in which workers computed.
    """

    name: str
    workers: int
    gpus: int
    seconds: float
    requests: int
    unfinished: int
    good: int
    goodput: float
    attainment: float
    classes: dict[str, Share]
    ttft_s_p50: float | None
    ttft_s_p99: float | None
    itl_ms_p50: float | None
    itl_ms_p99: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    remote: float
    use: float
    cost: float
    cost_of_1000_good: float | None
    cost_of_a_million_tokens: float | None
    changes: tuple[Change, ...]
    over_time: tuple[FleetInterval, ...]


def figures(simulation: Simulation, name: str, seconds: float, price: float = 1.0) -> Figures:
    """The figures of a run that has ended. seconds: length of its trace. price: of one GPU-hour."""
    ended = simulation.ended
    each_gpus = max(1, simulation.workers[0].model.gpus)
    good = sum(each.good for each in ended)
    cost = each_gpus * worker_seconds(simulation, 0.0, seconds) / 3600 * price
    ran_s = worker_seconds(simulation, 0.0, max(simulation.now, 1e-9))
    of = Counter(each.of for each in ended)
    good_of = Counter(each.of for each in ended if each.good)
    firsts = sorted(each.first_s for each in ended)
    busy_s = sum(worker.busy_s for worker in simulation.workers)
    tokens = sum(each.output for each in ended if math.isfinite(each.first_s))
    return Figures(
        name=name,
        workers=len(simulation.workers),
        gpus=each_gpus * len(simulation.workers),
        seconds=seconds,
        requests=len(ended),
        unfinished=sum(not math.isfinite(each.first_s) for each in ended),
        good=good,
        goodput=round(good / seconds, 4),
        attainment=round(good / max(1, len(ended)), 4),
        classes={kind: Share(requests=count, good=good_of[kind]) for kind, count in sorted(of.items())},
        ttft_s_p50=_quantile(firsts, 0.5),
        ttft_s_p99=_quantile(firsts, 0.99),
        itl_ms_p50=_gap(simulation.gaps, 0.5),
        itl_ms_p99=_gap(simulation.gaps, 0.99),
        prompt_tokens=sum(each.prompt for each in ended),
        cached_tokens=sum(each.cached for each in ended),
        output_tokens=tokens,
        remote=round(sum(each.remote for each in ended) / max(1, len(ended)), 4),
        use=round(busy_s / ran_s, 4),
        cost=round(cost, 2),
        cost_of_1000_good=round(1000 * cost / good, 4) if good else None,
        cost_of_a_million_tokens=round(1e6 * cost / tokens, 4) if tokens else None,
        changes=tuple(
            Change(at_s=at_s, prefill=roles.prefill, decode=roles.decode, both=roles.both, running=running, why=why)
            for at_s, roles, why, running in simulation.periods
        ),
        over_time=_over_time(simulation, ended, seconds),
    )


def worker_seconds(simulation: Simulation, begin_s: float, end_s: float) -> float:
    """Worker-seconds that all workers together ran, and are paid for, between two times."""
    periods = simulation.periods
    ends = [*(period.at_s for period in periods[1:]), max(end_s, periods[-1].at_s)]
    return sum(
        period.running * max(0.0, min(end, end_s) - max(period.at_s, begin_s))
        for period, end in zip(periods, ends, strict=True)
    )


def _over_time(simulation: Simulation, ended: Sequence[RequestResult], seconds: float) -> tuple[FleetInterval, ...]:
    width = max(LEAST_BUCKET_S, seconds / BUCKETS)
    count = max(1, math.ceil(seconds / width))
    came, good = [0] * count, [0] * count
    for each in ended:
        place = min(count - 1, int(each.came_s / width))
        came[place] += 1
        good[place] += each.good
    begins = [period.at_s for period in simulation.periods]
    found: list[FleetInterval] = []
    for place in range(count):
        at_s = place * width
        lasts = min(width, seconds - at_s)
        roles = simulation.periods[bisect_right(begins, at_s + lasts / 2) - 1].roles
        found.append(
            FleetInterval(
                at_s=round(at_s, 3),
                requests_s=round(came[place] / lasts, 4),
                good_s=round(good[place] / lasts, 4),
                prefill=roles.prefill,
                decode=roles.decode,
                both=roles.both,
                running=round(worker_seconds(simulation, at_s, at_s + lasts) / lasts, 3),
            )
        )
    return tuple(found)


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The `share` quantile of sorted values: the least value that a fraction `share` of them does not exceed; None if
    it is infinite."""
    if not values:
        return None
    value = values[max(0, math.ceil(share * len(values)) - 1)]
    return round(value, 4) if math.isfinite(value) else None


def _gap(gaps: Counter[int], share: float) -> float | None:
    left = share * gaps.total()
    for kind in sorted(gaps):
        left -= gaps[kind]
        if left <= 0:
            return round(gap_ms(kind), 3)
    return None
