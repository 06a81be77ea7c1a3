"""One /metrics endpoint for several processes: each event is counted in one process, and a scrape is the sum over all.

Counters of a process that has ended keep their last scraped values: Prometheus would take a falling sum for a restart,
and count everything again. Gauges describe the present, so they end with their process. Series of a process rather than
of the server (`process_*`: its memory, CPU time, files) get the process's name as a label and are not summed.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest

from redline.messages.base import Record

OF_A_PROCESS = "process_"  # prefix of such series
# Boolean gauges, which are 1 if they are 1 in any process, and gauges that are the same in all processes.
GREATEST = {"redline:ready", "redline:sla_target_seconds"}


class MetricSample(Record, frozen=True):
    """One number of a series."""

    name: str
    labels: dict[str, str]
    value: float


class Family(Record, frozen=True):
    """All series of one name, like `prometheus_client.Metric`."""

    name: str
    help: str
    kind: str
    samples: tuple[MetricSample, ...]


_FAMILIES = msgspec.msgpack.Decoder(tuple[Family, ...])


def packed(registry: CollectorRegistry) -> bytes:
    """The current series of a registry, encoded for `MetricsAggregator.told`."""
    families = [
        Family(
            each.name,
            each.documentation,
            each.type,
            tuple(MetricSample(s.name, s.labels, s.value) for s in each.samples),
        )
        for each in registry.collect()
    ]
    return msgspec.msgpack.encode(families)


class MetricsAggregator:
    """Aggregates the series of several processes of one server: `told` by each, then `expose`."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Family, ...]] = {}
        self._ended: dict[str, Family] = {}  # counters of ended processes, by name

    def told(self, process: str, data: bytes) -> None:
        """Store the current series of a process. Raises msgspec.DecodeError for data that `packed` did not produce."""
        self._of[process] = _FAMILIES.decode(data)

    def ended(self, process: str) -> None:
        """A process has ended; idempotent."""
        left = [family for family in self._of.pop(process, ()) if _stays(family)]
        self._ended = {family.name: family for family in _added([("", [*self._ended.values(), *left])])}

    def collect(self) -> Iterator[Metric]:
        """The summed series, in the form of a registry."""
        for family in _added([("", self._ended.values()), *self._of.items()]):
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric

    def expose(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self)  # type: ignore[arg-type]


def _stays(family: Family) -> bool:
    return family.kind in ("counter", "histogram") and not family.name.startswith(OF_A_PROCESS)


def _added(processes: Iterable[tuple[str, Iterable[Family]]]) -> list[Family]:
    """The families of all processes, merged by name, with samples summed, in order of first appearance."""
    families: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for process, told in processes:
        for family in told:
            families.setdefault(family.name, family)
            numbers = sums.setdefault(family.name, {})
            own: Mapping[str, str] = {"process": process} if family.name.startswith(OF_A_PROCESS) else {}
            for sample in family.samples:
                key = sample.name, tuple({**sample.labels, **own}.items())
                before = numbers.get(key)
                if before is None:
                    numbers[key] = sample.value
                elif family.name in GREATEST:
                    numbers[key] = max(before, sample.value)
                else:
                    numbers[key] = before + sample.value
    return [
        Family(
            name,
            family.help,
            family.kind,
            tuple(MetricSample(of, dict(labels), n) for (of, labels), n in sums[name].items()),
        )
        for name, family in families.items()
    ]
