"""Which roles workers get: depending on traffic and SLO targets, and only if a change pays."""

from collections.abc import Sequence

import pytest

from redline.policy.expected import RequestTokens, Roles, Traffic, WorkerModel
from redline.policy.roles import FleetRoles, choose_roles, predict_roles, settled, splits_to_try
from redline.policy.steps import StepModel
from redline.policy.targets import Targets

STEPS = StepModel(base=5.0, row=0.2, context=1e-5, prompt=0.02)
MODEL = WorkerModel(name="made", steps=STEPS, step_tokens=8192, slots=256, kv_tokens=4_000_000, gpus=8)
TARGETS = {"": Targets(ttft_s=2.0, itl_s=0.03)}
LONG_PROMPTS = Traffic(24.0, [RequestTokens(0, 20_000, 100), RequestTokens(0, 30_000, 50)])
LONG_ANSWERS = Traffic(24.0, [RequestTokens(0, 1_000, 2_000), RequestTokens(0, 500, 3_000)])


def test_long_prompts_get_more_workers_than_long_answers():
    fleet = FleetRoles(16, MODEL)
    prompts, answers = (choose_roles(traffic, fleet, TARGETS).roles for traffic in (LONG_PROMPTS, LONG_ANSWERS))
    assert prompts.workers == answers.workers == 16
    assert prompts.prefill > answers.prefill + 4


def test_a_change_has_to_pay_over_the_horizon():
    old = choose_roles(LONG_ANSWERS, FleetRoles(16, MODEL), TARGETS).roles
    new = choose_roles(LONG_PROMPTS, FleetRoles(16, MODEL), TARGETS).roles
    assert new != old
    assert choose_roles(LONG_PROMPTS, FleetRoles(16, MODEL, old, horizon_s=600), TARGETS).roles == new
    kept = choose_roles(LONG_PROMPTS, FleetRoles(16, MODEL, old, horizon_s=1, flip_s=60), TARGETS)
    assert kept.roles == old
    assert "does not pay off" in kept.why


def test_what_is_within_the_error_of_the_estimate_is_no_reason_to_change():
    best = choose_roles(LONG_PROMPTS, FleetRoles(16, MODEL), TARGETS)
    near = Roles(best.roles.prefill + 1, best.roles.decode - 1, best.roles.both)
    now = predict_roles(LONG_PROMPTS, FleetRoles(16, MODEL), TARGETS, near)
    assert 0 <= best.expected.steady - now.steady < 0.02
    assert choose_roles(LONG_PROMPTS, FleetRoles(16, MODEL, near, horizon_s=1e9), TARGETS).roles == near


def test_more_workers_are_wanted_only_where_no_roles_do():
    few, enough = (choose_roles(LONG_PROMPTS, FleetRoles(count, MODEL), TARGETS) for count in (6, 24))
    assert few.wanted > 6
    assert enough.wanted <= 24
    assert choose_roles(LONG_PROMPTS, FleetRoles(enough.wanted, MODEL), TARGETS).expected.attainment >= 0.95


def test_of_a_promise_that_nobody_can_keep_so_many_are_wanted_that_no_queue_grows():
    never = {"": Targets(ttft_s=0.001)}
    quiet, busy = (
        choose_roles(Traffic(rate, LONG_PROMPTS.requests), FleetRoles(16, MODEL), never) for rate in (0.1, 24.0)
    )
    assert quiet.wanted == quiet.ample == 1
    assert busy.expected.attainment == 0
    use = [
        predict_roles(Traffic(24.0, LONG_PROMPTS.requests), FleetRoles(count, MODEL), never, Roles(both=count))
        for count in (busy.wanted, busy.wanted - 1)
    ]
    assert use[0].prefill < 1 <= use[1].prefill
    assert busy.wanted < busy.ample <= 1.5 * busy.wanted


def test_requests_of_a_class_are_held_to_its_targets():
    strict = TARGETS | {"strict": Targets(ttft_s=0.01, itl_s=0.03)}
    mixed = Traffic(4.0, [RequestTokens(0, 20_000, 100), RequestTokens(0, 20_000, 100, of="strict")])
    assert choose_roles(mixed, FleetRoles(16, MODEL), strict).expected.attainment == pytest.approx(0.5, abs=0.01)


def test_without_traffic_everything_stays():
    now = Roles(prefill=3, decode=5)
    assert choose_roles(Traffic(0.0, ()), FleetRoles(8, MODEL, now), TARGETS).roles == now
    assert choose_roles(Traffic(0.0, ()), FleetRoles(8, MODEL), TARGETS).roles == Roles(both=8)


def test_what_is_not_promised_is_kept():
    """And no intermediate value causes a numpy warning."""
    anything = {"": Targets(ttft_s=float("inf"), itl_s=float("inf"))}
    for rate in (0.1, 24.0, 1000.0):
        traffic = LONG_PROMPTS._replace(rate=rate)
        for roles in (Roles(both=16), Roles(prefill=1, decode=15), Roles(prefill=15, decode=1)):
            predicted = predict_roles(traffic, FleetRoles(16, MODEL), anything, roles)
            assert 0 <= predicted.attainment <= 1
    assert choose_roles(LONG_PROMPTS._replace(rate=1.0), FleetRoles(16, MODEL), anything).expected.attainment > 0.99


def test_of_roles_that_are_as_good_the_nearest_are_chosen():
    few = LONG_PROMPTS._replace(rate=2.0)
    now = Roles(prefill=15, decode=1)
    chosen = choose_roles(LONG_ANSWERS, FleetRoles(16, MODEL, now, horizon_s=1e6), TARGETS).roles
    alone = choose_roles(LONG_ANSWERS, FleetRoles(16, MODEL), TARGETS)
    assert now.flips(chosen) <= now.flips(alone.roles)
    near = choose_roles(few, FleetRoles(16, MODEL, Roles(prefill=8, decode=8)), TARGETS)
    assert near.roles == Roles(prefill=8, decode=8), near.why


def test_short_prompts_beside_long_ones_are_computed_where_they_are_answered():
    """Chat and documents together: few prefill workers suffice, since chat prompts do not wait for them."""
    mixed = Traffic(20.0, [RequestTokens(0, 200, 300)] * 9 + [RequestTokens(0, 30_000, 100)])
    strict = {"": Targets(ttft_s=1.5, itl_s=0.03)}
    predicted = predict_roles(mixed, FleetRoles(8, MODEL), strict, Roles(prefill=2, decode=6))
    assert predicted.attainment > 0.9


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(ValueError, match="8 workers"):
        choose_roles(LONG_PROMPTS, FleetRoles(8, MODEL, Roles(both=7)), TARGETS)
    with pytest.raises(ValueError, match="targets"):
        choose_roles(LONG_PROMPTS, FleetRoles(8, MODEL), {"key": TARGETS[""]})


def test_a_prompt_shorter_than_a_step_takes_what_its_own_step_takes():
    """For a prompt of several steps, each step is charged for its own length: it expands positions up to its own end,
    not up to a whole step's.
    """
    steps = StepModel(base=1.0, prompt=0.5, expand=0.2)
    model = WorkerModel(name="made", steps=steps, step_tokens=512, slots=64, kv_tokens=1_000_000)
    for cached, uncached in ((0, 64), (640, 64), (0, 512), (128, 1600)):
        traffic = Traffic(0.1, [RequestTokens(cached, uncached, 1)])
        took_s = steps.prompt_ms(cached, uncached, 512) / 1e3
        use = predict_roles(traffic, FleetRoles(1, model), TARGETS, Roles(both=1)).prefill
        assert use == pytest.approx(0.1 * took_s, rel=0.02)


def test_an_answer_is_one_more_beside_those_that_it_finds():
    """If rows cost more than a step itself, as on a CPU, an answer that is alone takes a row's time, and answers that
    arrive at random share the worker: their mean number is that of a processor-sharing queue, load / (1 - load).
    """
    model = WorkerModel(
        name="rows", steps=StepModel(base=0.0, row=5.0, prompt=0.01), step_tokens=512, slots=64, kv_tokens=1_000_000
    )
    fleet, alone = FleetRoles(1, model), Roles(both=1)
    for itl_s, least, most in ((0.0045, 0.0, 0.1), (0.0055, 0.8, 1.0)):
        found = predict_roles(Traffic(0.01, [RequestTokens(0, 1, 100)]), fleet, {"": Targets(itl_s=itl_s)}, alone)
        assert least <= found.attainment <= most
    half = predict_roles(
        Traffic(1.0, [RequestTokens(0, 1, 100)]), fleet, {"": Targets()}, alone
    )  # half of the worker's time, at 100 rows a second
    assert half.decode * model.slots == pytest.approx(1.0, rel=0.02)


BOTH, NEARER, APART, FURTHER = (Roles(n, 8 - n) if n else Roles(both=8) for n in (0, 1, 2, 5))


@pytest.mark.parametrize(
    ("now", "shares", "best"),
    [
        (BOTH, {BOTH: 0.5, APART: 0.8, FURTHER: 0.7}, APART),
        (BOTH, {BOTH: 0.85, APART: 0.94, FURTHER: 0.7}, BOTH),  # the gain is too small
        (NEARER, {NEARER: 0.5, APART: 0.985, FURTHER: 0.99}, APART),  # equally good, and closer to the present roles
        (APART, {BOTH: 0.98, APART: 0.98, FURTHER: 0.985}, BOTH),  # equally good, and independent of the traffic
        # all attainments are low, so mixed workers have no advantage
        (APART, {BOTH: 0.60, APART: 0.60, FURTHER: 0.5}, APART),
        (APART, {BOTH: 0.95, APART: 0.60, FURTHER: 0.5}, BOTH),
        (FURTHER, {BOTH: 0.05, APART: 0.08, FURTHER: 0.01}, FURTHER),
    ],
)
def test_what_was_tried_decides(now: Roles, shares: dict[Roles, float], best: Roles):
    fleet = FleetRoles(8, MODEL, now)
    choice = settled(choose_roles(LONG_PROMPTS, fleet, TARGETS), LONG_PROMPTS, fleet, TARGETS, shares)
    assert choice.roles == choice.expected.roles == best
    assert choice.expected.attainment == shares[best]
    assert choice.now is not None
    assert (choice.now.roles, choice.now.attainment) == (now, shares[now])
    assert choice.why.startswith(f"simulated good requests: {shares[now]:.0%} with the current roles")


def test_what_was_tried_has_to_pay_over_the_horizon():
    fleet = FleetRoles(8, MODEL, BOTH, flip_s=60, horizon_s=10)
    choice = settled(choose_roles(LONG_PROMPTS, fleet, TARGETS), LONG_PROMPTS, fleet, TARGETS, {BOTH: 0.5, APART: 0.9})
    assert choice.roles == BOTH
    assert choice.why.endswith("does not pay off")


def test_nothing_is_tried_where_all_do_both_and_keep_what_is_promised():
    few = LONG_PROMPTS._replace(rate=1.0)
    assert splits_to_try(choose_roles(few, FleetRoles(8, MODEL, BOTH), TARGETS), BOTH) == ()
    all = splits_to_try(choose_roles(few, FleetRoles(8, MODEL, APART), TARGETS), APART)
    assert all[0] == APART
    assert {*all} == {BOTH, *(Roles(prefill=count, decode=8 - count) for count in range(1, 8))}
    lots = LONG_PROMPTS._replace(rate=5_000.0)
    many = splits_to_try(choose_roles(lots, FleetRoles(250, MODEL, Roles(both=250)), TARGETS), Roles(both=250))
    assert 8 <= len(many) <= 10
    assert all_answer(many, 250)


def all_answer(splits: Sequence[Roles], workers: int) -> bool:
    return all(roles.workers == workers and roles.decode + roles.both for roles in splits)
