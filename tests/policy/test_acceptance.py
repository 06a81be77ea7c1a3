"""Past acceptance predicts future acceptance."""

import pytest

from redline.policy.acceptance import KEEPS, REST_KEEPS, UNSEEN, Acceptance


def after(rounds: list[tuple[int, int]], most: int = 3) -> Acceptance:
    counts = Acceptance(most)
    for proposed, accepted in rounds:
        counts.seen(proposed, accepted)
        counts.fade(KEEPS)
    return counts


def test_before_anything_was_seen_each_draft_has_the_same_chance():
    assert Acceptance(3).survival() == pytest.approx([UNSEEN, UNSEEN**2, UNSEEN**3])


def test_a_rate_is_of_the_drafts_that_were_reached():
    """The second draft is reached in half of the rounds, and accepted in all of these."""
    counts = Acceptance(3)
    for _ in range(40):
        counts.fade(KEEPS)
        counts.seen(2, 2, rows=50)
        counts.seen(2, 0, rows=50)
    first, second, _ = counts.survival()
    assert first == pytest.approx(0.5, abs=0.04)
    assert second / first > 0.96


def test_a_longer_run_of_drafts_is_never_likelier():
    chances = after([(7, 4)] * 9 + [(3, 1), (2, 2), (7, 6)], most=9).survival()
    assert chances == sorted(chances, reverse=True)
    assert all(0 < chance < 1 for chance in chances)


def test_what_comes_last_counts_most():
    assert after([(1, 1)] * 200 + [(1, 0)] * 20).survival()[0] < 0.6
    assert after([(1, 0)] * 200 + [(1, 1)] * 20).survival()[0] > 0.9


def test_many_rows_of_a_step_are_sure_sooner():
    one, many = Acceptance(1), Acceptance(1)
    one.seen(1, 0)
    many.seen(1, 0, rows=64)
    assert many.survival()[0] < 0.15 < one.survival()[0]


def test_drafts_that_are_not_offered_are_forgiven():
    bad = Acceptance(3)
    bad.seen(3, 0, rows=200)
    assert bad.survival()[0] < 0.2
    for _ in range(1500):
        bad.fade(REST_KEEPS)
    assert bad.survival()[0] > 0.7
