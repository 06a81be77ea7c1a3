"""Series of the memory below workers' prefix caches: what there is, what has moved, what it took and was predicted to.

Workers tell totals since their start (`wire.news.TierLoad`); here they become counters.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

from redline.wire.news import TierLoad


class TierMetrics:
    """Series labelled by `tier`: "host" or "disk"; of seconds also "compute", the prompts that were computed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        label = ("model_name", "engine", "tier")
        self._bytes = Gauge("redline:tier_bytes", "Bytes that a tier's pages take", label, registry=registry)
        self._pages = Gauge("redline:tier_pages", "Pages that a tier has", label, registry=registry)
        self._moved = Counter(
            "redline:tier_pages_moved", "Pages of a tier, by what became of them", (*label, "result"), registry=registry
        )
        self._hits = Counter(
            "redline:tier_hit_tokens", "Tokens of prompts that came from a tier", label, registry=registry
        )
        self._read = Counter("redline:tier_read_bytes", "Bytes that came from a tier", label, registry=registry)
        self._seconds = Counter(
            "redline:tier_seconds",
            "Seconds of readings, or of computing prompts: measured, predicted, the error of each, saved and lost",
            (*label, "of"),
            registry=registry,
        )

    def add(self, own: tuple[str, str], now: tuple[TierLoad, ...], last: tuple[TierLoad, ...]) -> None:
        """Take in what a worker has told. own: its labels. last: what it had told before; none: it has started."""
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
