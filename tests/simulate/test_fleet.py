"""Fleets on traces: every request ends, the books balance, targets are met, roles follow the traffic."""

import math
import random

import msgspec
import pytest

from redline.policy.expected import RequestTokens, Roles, Traffic
from redline.policy.roles import FleetRoles as Chosen
from redline.policy.roles import choose_roles, predict_roles
from redline.policy.targets import Targets
from redline.simulate.figures import figures, worker_seconds
from redline.simulate.fleet import EVERYBODY, AutoscaleLimits, Setting, Simulation, tried
from redline.simulate.models import KIMI_8_H200
from redline.simulate.traces import AGENTS, CHAT, DOCUMENTS, Phase, TracedRequest, made

TARGETS = {"": Targets(ttft_s=2.0, itl_s=0.05)}
TTFT_S = {"": 1.0, "documents": 10.0, "agents": 3.0}
RATES = ((CHAT, 3.0), (DOCUMENTS, 0.25), (AGENTS, 0.4))  # requests per second, at load 1
SHIFTING = [Phase(CHAT, 60, 15.0), Phase(DOCUMENTS, 60, 3.0), Phase(AGENTS, 60, 4.0)]


def mixed(load: float, seconds: float, seed: int) -> list[TracedRequest]:
    """Requests of all three kinds, merged by time."""
    kinds = (made([Phase(kind, seconds, rate * load)], seed + place) for place, (kind, rate) in enumerate(RATES))
    return sorted((request for kind in kinds for request in kind), key=lambda request: request.at_s)


def simulated(phases: list[Phase], roles: Roles, seed: int = 1, **setting: object) -> Simulation:
    simulation = Simulation(Setting(KIMI_8_H200, roles, TARGETS, seed=seed)._replace(**setting))
    simulation.run(made(phases, seed))
    simulation.check()
    return simulation


@pytest.mark.parametrize("roles", [Roles(both=6), Roles(prefill=2, decode=4), Roles(prefill=20, decode=20)])
def test_every_request_ends_and_the_books_are_right(roles: Roles):
    assert Roles(prefill=20).prefill > EVERYBODY
    simulation = simulated(SHIFTING, roles)
    asked = list(made(SHIFTING, 1))
    assert sorted((each.came_s, each.prompt) for each in simulation.ended) == sorted(
        (each.at_s, each.prompt) for each in asked
    )
    assert all(0 < each.first_s < math.inf and 0 <= each.cached < each.prompt for each in simulation.ended)
    computed = sum(worker.computed for worker in simulation.workers)
    assert computed == sum(each.prompt - each.cached for each in simulation.ended)


def test_the_same_seed_gives_the_same_run():
    shifting = [phase._replace(seconds=20, rate=phase.rate / 2) for phase in SHIFTING]
    first, second = (simulated(shifting, Roles(prefill=2, decode=1), plan_s=20.0) for _ in range(2))
    assert first.ended == second.ended
    assert len(first.periods) > 1, "roles were chosen at least once more"
    assert first.periods == second.periods


def test_who_keeps_both_targets_is_good():
    simulation = simulated([Phase(CHAT, 30, 60.0)], Roles(both=6))
    kept = [each.first_s <= 2.0 and each.itl_s <= 0.05 for each in simulation.ended]
    assert kept == [each.good for each in simulation.ended]
    assert 0 < sum(kept) < len(kept), "a load at which some requests meet the targets"


def test_a_class_is_held_to_its_own_targets():
    targets = TARGETS | {"documents": Targets(ttft_s=1e-6, itl_s=1.0)}
    simulation = simulated([Phase(CHAT, 60, 5.0), Phase(DOCUMENTS, 60, 2.0)], Roles(both=6), targets=targets)
    classes = figures(simulation, "x", 120.0).classes
    assert classes["documents"].good == 0
    assert classes["chat"].good == classes["chat"].requests > 0


def test_roles_follow_the_traffic():
    """Long documents that mixed workers cannot handle: some switch to prefill. With chat alone none remains."""
    targets = TARGETS | {"documents": Targets(ttft_s=10.0, itl_s=0.05)}
    documents = simulated(
        [Phase(CHAT, 20, 5.0), Phase(DOCUMENTS, 60, 5.0)], Roles(both=4), plan_s=10.0, targets=targets
    )
    assert documents.periods[-1].roles.prefill > 0
    assert all(period.at_s >= 20 for period in documents.periods if period.roles.prefill)
    chat = simulated([Phase(CHAT, 40, 10.0)], Roles(prefill=3, decode=1), plan_s=10.0)
    assert chat.periods[-1].roles == Roles(both=4)
    for period in (*documents.periods[1:], *chat.periods[1:]):
        assert period.roles.workers == 4
        assert period.why.startswith("simulated good requests: ")


def test_what_is_tried_is_what_a_run_comes_to():
    """The same as a long simulation of this traffic, except for growing queues, of which a short one sees less."""
    phases = [Phase(CHAT, 120, 18.0)]
    splits = [Roles(both=8), Roles(prefill=4, decode=4), Roles(prefill=6, decode=2)]
    asked = [RequestTokens(0, each.prompt, each.output, each.of) for each in made(phases, 2) if each.at_s < 60]
    found = tried(Traffic(18.0, asked), KIMI_8_H200, TARGETS, splits)
    for roles in splits:
        simulation = Simulation(Setting(KIMI_8_H200, roles, TARGETS))
        simulation.run(each._replace(blocks=(), cached=0) for each in made(phases, 3))
        good = sum(each.good for each in simulation.ended) / len(simulation.ended)
        assert good - 0.05 < found[roles] < good + 0.4
    assert found[splits[0]] > found[splits[1]] + 0.1 > found[splits[2]]


def test_what_waits_already_counts_when_roles_are_tried():
    few = [RequestTokens(0, 2000, 200)] * 20
    both = Roles(both=2)
    empty, behind = (
        tried(Traffic(1.0, few, waiting), KIMI_8_H200, TARGETS, [both])[both] for waiting in ((), few * 30)
    )
    assert behind < 0.9 < empty


def test_a_large_fleet_is_tried_as_a_small_one():
    few = [RequestTokens(0, 2000, 200)] * 20
    large, small = (
        tried(Traffic(count * 2.0, few), KIMI_8_H200, TARGETS, [Roles(prefill=count // 4, decode=3 * count // 4)])
        for count in (400, 16)
    )
    assert list(large.values()) == list(small.values())


@pytest.mark.parametrize(
    ("traffic", "roles"),
    [
        (Traffic(0.0, ()), Roles(both=2)),
        (Traffic(1.0, ()), Roles(both=2)),
        (Traffic(1.0, [RequestTokens(0, 9, 9)]), Roles(prefill=2)),
    ],
)
def test_without_traffic_or_anybody_who_answers_nothing_is_tried(traffic: Traffic, roles: Roles):
    with pytest.raises(ValueError, match=r"no traffic|no worker decodes"):
        tried(traffic, KIMI_8_H200, TARGETS, [roles])


def test_workers_that_follow_a_shifting_load_keep_what_the_best_fixed_number_keeps_and_are_paid_for_less():
    """The fixed number is the smallest that meets nearly all targets; one worker less meets far fewer."""
    phases = [Phase(CHAT, 100, rate) for rate in (3.0, 6.0, 11.0, 6.0, 3.0, 3.0)]
    seconds, strict = 600.0, {"": Targets(ttft_s=1.0, itl_s=0.05)}
    fixed = {count: simulated(phases, Roles(both=count), targets=strict) for count in (2, 3)}
    kept = {count: figures(run, "", seconds).attainment for count, run in fixed.items()}
    assert kept[2] < 0.9 < 0.98 < kept[3]
    counted = AutoscaleLimits(least=1, most=4, start_s=15.0, spare_s=60.0)
    follows = simulated(phases, Roles(both=1), targets=strict, plan_s=5.0, counted=counted)
    assert figures(follows, "", seconds).attainment > kept[3] - 0.01
    paid_s = worker_seconds(follows, 0.0, seconds)
    assert paid_s < 0.85 * worker_seconds(fixed[3], 0.0, seconds) == 0.85 * 3 * seconds
    running = [period.running for period in follows.periods]
    assert (running[0], max(running)) == (1, 3)
    assert running[-1] < 3


def test_roles_stay_where_bounded_chunks_keep_what_is_promised():
    """Long prompts with short answers: a large chunk takes as long as eight tokens may, a bounded step never longer
    than one. Simulated mixed workers meet the target with the bound; the predictor chooses the roles."""
    draw, requests, at = random.Random(1), list[TracedRequest](), 0.0
    while at < 200.0:
        at += draw.expovariate(6.0)
        requests.append(TracedRequest(at, 20_000 if draw.random() < 0.3 else 200, 40, ()))
    targets, now = {"": Targets(ttft_s=15.0, itl_s=0.05)}, Roles(both=4)
    traffic = Traffic(6.0, [RequestTokens(0, each.prompt, each.output) for each in requests])
    found = {}
    for step_ms in (None, 50.0):
        model = msgspec.structs.replace(KIMI_8_H200, step_ms=step_ms)
        found[step_ms] = choose_roles(traffic, Chosen(4, model, now), targets)
    assert found[None].roles.prefill > 0
    assert found[50.0].roles == now
    assert found[50.0].expected.attainment > 0.99
    simulation = Simulation(Setting(model, now, targets))
    simulation.run(requests)
    assert figures(simulation, "", 200.0).attainment > 0.99


@pytest.mark.parametrize("load", [1.0, 2.0, 3.0])
def test_what_is_predicted_of_bounded_steps_is_what_is_played(load: float):
    """All kinds together on mixed workers, from hardly any load to twice their capacity."""
    targets = {name: Targets(ttft_s, 0.05) for name, ttft_s in TTFT_S.items()}
    model, roles, requests = msgspec.structs.replace(KIMI_8_H200, step_ms=50.0), Roles(both=4), mixed(load, 100.0, 1)
    simulation = Simulation(Setting(model, roles, targets))
    simulation.run(requests)
    played = figures(simulation, "", 100.0).attainment
    asked = [RequestTokens(each.cached, each.prompt - each.cached, each.output, each.of) for each in simulation.ended]
    predicted = predict_roles(Traffic(len(requests) / 100.0, asked), Chosen(4, model), targets, roles)
    assert predicted.attainment == pytest.approx(played, abs=0.05)


def test_who_ends_takes_nothing_new_and_writes_what_it_has():
    counted = AutoscaleLimits(least=1, most=3, start_s=10.0, spare_s=20.0)
    simulation = simulated([Phase(CHAT, 60, 0.5)], Roles(both=3), plan_s=5.0, counted=counted)
    assert simulation.periods[-1].running == 1
    assert all(math.isfinite(each.first_s) for each in simulation.ended), "no request is lost by it"
    told = figures(simulation, "", 60.0)
    assert [change.running for change in told.changes] == sorted([change.running for change in told.changes])[::-1]
    assert told.cost == pytest.approx(8 * worker_seconds(simulation, 0.0, 60.0) / 3600, abs=0.01)
    assert told.cost < 8 * 3 * 60 / 3600


def test_remote_local_and_predicted_send_prompts_where_they_say():
    shares = {
        way: figures(simulated([Phase(DOCUMENTS, 60, 3.0)], Roles(prefill=2, decode=4), way=way), way, 60.0).remote
        for way in ("remote", "local", "predicted")
    }
    assert shares["remote"] == 1
    assert shares["local"] == 0
    assert 0 < shares["predicted"] <= 1


def test_a_conversation_goes_back_to_where_it_is_cached():
    blocks = tuple(range(40))
    requests = [TracedRequest(1.0 * turn, 512 * (10 + turn), 20, blocks[: 10 + turn]) for turn in range(20)]
    simulation = Simulation(Setting(KIMI_8_H200, Roles(both=40), TARGETS))
    simulation.run(requests)
    assert [each.cached for each in simulation.ended][1:] == [each.prompt - 512 for each in simulation.ended][1:]


def test_the_figures_are_those_of_the_requests():
    simulation = simulated(SHIFTING, Roles(prefill=2, decode=4))
    told = figures(simulation, "2:4", 180.0, price=2.0)
    assert told.requests == len(simulation.ended) == sum(share.requests for share in told.classes.values())
    assert told.good == sum(each.good for each in simulation.ended)
    assert told.goodput == pytest.approx(told.good / 180, abs=1e-4)
    assert told.gpus == 48
    assert told.cost == pytest.approx(48 * 0.05 * 2.0)
    assert sum(each.requests_s for each in told.over_time) * 10 == pytest.approx(told.requests, abs=0.1)
    assert all((each.prefill, each.decode, each.both) == (2, 4, 0) for each in told.over_time)
    assert msgspec.json.decode(msgspec.json.encode(told), type=type(told)) == told


def test_what_never_ends_is_counted_and_not_good():
    slow = msgspec.structs.replace(KIMI_8_H200, steps=msgspec.structs.replace(KIMI_8_H200.steps, base=1e6))
    simulation = Simulation(Setting(slow, Roles(both=1), TARGETS))
    simulation.run([TracedRequest(0.0, 100, 100, ())])
    told = figures(simulation, "slow", 1.0)
    assert told.unfinished == told.requests == 1
    assert told.good == 0
    assert told.ttft_s_p50 is None
