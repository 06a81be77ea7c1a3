"""Metrics of the workers' KV offload tiers: size, pages moved, and times measured and predicted.

Workers report totals since their start (`messages.news.TierLoad`), which become counters here.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

from redline.messages.news import TierLoad


class TierMetrics:
    """Series with the label `tier`: "host" or "disk"; for seconds also "compute", prompts that were computed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        label = ("model_name", "engine", "tier")
        self._bytes = Gauge("redline:tier_bytes", "Bytes in use by a tier's pages", label, registry=registry)
        self._pages = Gauge("redline:tier_pages", "Pages in a tier", label, registry=registry)
        self._moved = Counter(
            "redline:tier_pages_moved", "Pages of a tier, by outcome", (*label, "result"), registry=registry
        )
        self._hits = Counter("redline:tier_hit_tokens", "Prompt tokens loaded from a tier", label, registry=registry)
        self._read = Counter("redline:tier_read_bytes", "Bytes read from a tier", label, registry=registry)
        self._seconds = Counter(
            "redline:tier_seconds",
            "Seconds of tier reads, or of computing prompts: measured, predicted, prediction error, saved and lost",
            (*label, "of"),
            registry=registry,
        )

    def add(self, own: tuple[str, str], now: tuple[TierLoad, ...], last: tuple[TierLoad, ...]) -> None:
        """Apply a worker's report. own: its labels. last: its previous report; empty after a start."""
        before = {tier.name: tier for tier in last}
        for tier in now:
            then = before.get(tier.name, TierLoad(name=tier.name))
            label = (*own, tier.name)
            for of, seconds in (
                ("measured", tier.read_s - then.read_s),
                ("predicted", tier.predicted_s - then.predicted_s),
                ("error", tier.error_s - then.error_s),
                ("saved", tier.saved_s - then.saved_s),
                ("lost", tier.lost_s - then.lost_s),
            ):
                self._seconds.labels(*label, of).inc(seconds)
            if tier.name == "compute":
                continue
            self._bytes.labels(*label).set(tier.bytes)
            self._pages.labels(*label).set(tier.pages)
            self._hits.labels(*label).inc(tier.hit_tokens - then.hit_tokens)
            self._read.labels(*label).inc(tier.read_bytes - then.read_bytes)
            counted = dict(then.counts)
            for result, count in tier.counts:
                self._moved.labels(*label, result.replace(" ", "_")).inc(count - counted.get(result, 0))
