"""One /metrics of several processes: each fact is counted in one of them, and a scrape is the sum over all.

A process that has ended has its counters stay, as they were scraped last: a sum that fell would be taken for a restart,
and all that was counted before for new. A gauge is of now, so it ends with its process. What is of one process and not
of the server (`process_*`: its memory, its time, its files) has the process's name as a label and is not added up.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest

from redline.wire.base import Record

OF_A_PROCESS = "process_"  # how the names of such series begin
# Of gauges that say yes or no: yes where any process says so. And what all processes say alike.
GREATEST = {"redline:ready", "redline:sla_target_seconds"}


class Sample(Record, frozen=True):
    """One number of a series."""

    name: str
    labels: dict[str, str]
    value: float


class Family(Record, frozen=True):
    """All series of one name, as `prometheus_client.Metric` has them."""

    name: str
    help: str
    kind: str
    samples: tuple[Sample, ...]


_FAMILIES = msgspec.msgpack.Decoder(tuple[Family, ...])


def packed(registry: CollectorRegistry) -> bytes:
    """What a registry's series are now, for `Summed.told`."""
    families = [
        Family(each.name, each.documentation, each.type, tuple(Sample(s.name, s.labels, s.value) for s in each.samples))
        for each in registry.collect()
    ]
    return msgspec.msgpack.encode(families)


class Summed:
    """The series of several processes of one server: `told` by each, then `expose`."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Family, ...]] = {}
        self._ended: dict[str, Family] = {}  # counters of processes that have ended, by name

    def told(self, process: str, data: bytes) -> None:
        """Take in what a process's series are now. Raises msgspec.DecodeError for what `packed` does not make."""
        self._of[process] = _FAMILIES.decode(data)

    def ended(self, process: str) -> None:
        """A process has ended; idempotent."""
        left = [family for family in self._of.pop(process, ()) if _stays(family)]
        self._ended = {family.name: family for family in _added([("", [*self._ended.values(), *left])])}

    def collect(self) -> Iterator[Metric]:
        """The sums, as a registry gives them."""
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
    """The families of all, each once, with the sums of their samples in the order in which they first come."""
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
            name, family.help, family.kind, tuple(Sample(of, dict(labels), n) for (of, labels), n in sums[name].items())
        )
        for name, family in families.items()
    ]
