"""The number of workers to run: raised soon, lowered late, with the time of a start taken into account."""

import pytest

from redline.policy.expected import Roles
from redline.policy.worker_count import (
    CONFIRM,
    KEPT_STARTS,
    WANTED_STARTS,
    Look,
    ScalingLimits,
    choose_count,
    forgotten,
    rising,
    role_of_another,
)

LIMITS = ScalingLimits(least=1, most=4, spare_s=100.0, start_s=10.0)


def looks(*wanted: int, every_s: float = 10.0) -> list[Look]:
    """Observations at intervals of `every_s`, the newest at 0."""
    first = -every_s * (len(wanted) - 1)
    return [Look(first + place * every_s, each) for place, each in enumerate(wanted)]


def test_more_run_once_two_looks_in_a_row_want_more() -> None:
    assert CONFIRM == 2
    assert choose_count(looks(1, 3), 1, LIMITS, 0.0).workers == 1
    assert choose_count(looks(3, 1), 1, LIMITS, 0.0).workers == 1
    assert choose_count(looks(3), 1, LIMITS, 0.0).workers == 1
    found = choose_count(looks(1, 3, 2), 1, LIMITS, 0.0)
    assert found == (2, "2 workers are needed to meet the SLO targets, 1 are running")


def test_more_than_there_may_be_are_not_run() -> None:
    assert choose_count(looks(9, 9), 2, LIMITS, 0.0).workers == 4
    assert choose_count(looks(9, 9), 4, LIMITS, 0.0).workers == 4


def test_the_longer_a_start_takes_the_longer_have_looks_to_want_it() -> None:
    slow = LIMITS._replace(start_s=300.0)
    assert WANTED_STARTS * slow.start_s == 30
    assert choose_count(looks(1, 2, 2, 2), 1, slow, 0.0).workers == 1, "one worker was enough 30 s ago"
    assert choose_count(looks(1, 2, 2, 2, 2), 1, slow, 0.0).workers == 2
    assert choose_count(looks(2, 2, 2), 1, slow, 0.0).workers == 1, "the observations do not go back 30 s"


def test_fewer_run_once_no_look_has_wanted_more_for_long() -> None:
    one = looks(*[1] * 11)  # for the last 100 s
    assert choose_count(one, 3, LIMITS, 0.0).workers == 1
    assert choose_count(one[1:], 3, LIMITS, 0.0).workers == 3, "the observations do not go back 100 s"
    for wanted in (2, 3):
        some = [Look(-50.0, wanted) if look.at == -50 else look for look in one]
        assert choose_count(some, 3, LIMITS, 0.0).workers == wanted


def test_a_rise_counts_before_it_fills_the_window_and_what_chance_does_not_make_a_rise() -> None:
    assert rising(1.0, 100, 10.0) == 9.0
    assert rising(1.0, 12, 10.0) == 1.0
    assert rising(1.0, 0, 10.0) == 1.0


def test_who_takes_long_to_start_is_kept_for_longer() -> None:
    slow = LIMITS._replace(start_s=200.0)
    assert slow.kept_s == KEPT_STARTS * 200
    assert choose_count(looks(*[1] * 40), 2, slow, 0.0).workers == 2
    assert choose_count(looks(*[1] * 41), 2, slow, 0.0).workers == 1


def test_so_many_run_in_any_case() -> None:
    two = LIMITS._replace(least=2)
    assert choose_count(looks(*[0] * 11), 3, two, 0.0).workers == 2
    assert choose_count([], 1, two, 0.0) == (2, "the minimum is 2 workers, 1 are running")


@pytest.mark.parametrize(("count", "old"), [(0, 0), (5, 0), (11, 0), (12, 0), (13, 1), (31, 19)])
def test_old_looks_are_forgotten_but_for_the_one_that_shows_how_far_the_others_go_back(count: int, old: int) -> None:
    """Observations at 0, -10, ...: those before -100 are old."""
    some = looks(*[1] * count)
    assert forgotten(some, 100.0, 0.0) == old
    if count > 11:
        assert choose_count(some[old:], 2, LIMITS, 0.0).workers == 1


def test_one_more_worker_parts_no_prompts_from_answers_where_nobody_does() -> None:
    apart = Roles(prefill=2, decode=3)
    assert role_of_another(Roles(both=4), apart) == "both"
    assert role_of_another(Roles(prefill=1, decode=3), apart) == "prefill"
    assert role_of_another(Roles(prefill=2, decode=2), apart) == "decode"
