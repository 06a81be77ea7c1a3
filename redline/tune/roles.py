"""How many workers compute prompts for others, how many answer, or whether all do both: whichever keeps most promises.

Each split is predicted (`expected.py`). Where another may be better than the present one, some are named to be tried
(`simulate/fleet.py`), and `settled` says what comes of that. A change has to pay, over a horizon, for what the workers
that change do not do meanwhile; but workers that all do both are good with any traffic, so they need only be as good.
Roles come first: how many workers are wanted is said beside. Pure functions.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from redline.tune.expected import RATES, Predicted, Roles, Sample, Traffic, WorkerModel
from redline.tune.targets import Targets

LEAST_GAIN = 0.02  # of all requests: what is predicted errs by as much
TRIED_GAIN = 0.1  # likewise what was tried, on what came in one minute; and what suits that may suit nothing else
ENOUGH = 0.97  # of all requests, with which all do both although others are a little better
NEAR = 0.01  # likewise: what is less good by so little is as good
GRID = 16  # of so many times as many workers not every split is looked at
ALONE = 1e-6  # times the rate, of which no request meets another
TRIALS = 8  # splits that are tried, beside the present one and the best by prediction
MOST_TIMES = 4  # as many workers as there are, when more are asked for


class Fleet(NamedTuple):
    """Who there is. now: their roles; None: nobody has one yet, so that nothing speaks against a change.

    flip_s: for which a worker that changes its role does nothing. horizon_s: over which a change has to pay.
    attainment: the share of requests that are to be good, for which workers are counted. peak: requests a second that
    may have begun to come, where these are more than the rate.
    """

    workers: int
    model: WorkerModel
    now: Roles | None = None
    flip_s: float = 5.0
    horizon_s: float = 300.0
    attainment: float = 0.95
    peak: float = 0.0


class Choice(NamedTuple):
    """Which roles, and why. now: what the present roles are expected to do; None where there were none.

    wanted: as many workers as keep the fleet's attainment with the best roles; more than there are: these do not.
    ample: as many as keep it with room, where as much more comes as the most of RATES. Of what no number of workers
    would keep both ask for no more than that no queue grows.
    """

    roles: Roles
    expected: Predicted
    now: Predicted | None
    wanted: int
    ample: int
    why: str


def choose_roles(traffic: Traffic, fleet: Fleet, targets: Mapping[str, Targets]) -> Choice:
    """The roles of `fleet.workers` workers that keep most promises, or the present ones where a change does not pay.

    targets: by class of request; "" is that of every other. Without traffic everything stays as it is, or everybody
    does both. Raises ValueError for a fleet without workers, present roles of another number, or no target for "".
    """
    if fleet.workers < 1 or (fleet.now is not None and fleet.now.workers != fleet.workers):
        raise ValueError(f"{fleet.workers} workers with roles {fleet.now}")
    if "" not in targets:
        raise ValueError('targets has no "", for requests of every other class')
    sample = Sample(traffic, fleet.model, targets, fleet.horizon_s)
    now = None if fleet.now is None else sample.predict(fleet.now)
    if not sample.rate:
        stay = fleet.now or Roles(both=fleet.workers)
        return Choice(stay, now or sample.predict(stay), now, 1, 1, "nothing is asked")
    found = _splits(fleet.workers, sample)
    best = max(found, key=lambda each: each.rank)
    if (there := fleet.now) is not None:  # of those that are as good, what is nearest
        near = [each for each in found if each.steady >= best.steady - NEAR]
        best = min(near, key=lambda each: (there.flips(each.roles), *(-part for part in each.rank)))
    peak = RATES[-1] * max(1.0, fleet.peak / sample.rate)
    wanted, ample = (_wanted(sample, best, fleet, times) for times in (1.0, peak))
    if now is None or best.roles == now.roles:
        return Choice(
            best.roles, best, now, wanted, ample, f"{best.attainment:.0%} of requests are expected to be good"
        )
    flips = now.roles.flips(best.roles)
    gain = (best.steady - now.steady) * sample.rate * fleet.horizon_s
    price = flips * fleet.flip_s * sample.rate / fleet.workers
    if best.steady - now.steady < LEAST_GAIN or gain <= price:
        why = f"{flips} workers would change for {gain:.0f} good requests in {fleet.horizon_s:.0f} s"
        return Choice(now.roles, now, now, wanted, ample, f"{why}: it does not pay")
    why = f"{now.attainment:.0%} of requests are expected to be good as it is, {best.attainment:.0%} so"
    return Choice(best.roles, best, now, wanted, ample, why)


def splits_to_try(choice: Choice, now: Roles) -> Sequence[Roles]:
    """Those that are to be tried before anybody changes, the present one first; none where too little is to be gained:
    all do both, and are predicted to keep nearly all that is promised.

    All splits of a few workers; of many some, with the best by prediction.
    """
    assert choice.now is not None, "only present roles can change"
    if not now.prefill and choice.now.steady > 1 - TRIED_GAIN:
        return ()
    workers = now.workers
    step = max(1, workers // TRIALS)
    some = [Roles(both=workers)]
    some += [Roles(prefill=count, decode=workers - count) for count in range(step, workers, step)]
    return [*dict.fromkeys((now, choice.roles, *some))]


def settled(
    choice: Choice, traffic: Traffic, fleet: Fleet, targets: Mapping[str, Targets], shares: Mapping[Roles, float]
) -> Choice:
    """The choice by what has been tried. fleet: with its present roles. shares: of requests that are good, with each
    split that was tried, the present one among them. The others as `choose_roles`."""
    now, most = fleet.now, max(shares.values())
    assert now is not None, "only present roles can change"

    def better(roles: Roles) -> tuple[bool, bool, int, float]:
        """The larger the better: as good as the best; then all do both; then what is near; then what is good."""
        return shares[roles] >= most - NEAR, not roles.prefill, -now.flips(roles), shares[roles]

    best = max(shares, key=better)
    gain, price = shares[best] - shares[now], now.flips(best) * fleet.flip_s / fleet.workers
    pays = gain >= TRIED_GAIN and gain * fleet.horizon_s > price
    why = f"tried, {shares[now]:.0%} of requests were good as it is, {shares[best]:.0%} so"
    if best != now and not pays and (best.prefill or shares[best] < ENOUGH):
        best, why = now, f"{why}: a change does not pay"

    sample = Sample(traffic, fleet.model, targets, fleet.horizon_s)

    def told(roles: Roles) -> Predicted:
        return sample.predict(roles)._replace(goodput=traffic.rate * shares[roles], attainment=shares[roles])

    return choice._replace(roles=best, expected=told(best), now=told(now), why=why)


def best_roles(traffic: Traffic, fleet: Fleet, targets: Mapping[str, Targets], workers: int) -> Predicted:
    """What is expected of so many workers with the roles that are best for them, whatever `fleet` has. targets: as
    `choose_roles`."""
    sample = Sample(traffic, fleet.model, targets, fleet.horizon_s)
    return max(_splits(workers, sample), key=lambda each: each.rank)


def predict_roles(traffic: Traffic, fleet: Fleet, targets: Mapping[str, Targets], roles: Roles) -> Predicted:
    """What is expected of these roles, whatever `fleet` has. targets: as `choose_roles`."""
    return Sample(traffic, fleet.model, targets, fleet.horizon_s).predict(roles)


def _splits(workers: int, sample: Sample) -> list[Predicted]:
    """All do both; and every number of workers for prompts, or of many every so manieth, and those around the best."""
    found = [sample.predict(Roles(both=workers))]

    def look(prefills: Iterable[int]) -> None:
        seen = {each.roles.prefill for each in found}
        for prefill in prefills:
            if 0 < prefill < workers and prefill not in seen:
                found.append(sample.predict(Roles(prefill=prefill, decode=workers - prefill)))

    step = max(1, workers // GRID)
    look(range(step, workers, step))
    if step > 1:
        best = max(found, key=lambda each: each.rank).roles.prefill
        look(range(best - step, best + step, max(1, step // 4)))
    return found


def _wanted(sample: Sample, best: Predicted, fleet: Fleet, times: float) -> int:
    """The fewest workers whose best roles keep the attainment, or as much of it as a request that is alone would, with
    so many times the rate, without a queue that grows; MOST_TIMES as many where no number looked at does."""
    enough = min(fleet.attainment, sample.share(Roles(both=1), ALONE) - NEAR)

    def keeps(workers: int) -> bool:
        share = best.roles.prefill / best.roles.workers
        prefill = min(max(1, round(share * workers)), workers - 1)
        near = [Roles(both=workers)] + [
            Roles(prefill=count, decode=workers - count)
            for count in range(max(1, prefill - 2), min(workers - 1, prefill + 2) + 1)
        ]
        return any(sample.keeps(roles, times, enough) for roles in near)

    low, high = 0, fleet.workers
    while not keeps(high):
        low, high = high, 2 * high
        if high > MOST_TIMES * fleet.workers:
            return MOST_TIMES * fleet.workers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high
