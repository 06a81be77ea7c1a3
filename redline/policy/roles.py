"""Chooses worker roles: how many workers only prefill and how many decode, or all do both, whichever meets the SLO
targets of most requests.

Each split is predicted (`expected.py`). If another split may be better than the current one, some splits are listed for
trial runs in the simulator (`simulate/fleet.py`), and `settled` chooses from the results. Over a horizon, a change has
to gain more than the workers lose while they switch roles. The all-mixed split is good with any traffic, so it only has
to be as good. Roles come first; the number of workers wanted is reported with them. Pure functions.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from redline.policy.expected import RATES, PredictedGoodput, Roles, Traffic, TrafficSample, WorkerModel
from redline.policy.targets import Targets

LEAST_GAIN = 0.02  # minimum gain, as a share of all requests: the error of the prediction
TRIED_GAIN = 0.1  # minimum gain of a simulated split; higher, because a one-minute sample overfits
ENOUGH = 0.97  # share of good requests with which the all-mixed split is kept although others are slightly better
NEAR = 0.01  # difference of this share below which two splits count as equally good
GRID = 16  # number of prefill counts that are predicted in a large fleet; the others are skipped
ALONE = 1e-6  # factor of the rate at which no request meets another
TRIALS = 8  # splits to simulate, in addition to the current one and the best by prediction
MOST_TIMES = 4  # bound on `wanted`, as a multiple of the current number of workers


class FleetRoles(NamedTuple):
    """The current workers. now: their roles; None: no roles yet, so that switching costs nothing.

    flip_s: seconds that a worker is idle while it switches its role. horizon_s: seconds over which a change has to pay
    off. attainment: the share of good requests to provide workers for. peak: requests per second that may have begun to
    arrive, if more than the rate.
    """

    workers: int
    model: WorkerModel
    now: Roles | None = None
    flip_s: float = 5.0
    horizon_s: float = 300.0
    attainment: float = 0.95
    peak: float = 0.0


class RoleChoice(NamedTuple):
    """The chosen roles and the reason. expected, now: predictions for the chosen and for the current roles; now is None
    if there were none.

    wanted: the smallest number of workers that meets the fleet's attainment with its best roles; more than the fleet
    has if it does not meet it. ample: the number that meets it at the highest factor of RATES. If no number of workers
    would meet it, both only require that no queue grows.
    """

    roles: Roles
    expected: PredictedGoodput
    now: PredictedGoodput | None
    wanted: int
    ample: int
    why: str


def choose_roles(traffic: Traffic, fleet: FleetRoles, targets: Mapping[str, Targets]) -> RoleChoice:
    """The roles of `fleet.workers` workers with the highest attainment, or the current ones if a change does not pay
    off.

    targets: SLO targets by class of request; "" for every other class. Without traffic the roles stay, or all workers
    do both. Raises ValueError for a fleet without workers, for current roles of another number of workers, and without
    a target for "".
    """
    if fleet.workers < 1 or (fleet.now is not None and fleet.now.workers != fleet.workers):
        raise ValueError(f"{fleet.workers} workers with roles {fleet.now}")
    if "" not in targets:
        raise ValueError('targets has no "", for requests of every other class')
    sample = TrafficSample(traffic, fleet.model, targets, fleet.horizon_s)
    now = None if fleet.now is None else sample.predict(fleet.now)
    if not sample.rate:
        stay = fleet.now or Roles(both=fleet.workers)
        return RoleChoice(stay, now or sample.predict(stay), now, 1, 1, "no requests")
    found = _splits(fleet.workers, sample)
    best = max(found, key=lambda each: each.rank)
    if (there := fleet.now) is not None:  # of equally good splits, the one with the fewest role switches
        near = [each for each in found if each.steady >= best.steady - NEAR]
        best = min(near, key=lambda each: (there.flips(each.roles), *(-part for part in each.rank)))
    peak = RATES[-1] * max(1.0, fleet.peak / sample.rate)
    wanted, ample = (_wanted(sample, best, fleet, times) for times in (1.0, peak))
    if now is None or best.roles == now.roles:
        return RoleChoice(
            best.roles,
            best,
            now,
            wanted,
            ample,
            f"{best.attainment:.0%} of requests are expected to meet their SLO targets",
        )
    flips = now.roles.flips(best.roles)
    gain = (best.steady - now.steady) * sample.rate * fleet.horizon_s
    price = flips * fleet.flip_s * sample.rate / fleet.workers
    if best.steady - now.steady < LEAST_GAIN or gain <= price:
        why = f"{flips} role switches would gain {gain:.0f} good requests in {fleet.horizon_s:.0f} s"
        return RoleChoice(now.roles, now, now, wanted, ample, f"{why}: a change does not pay off")
    why = f"expected good requests: {now.attainment:.0%} with the current roles, {best.attainment:.0%} with these"
    return RoleChoice(best.roles, best, now, wanted, ample, why)


def splits_to_try(choice: RoleChoice, now: Roles) -> Sequence[Roles]:
    """The splits to simulate before any worker switches, the current one first. Empty if too little is to be gained:
    all workers do both, and nearly all requests are predicted to meet their targets.

    In a small fleet these are all splits; in a large one some of them, and the best by prediction.
    """
    assert choice.now is not None, "the current roles are required"
    if not now.prefill and choice.now.steady > 1 - TRIED_GAIN:
        return ()
    workers = now.workers
    step = max(1, workers // TRIALS)
    some = [Roles(both=workers)]
    some += [Roles(prefill=count, decode=workers - count) for count in range(step, workers, step)]
    return [*dict.fromkeys((now, choice.roles, *some))]


def settled(
    choice: RoleChoice,
    traffic: Traffic,
    fleet: FleetRoles,
    targets: Mapping[str, Targets],
    shares: Mapping[Roles, float],
) -> RoleChoice:
    """The choice according to the simulated splits. fleet: with its current roles. shares: the share of good
    requests of each split, including the current one. The other arguments are those of `choose_roles`."""
    now, most = fleet.now, max(shares.values())
    assert now is not None, "the current roles are required"

    def better(roles: Roles) -> tuple[bool, bool, int, float]:
        """Sort key, larger is better: as good as the best; all-mixed; fewer role switches; higher share."""
        return shares[roles] >= most - NEAR, not roles.prefill, -now.flips(roles), shares[roles]

    best = max(shares, key=better)
    gain, price = shares[best] - shares[now], now.flips(best) * fleet.flip_s / fleet.workers
    pays = gain >= TRIED_GAIN and gain * fleet.horizon_s > price
    why = f"simulated good requests: {shares[now]:.0%} with the current roles, {shares[best]:.0%} with these"
    if best != now and not pays and (best.prefill or shares[best] < ENOUGH):
        best, why = now, f"{why}: a change does not pay off"

    sample = TrafficSample(traffic, fleet.model, targets, fleet.horizon_s)

    def told(roles: Roles) -> PredictedGoodput:
        return sample.predict(roles)._replace(goodput=traffic.rate * shares[roles], attainment=shares[roles])

    return choice._replace(roles=best, expected=told(best), now=told(now), why=why)


def best_roles(traffic: Traffic, fleet: FleetRoles, targets: Mapping[str, Targets], workers: int) -> PredictedGoodput:
    """The prediction for `workers` workers with the best roles for them, whatever number `fleet` has. targets: as in
    `choose_roles`."""
    sample = TrafficSample(traffic, fleet.model, targets, fleet.horizon_s)
    return max(_splits(workers, sample), key=lambda each: each.rank)


def predict_roles(
    traffic: Traffic, fleet: FleetRoles, targets: Mapping[str, Targets], roles: Roles
) -> PredictedGoodput:
    """The prediction for these roles, whatever `fleet` has. targets: as in `choose_roles`."""
    return TrafficSample(traffic, fleet.model, targets, fleet.horizon_s).predict(roles)


def _splits(workers: int, sample: TrafficSample) -> list[PredictedGoodput]:
    """Predictions for the all-mixed split and for every number of prefill workers; in a large fleet for every n-th
    number, and for those around the best."""
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


def _wanted(sample: TrafficSample, best: PredictedGoodput, fleet: FleetRoles, times: float) -> int:
    """The smallest number of workers that, with the best roles, meets the attainment at `times` times the rate without
    a growing queue. The attainment is capped at that of a request that runs alone. MOST_TIMES the current number if no
    number tried is enough."""
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
