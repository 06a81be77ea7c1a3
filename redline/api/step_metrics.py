"""Series of how long workers' steps take, beside the least that their machines take for what the steps compute.

Workers tell sums since their start (`wire.news.StepTimes`); here they become counters. Floor over time is one division.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

from redline.wire.news import Ready, StepTimes


class StepMetrics:
    """Series labelled by `kind`: "decode", steps of answers alone, or "prompts", steps that compute prompts too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        own = ("model_name", "engine")
        label = (*own, "kind")
        self._timed = Counter("redline:timed_steps", "Steps that were timed", label, registry=registry)
        self._seconds = Counter("redline:step_seconds", "Seconds that timed steps took", label, registry=registry)
        self._floors = Counter(
            "redline:step_floor_seconds", "The least that the machine takes for timed steps", label, registry=registry
        )
        self._bounded = Counter(
            "redline:bounded_steps", "Steps whose prompts got less than there was room for, so that they end in time",
            own, registry=registry,
        )  # fmt: skip
        self._reads = Gauge(
            "redline:read_bytes_per_second", "How fast a worker's device reads memory, as measured at its start", own,
            registry=registry,
        )  # fmt: skip
        self._multiplies = Gauge(
            "redline:operations_per_second", "How fast a worker's device multiplies matrices, as measured at its start",
            own, registry=registry,
        )  # fmt: skip

    def measured(self, own: tuple[str, str], ready: Ready) -> None:
        """Tell what a worker's device can do, where it was measured. own: the worker's labels."""
        if ready.read_bytes_per_s:
            self._reads.labels(*own).set(ready.read_bytes_per_s)
            self._multiplies.labels(*own).set(ready.ops_per_s)

    def bounded(self, own: tuple[str, str], now: int, last: int) -> None:
        """Take in how many steps a worker has bounded since its start. last: what it had told before."""
        self._bounded.labels(*own).inc(now - last)

    def add(self, own: tuple[str, str], now: tuple[StepTimes, ...], last: tuple[StepTimes, ...]) -> None:
        """Take in what a worker has told. own: its labels. last: what it had told before; none: it has started."""
        before = {times.kind: times for times in last}
        for times in now:
            then = before.get(times.kind, StepTimes(kind=times.kind))
            label = (*own, times.kind)
            self._timed.labels(*label).inc(times.steps - then.steps)
            self._seconds.labels(*label).inc(times.seconds - then.seconds)
            self._floors.labels(*label).inc(times.floor_s - then.floor_s)
