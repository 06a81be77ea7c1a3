"""Some cases in the place of all: every value of every parameter, and every pair of values that a case has.

Most mistakes in a kernel show with one value of a parameter, or with two together. `make test` runs such a cover of the
cases of emulated CUDA kernels, each of which costs tenths of a second or more; `make test-all` runs all of them.
"""

import itertools
import re
from collections.abc import Hashable, Sequence

import pytest


def cover(rows: Sequence[frozenset[Hashable]]) -> list[int]:
    """Ascending indices of rows that together have every value, and every pair of values, of any row: found greedily,
    the same ones each time."""
    left = [{frozenset(pair) for pair in itertools.combinations_with_replacement(row, 2)} for row in rows]
    chosen: list[int] = []
    while any(left):
        best = max(range(len(rows)), key=lambda index: len(left[index]))
        found = left[best]
        left = [pairs - found for pairs in left]
        chosen.append(best)
    return sorted(chosen)


def values(item: pytest.Item) -> frozenset[Hashable]:
    """The words of a test's parameters, as its name shows them, each with the place of its parameter."""
    parameters = item.name.partition("[")[2].removesuffix("]")
    return frozenset(
        (place, word)
        for place, parameter in enumerate(parameters.split("-"))
        for word in re.split(r"[\s,:]+", parameter)
        if word
    )


def mark_others_slow(items: Sequence[pytest.Item]) -> None:
    """Mark as `slow` what is in no cover of its test function's cases."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        kept = set(cover([values(item) for item in cases])) if len(cases) > 1 else {0}
        for index, item in enumerate(cases):
            if index not in kept:
                item.add_marker(pytest.mark.slow)
