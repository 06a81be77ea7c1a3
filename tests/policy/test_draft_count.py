"""The number of drafts k is the one that pays most."""

from dataclasses import replace

import pytest

from redline.policy.costs import RoundTimes, StepCosts
from redline.policy.draft_count import PATIENCE, DraftingRows, Worth, choose, gain

GOOD = [0.8, 0.64, 0.5, 0.4, 0.32, 0.26, 0.2]
HOPELESS = [0.02, 0.0004, 0.0, 0.0, 0.0, 0.0, 0.0]
NOBODY = DraftingRows(0, GOOD)


def costs(position_ms: float, draft_ms: float = 0.0, base_ms: float = 10.0) -> StepCosts:
    """A step costs base_ms, and position_ms for each position; a drafter pass costs draft_ms."""
    rows, counts = (1, 2, 64), (1, 2, 8)
    return StepCosts(
        rows=rows,
        counts=counts,
        target_ms=tuple(tuple(base_ms + position_ms * row * count for count in counts) for row in rows),
        draft_ms=(draft_ms,) * 3 if draft_ms else (),
    )


def times(position_ms: float, draft_ms: float = 0.0, base_ms: float = 10.0, padded: bool = False) -> RoundTimes:
    return RoundTimes(replace(costs(position_ms, draft_ms, base_ms), padded=padded))


def test_where_positions_are_free_rows_draft_the_most():
    assert choose(NOBODY, DraftingRows(2, GOOD), times(0.0)) == 7
    assert choose(DraftingRows(1, GOOD), DraftingRows(1, HOPELESS), RoundTimes(StepCosts())) == 7, (
        "without measurements, drafts appear free"
    )


def test_where_a_position_costs_as_much_as_a_token_nothing_is_drafted():
    assert choose(NOBODY, DraftingRows(3, GOOD), times(5.0, base_ms=0.001)) == 0


def test_drafts_grow_fewer_as_the_machine_fills():
    """One position costs a tenth of a step: with few rows many drafts pay, with many rows hardly any."""
    lengths = [choose(DraftingRows(rows, GOOD), DraftingRows(0, GOOD), times(1.0, 0.2)) for rows in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 3
    assert lengths[-1] <= 1


def test_drafts_that_bring_less_than_estimates_err_by_are_not_asked_for():
    """A draft is accepted in a third of the rows, and a position costs 0.3 of a step: 1.03 times the
    tokens per second.
    """
    it = times(4.0, base_ms=10.0)
    found = DraftingRows(1, [0.33]).tokens()[1] / it.ms(1, 1, 0) * it.ms(1, 0, 0)
    assert 1.0 < found < 1.05
    assert choose(NOBODY, DraftingRows(1, [0.33] + [0.0] * 6), it) == 0
    assert choose(NOBODY, DraftingRows(1, [0.45] + [0.0] * 6), it) == 1


def test_a_slow_drafter_drafts_less():
    quick, slow, slowest = (choose(DraftingRows(1, GOOD), NOBODY, times(0.2, ms)) for ms in (0.1, 2.0, 20.0))
    assert quick > slow > slowest == 1, "the first draft is part of the drafter's pass over the tokens"


def test_rows_of_both_kinds_share_a_length():
    """Two rows with good drafts make up for one with bad ones; they do not make up for six."""
    it = times(1.5)
    assert choose(DraftingRows(2, GOOD), DraftingRows(1, HOPELESS), it) > choose(
        DraftingRows(1, GOOD), DraftingRows(6, HOPELESS), it
    )
    assert choose(DraftingRows(1, HOPELESS), DraftingRows(6, HOPELESS), it) == 0


def test_matches_of_few_rows_are_not_paid_for_by_all():
    """A sixteenth of the rows has a match that is accepted. It is worth its own positions; with padded rows, in which
    every row costs what the longest does, it is not worth those of all rows.
    """
    matches = DraftingRows(16, [0.99] * 7, share=1 / 16)
    assert choose(NOBODY, DraftingRows(1, [0.99] * 7), times(1.0, padded=True)) == 7
    assert choose(NOBODY, matches, times(1.0, padded=True)) == 0
    assert choose(NOBODY, matches, times(1.0)) == 7


def test_the_learned_drafter_pays_for_one_row_and_not_for_many():
    it = times(1.0, 0.5)
    assert gain(GOOD, 1, it) > 1.3
    assert gain(GOOD, 64, times(1.0, 4.0)) < 1
    assert gain(HOPELESS, 1, it) < 1, "the drafter reads every token, even if it drafts none"


def test_gain_is_the_objective_of_equal_rows():
    it = times(0.7, 0.4)
    tokens = DraftingRows(5, GOOD).tokens()
    best = max(tokens[k] / it.ms(5, k, 5) for k in range(8))
    assert gain(GOOD, 5, it) == pytest.approx(best / (5 / it.ms(5, 0, 0)))


def test_a_short_burst_changes_no_mind():
    worth = Worth()
    for _ in range(3):
        for _ in range(PATIENCE - 1):
            worth = worth.seen(0.5)
        worth = worth.seen(1.5)
    assert worth.pays


def test_a_drafter_that_does_not_pay_for_long_is_left_and_later_taken_up_again():
    worth = Worth()
    for _ in range(PATIENCE):
        worth = worth.seen(0.9)
    assert not worth.pays
    for _ in range(PATIENCE):
        worth = worth.seen(1.0)
    assert not worth.pays, "a gain of 1.0 is below the margin"
    for _ in range(PATIENCE):
        worth = worth.seen(1.2)
    assert worth.pays
