"""Metrics of the workers' step times, and of the minimum time that the hardware needs for the same steps.

Workers report sums since their start (`messages.news.StepTimes`), which become counters here. Efficiency is floor
divided by time.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

from redline.messages.news import Ready, StepTimes


class StepMetrics:
    """Series with the label `kind`: "decode" for decode-only steps, or "prompts" for steps that also prefill."""

    def __init__(self, registry: CollectorRegistry) -> None:
        own = ("model_name", "engine")
        label = (*own, "kind")
        self._timed = Counter("redline:timed_steps", "Number of timed steps", label, registry=registry)
        self._seconds = Counter("redline:step_seconds", "Duration of timed steps", label, registry=registry)
        self._floors = Counter(
            "redline:step_floor_seconds", "Minimum hardware time of the timed steps", label, registry=registry
        )
        self._bounded = Counter(
            "redline:bounded_steps", "Steps whose prefill was cut below the available room, to bound the step time",
            own, registry=registry,
        )  # fmt: skip
        self._reads = Gauge(
            "redline:read_bytes_per_second", "Memory read bandwidth of a worker's device, measured at its start", own,
            registry=registry,
        )  # fmt: skip
        self._multiplies = Gauge(
            "redline:operations_per_second", "Matrix multiplication rate of a worker's device, measured at its start",
            own, registry=registry,
        )  # fmt: skip

    def measured(self, own: tuple[str, str], ready: Ready) -> None:
        """Set what a worker's device can do, if it was measured. own: the worker's labels."""
        if ready.read_bytes_per_s:
            self._reads.labels(*own).set(ready.read_bytes_per_s)
            self._multiplies.labels(*own).set(ready.ops_per_s)

    def bounded(self, own: tuple[str, str], now: int, last: int) -> None:
        """Count the bounded steps of a worker, `now` since its start. last: its previous report."""
        self._bounded.labels(*own).inc(now - last)

    def add(self, own: tuple[str, str], now: tuple[StepTimes, ...], last: tuple[StepTimes, ...]) -> None:
        """Apply a worker's report. own: its labels. last: its previous report; empty after a start."""
        before = {times.kind: times for times in last}
        for times in now:
            then = before.get(times.kind, StepTimes(kind=times.kind))
            label = (*own, times.kind)
            self._timed.labels(*label).inc(times.steps - then.steps)
            self._seconds.labels(*label).inc(times.seconds - then.seconds)
            self._floors.labels(*label).inc(times.floor_s - then.floor_s)
