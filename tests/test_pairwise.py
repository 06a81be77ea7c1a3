"""A cover of cases: it has every pair of values, and is smaller than the set of all cases."""

import itertools
import random

from tests.pairwise import cover


def pairs(rows: list[frozenset[object]]) -> set[frozenset[object]]:
    return {frozenset(pair) for row in rows for pair in itertools.combinations_with_replacement(row, 2)}


def test_a_product_is_covered_by_few_of_its_cases() -> None:
    rows = [frozenset(enumerate(case)) for case in itertools.product("ab", "cde", "fghi", "jk")]
    chosen = cover(rows)
    assert pairs([rows[index] for index in chosen]) == pairs(rows)
    assert 3 * 4 <= len(chosen) <= 16 < len(rows) == 48
    assert chosen == sorted(set(chosen)) == cover(rows)


def test_any_cases_are_covered_and_none_that_adds_nothing_is_kept() -> None:
    for _ in range(50):
        count = random.randrange(1, 30)
        rows = [frozenset[object](random.sample(range(12), random.randrange(5))) for _ in range(count)]
        chosen = cover(rows)
        assert pairs([rows[index] for index in chosen]) == pairs(rows)
        assert len({rows[index] for index in chosen}) == len(chosen)
