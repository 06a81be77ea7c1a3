"""A subset of a test's cases that covers every value of every parameter, and every pair of values that occurs in a
case.

Most errors in a kernel show with one value of a parameter, or with two together. `make test` runs such a subset of the
cases of emulated CUDA kernels, which cost tenths of a second or more each; `make test-all` runs all of them.
"""

import itertools
import re
from collections.abc import Hashable, Sequence

import pytest


def cover(rows: Sequence[frozenset[Hashable]]) -> list[int]:
    """Ascending indices of rows that together have every value, and every pair of values, of any row: found by a greedy
    search, with the same result each time.
    """
    left = [{frozenset(pair) for pair in itertools.combinations_with_replacement(row, 2)} for row in rows]
    chosen: list[int] = []
    while any(left):
        best = max(range(len(rows)), key=lambda index: len(left[index]))
        found = left[best]
        left = [pairs - found for pairs in left]
        chosen.append(best)
    return sorted(chosen)


def values(item: pytest.Item) -> frozenset[Hashable]:
    """The parameters of a test as in its id, each with the index of its parameter."""
    parameters = item.name.partition("[")[2].removesuffix("]")
    return frozenset(
        (place, word)
        for place, parameter in enumerate(parameters.split("-"))
        for word in re.split(r"[\s,:]+", parameter)
        if word
    )


def mark_others_slow(items: Sequence[pytest.Item]) -> None:
    """Mark tests as `slow` that are not in the cover of their function's cases."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        kept = set(cover([values(item) for item in cases])) if len(cases) > 1 else {0}
        for index, item in enumerate(cases):
            if index not in kept:
                item.add_marker(pytest.mark.slow)
