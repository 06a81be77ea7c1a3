"""Series of step times and their floors continue from the worker's previous totals."""

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from redline.api.telemetry.step_metrics import StepMetrics
from redline.messages.news import Ready, StepTimes

OWN = ("nano", "0")


def test_sums_become_counters_and_a_worker_that_starts_again_begins_at_nothing() -> None:
    registry = CollectorRegistry()
    metrics = StepMetrics(registry)
    first = StepTimes(kind="decode", steps=2, seconds=0.5, floor_s=0.25)
    second = StepTimes(kind="decode", steps=6, seconds=2.5, floor_s=1.75)
    prompts = StepTimes(kind="prompts", steps=1, seconds=1.0, floor_s=0.5)
    metrics.add(OWN, (first,), ())
    metrics.add(OWN, (second, prompts), (first,))
    metrics.add(OWN, (first,), ())

    def value(name: str, kind: str = "decode") -> float | None:
        return registry.get_sample_value(name, {"model_name": "nano", "engine": "0", "kind": kind})

    assert value("redline:timed_steps_total") == 6 + 2
    assert value("redline:step_seconds_total") == pytest.approx(2.5 + 0.5)
    assert value("redline:step_floor_seconds_total") == pytest.approx(1.75 + 0.25)
    assert value("redline:step_floor_seconds_total", "prompts") == 0.5


def test_bounded_steps_are_counted_on() -> None:
    registry = CollectorRegistry()
    metrics = StepMetrics(registry)
    for now, last in ((3, 0), (5, 3), (1, 0)):
        metrics.bounded(OWN, now, last)
    assert registry.get_sample_value("redline:bounded_steps_total", {"model_name": "nano", "engine": "0"}) == 6


def test_a_machine_that_was_not_measured_has_no_rates() -> None:
    registry = CollectorRegistry()
    metrics, own = StepMetrics(registry), {"model_name": "nano", "engine": "0"}
    ready = Ready(max_model_len=64, pages=1, fingerprint="", summary="")
    metrics.measured(OWN, ready)
    assert registry.get_sample_value("redline:read_bytes_per_second", own) is None
    metrics.measured(OWN, replace(ready, read_bytes_per_s=2e9, ops_per_s=3e9))
    assert registry.get_sample_value("redline:read_bytes_per_second", own) == 2e9
    assert registry.get_sample_value("redline:operations_per_second", own) == 3e9
