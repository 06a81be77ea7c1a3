"""The schedule of an open-loop load."""

import math
import statistics
from typing import Any

import pytest

from redline.bench.serving.arrivals import planned
from redline.bench.serving.target import LoadPace, Ramp
from redline.errors import ConfigError


def _gaps(times: list[float] | None) -> list[float]:
    assert times is not None
    return [later - sooner for sooner, later in zip([0.0, *times], times, strict=False)]


def test_an_infinite_rate_has_no_schedule():
    assert planned(5, LoadPace()) is None


def test_times_end_where_the_rate_has_them_and_follow_the_seed():
    times = planned(200, LoadPace(rate=8, seed=3))
    assert times == planned(200, LoadPace(rate=8, seed=3))
    assert times != planned(200, LoadPace(rate=8, seed=4))
    assert times == sorted(times or ())
    assert (times or [0])[-1] == pytest.approx(200 / 8)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float):
    gaps = _gaps(planned(20_000, LoadPace(rate=5, burstiness=burstiness)))
    assert statistics.mean(gaps) == pytest.approx(0.2)
    assert statistics.pstdev(gaps) / 0.2 == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_an_infinite_burstiness_is_a_metronome():
    assert planned(4, LoadPace(rate=2, burstiness=math.inf)) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.5), ("exponential", math.sqrt(10))])
def test_a_ramp_goes_from_its_start_to_its_end(strategy: str, middle: float):
    gaps = _gaps(planned(101, LoadPace(burstiness=math.inf, ramp=Ramp(strategy=strategy, start=1, end=10))))
    assert [1 / gaps[place] for place in (0, 50, 100)] == pytest.approx([1, middle, 10])


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"rate": 0}, "--request-rate"),
        ({"rate": math.nan}, "--request-rate"),
        ({"burstiness": -1}, "--burstiness"),
        ({"max_concurrency": 0}, "--max-concurrency"),
        ({"warmups": -1}, "--num-warmups"),
        ({"deadline": 0}, "deadline"),
        ({"ramp": Ramp(strategy="square", start=1, end=2)}, "--ramp-up-strategy"),
        ({"ramp": Ramp(strategy="linear", start=0, end=2)}, "ramp from 0"),
    ],
)
def test_a_pace_that_cannot_be_kept_names_its_flag(fields: dict[str, Any], flag: str):
    with pytest.raises(ConfigError, match=flag):
        planned(3, LoadPace(**fields))
