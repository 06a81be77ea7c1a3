"""Comparison of two clients' figures, with each other and with the server's log."""

import pytest

from lab.two_clients import KEYS, Asked, beside_log, compare, off_the_log, too_far
from tests.bench.serving.script import Logged


def round_of(ours: float, theirs: float) -> dict[str, dict[str, float]]:
    return {"ours": dict.fromkeys(KEYS, ours), "theirs": dict.fromkeys(KEYS, theirs)}


def test_the_median_round_counts_so_that_one_slow_round_does_not():
    apart = compare([round_of(101, 100), round_of(300, 100), round_of(20.2, 20)])
    assert apart == pytest.approx(dict.fromkeys(KEYS, 0.01))


def test_ttft_may_lie_three_milliseconds_apart_and_nothing_else():
    apart = too_far([round_of(100, 102.9)], KEYS)
    assert set(KEYS) - set(apart) == {"mean_ttft_ms", "median_ttft_ms"}
    assert set(too_far([round_of(100, 103.5)], KEYS)) == set(KEYS)
    assert not too_far([round_of(100, 101.9)], KEYS)


def test_what_a_client_adds_is_told_apart_from_what_the_server_took():
    rows = [Logged(name="", path="", received=at, events=(at + 0.1, at + 0.2)) for at in (10.0, 11.0, 12.0)]
    theirs = Asked({}, [103.0, 103.0, 106.0], [], [9.998, 10.998, 11.995])
    found = beside_log(theirs, rows)
    assert found == pytest.approx(
        {
            "server_median_ms": 100,
            "taken_mean_ms": 4,
            "taken_median_ms": 3,
            "before_mean_ms": 3,
            "after_mean_ms": 1,
        }
    )
    ours = beside_log(Asked({}, [100.7] * 3, [100.4] * 3, []), rows)
    assert not off_the_log([{"ours": ours}])
    assert off_the_log([{"ours": ours | {"sent_median_ms": 0.6}}])
