"""k falls to what pays."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from redline.tune.acceptance import JOB_KEEPS, Acceptance, survival
from redline.tune.choose import PATIENCE, Worth, _position_ms, choose, gain, tokens_per_ms
from redline.tune.costs import StepCosts

GOOD = [0.8, 0.64, 0.5, 0.4, 0.32, 0.26, 0.2]
HOPELESS = [0.02, 0.0004, 0.0, 0.0, 0.0, 0.0, 0.0]


def costs(position_ms: float, draft_ms: float = 0.0, base_ms: float = 10.0) -> StepCosts:
    """A step costs base_ms, and position_ms for each position; a drafter pass draft_ms."""
    rows, counts = (1, 2, 64), (1, 2, 8)
    return StepCosts(
        rows=rows,
        counts=counts,
        target_ms=tuple(tuple(base_ms + position_ms * row * count for count in counts) for row in rows),
        draft_ms=(draft_ms,) * 3 if draft_ms else (),
    )


def gains(survivals: Sequence[Sequence[float]]) -> list[list[float]]:
    """Tokens expected of each row by its drafts."""
    return [list(itertools.accumulate(chances, initial=1.0)) for chances in survivals]


def test_where_positions_are_free_rows_draft_the_most():
    assert choose([GOOD, GOOD[:3]], [False, False], costs(0.0)) == [7, 3]
    assert choose([GOOD, HOPELESS[:2]], [True, True], StepCosts()) == [7, 2], "nothing measured: they seem free"


def test_where_a_position_costs_as_much_as_a_token_nothing_is_drafted():
    assert choose([GOOD] * 3, [False] * 3, costs(5.0, base_ms=0.001)) == [0, 0, 0]


def test_drafts_grow_fewer_as_the_machine_fills():
    """One position costs a tenth of a step: a few rows draft far, many hardly at all."""
    lengths = [max(choose([GOOD] * rows, [True] * rows, costs(1.0, 0.2))) for rows in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 3
    assert lengths[-1] <= 1


def test_a_slow_drafter_drafts_less():
    quick, slow, slowest = (choose([GOOD], [True], costs(0.2, ms))[0] for ms in (0.1, 2.0, 20.0))
    assert quick > slow > slowest == 1, "the first draft comes with the reading"


def test_a_row_that_accepts_nothing_drafts_nothing_beside_one_that_does():
    good, hopeless = choose([GOOD, HOPELESS], [False, False], costs(0.5))
    assert good >= 3
    assert hopeless == 0


def test_a_row_that_accepts_nothing_is_tried_again_now_and_then():
    job, offered = Acceptance(), []
    for _ in range(200):
        (length,) = choose([survival(job, [0.7] * 3)], [False], costs(3.0))
        offered.append(length)
        job = job.seen(length, 0, JOB_KEEPS)
    probes = sum(1 for length in offered[50:] if length)
    assert 3 <= probes <= 75
    assert max(offered[50:]) == 1


def test_no_row_drafts_further_than_it_may():
    assert choose([GOOD[:0], GOOD[:1], GOOD], [True] * 3, costs(0.01, 0.01))[:2] == [0, 1]
    assert choose([], [], costs(1.0)) == []


def test_the_choice_is_never_worse_than_any_common_length_and_near_the_best_of_all():
    random_ = random.Random(3)
    for _ in range(200):
        rows = random_.randrange(1, 4)
        survivals = []
        for _ in range(rows):
            rates = [random_.random() for _ in range(3)]
            survivals.append(list(itertools.accumulate(rates, lambda a, b: a * b)))
        drafting = [random_.random() < 0.5 for _ in range(rows)]
        it = costs(random_.choice([0.1, 1.0, 4.0]), random_.choice([0.0, 0.5, 3.0]))
        chosen = tokens_per_ms(gains(survivals), drafting, choose(survivals, drafting, it), it)
        common = max(tokens_per_ms(gains(survivals), drafting, [k] * rows, it) for k in range(4))
        best = max(tokens_per_ms(gains(survivals), drafting, ks, it) for ks in itertools.product(range(4), repeat=rows))
        assert chosen >= common - 1e-12
        assert chosen >= 0.98 * best


@pytest.mark.parametrize(("rows", "drafts", "low", "high"), [(3, 5, 5, 11), (3, 2, 3, 8), (4, 0, 4, 8), (2, 2, 2, 6)])
def test_a_position_costs_the_slope_from_one_draft_fewer_a_row_to_one_more(rows: int, drafts: int, low: int, high: int):
    """Around rows + drafts, and never below the rows' own. Of n squared the slope is the sum of the ends."""

    class Squared(StepCosts):
        def step_ms(self, rows: int, positions: float, passes: Sequence[float] = ()) -> float:
            return positions**2

    assert _position_ms(rows, drafts, Squared()) == low + high


def test_a_position_never_costs_less_than_nothing():
    assert _position_ms(3, 5, costs(-0.01)) == 0.0


def test_the_learned_drafter_pays_for_one_row_and_not_for_many():
    it = costs(1.0, 0.5)
    assert gain(GOOD, 1, it) > 1.3
    assert gain(GOOD, 64, costs(1.0, 4.0)) < 1
    assert gain(HOPELESS, 1, it) < 1, "it reads every token, even if it drafts none"


def test_gain_is_the_objective_of_equal_rows():
    it = costs(0.7, 0.4)
    best = max(tokens_per_ms(gains([GOOD] * 5), [True] * 5, [k] * 5, it) for k in range(8))
    assert gain(GOOD, 5, it) == pytest.approx(best / tokens_per_ms(gains([GOOD] * 5), [False] * 5, [0] * 5, it))


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
    assert not worth.pays, "by a margin"
    for _ in range(PATIENCE):
        worth = worth.seen(1.1)
    assert worth.pays


def test_where_all_rows_cost_what_the_longest_does_they_are_as_long():
    """One row's drafts hold, the others' hardly: alone it would draft; among many it is not worth their positions."""
    mean = costs(1.0)
    padded = replace(mean, padded=True)
    assert padded.positions([3, 0, 1]) == 12
    assert mean.positions([3, 0, 1]) == 7
    assert padded.passes([2, 0]) == [2.0, 2.0]
    assert mean.passes([2, 0]) == [2.0, 1.0]
    rows = [[0.99] * 4, *[[0.01] * 4] * 15]
    assert choose(rows[:1], [False], padded) == [4]
    assert choose(rows, [False] * 16, padded) == [0] * 16
    assert choose(rows, [False] * 16, mean) == [4, *[0] * 15]
