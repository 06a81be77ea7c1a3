"""What was accepted says what will be."""

import pytest

from redline.tune.acceptance import ALL_KEEP, JOB_KEEPS, UNSEEN, Acceptance, rates
from redline.tune.acceptance import survival as chances_of

NOBODY = Acceptance()


def after(rounds: list[tuple[int, int]], keeps: float = JOB_KEEPS) -> Acceptance:
    counts = Acceptance()
    for proposed, accepted in rounds:
        counts = counts.seen(proposed, accepted, keeps)
    return counts


def survival(job: Acceptance, everyone: Acceptance, most: int) -> list[float]:
    return chances_of(job, rates(everyone, most))


def test_before_anything_was_seen_each_draft_has_the_same_chance():
    assert survival(NOBODY, NOBODY, 3) == pytest.approx([UNSEEN, UNSEEN**2, UNSEEN**3])


def test_a_rate_is_of_the_drafts_that_were_reached():
    """The second draft is reached in half of the rounds, and holds in all of them."""
    everyone = after([(2, 2), (2, 0)] * 2000, ALL_KEEP)
    first, second = survival(NOBODY, everyone, 2)
    assert first == pytest.approx(0.5, abs=0.02)
    assert second / first > 0.97


def test_a_longer_run_of_drafts_is_never_likelier():
    chances = survival(after([(3, 1), (2, 2), (7, 6)]), after([(7, 4)] * 9, ALL_KEEP), 9)
    assert chances == sorted(chances, reverse=True)
    assert all(0 < chance < 1 for chance in chances)


def test_a_new_job_begins_as_others_do_and_then_speaks_for_itself():
    everyone = after([(1, 1), (1, 1), (1, 1), (1, 0)] * 500, ALL_KEEP)
    (new,) = survival(NOBODY, everyone, 1)
    (bad,) = survival(after([(1, 0)] * 20), everyone, 1)
    (good,) = survival(after([(1, 1)] * 20), everyone, 1)
    assert new == pytest.approx(0.75, abs=0.02)
    assert bad < 0.2 < 0.9 < good


def test_a_job_that_is_offered_nothing_is_forgiven():
    bad = after([(3, 0)] * 20)
    forgiven = after([(3, 0)] * 20 + [(0, 0)] * 40)
    assert survival(bad, NOBODY, 1)[0] < 0.2
    assert survival(forgiven, NOBODY, 1)[0] == pytest.approx(UNSEEN, abs=0.06)
