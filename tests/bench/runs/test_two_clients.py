"""How two clients' figures are compared."""

import pytest

from redline.bench.runs.two_clients import KEYS, compare


def test_the_median_round_counts_so_that_one_slow_round_does_not():
    def round_of(ours: float, theirs: float) -> dict[str, dict[str, float]]:
        return {"ours": dict.fromkeys(KEYS, ours), "theirs": dict.fromkeys(KEYS, theirs)}

    apart = compare([round_of(101, 100), round_of(300, 100), round_of(20.2, 20)])
    assert apart == pytest.approx(dict.fromkeys(KEYS, 0.01))
