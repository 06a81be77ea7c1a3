"""Series of the KV offload tiers continue from the worker's previous totals."""

import pytest
from prometheus_client import CollectorRegistry

from redline.api.telemetry.tier_metrics import TierMetrics
from redline.messages.news import TierLoad

OWN = ("nano", "0")


def test_totals_become_counters_and_a_worker_that_starts_again_begins_at_nothing() -> None:
    registry = CollectorRegistry()
    metrics = TierMetrics(registry)
    first = TierLoad(
        name="disk", pages=3, bytes=300, counts=(("given up", 2),), hit_tokens=64, read_s=0.5, error_s=0.25
    )
    second = TierLoad(
        name="disk", pages=1, bytes=100, counts=(("given up", 5),), hit_tokens=192, read_s=2.0, error_s=0.5
    )
    compute = TierLoad(name="compute", predicted_s=3.0)
    metrics.add(OWN, (first,), ())
    metrics.add(OWN, (second, compute), (first,))
    metrics.add(OWN, (first,), ())

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "nano", "engine": "0", "tier": "disk"} | labels)

    assert (value("redline:tier_pages"), value("redline:tier_bytes")) == (3, 300)
    assert value("redline:tier_hit_tokens_total") == 192 + 64
    assert value("redline:tier_pages_moved_total", result="given_up") == 5 + 2
    assert value("redline:tier_seconds_total", of="measured") == pytest.approx(2.0 + 0.5)
    assert value("redline:tier_seconds_total", of="error") == pytest.approx(0.5 + 0.25)
    assert value("redline:tier_seconds_total", tier="compute", of="predicted") == 3.0
    assert value("redline:tier_pages", tier="compute") is None
