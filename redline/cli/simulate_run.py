"""Runs `redline simulate`: simulates the trace for each choice of roles, and shows the results."""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from redline.bench.record import provenance
from redline.bench.serving.page import render
from redline.cli.console import say, until_interrupted
from redline.cli.simulate import SimulateConfig
from redline.cli.simulate_page import COLUMNS, cells, roles_of, sections
from redline.disk import check_output, save
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.policy.expected import Roles, WorkerModel
from redline.policy.targets import Targets
from redline.progress import Working
from redline.simulate import traces
from redline.simulate.figures import Figures, FleetInterval, figures
from redline.simulate.fleet import AutoscaleLimits, Setting, Simulation
from redline.simulate.models import worker_model
from redline.simulate.traces import KINDS, Phase, TracedRequest

DEFAULT = Targets(ttft_s=2.0, itl_s=0.05)
MOST_WORKERS = 20_000
MOST_SECONDS = 7 * 24 * 3600.0
ROWS = 20  # maximum rows of the table over time
_PHASE = re.compile(r"([a-z]+):([0-9.]+)@([0-9.]+)")
_GOAL = re.compile(r"(?:(.+)\.)?(ttft|itl):([0-9.]+)")


class Result(Record, frozen=True):
    """The output of `--json`: the command, the machine and versions, and the figures of each choice of roles."""

    command: tuple[str, ...]
    provenance: dict[str, Any]
    trace: str
    worker: WorkerModel
    targets: dict[str, Targets]
    runs: tuple[Figures, ...]


def run(config: SimulateConfig, console: Console) -> int:
    """Simulate, print, save; returns the exit code: 0, or 130 after Ctrl-C. Raises ConfigError."""
    return until_interrupted(lambda: _run(config, console), console)


def _run(config: SimulateConfig, console: Console) -> int:
    model = worker_model(config.worker)
    workers = _workers(config.gpus, model)
    if config.least is not None and config.least > workers:
        raise ConfigError(f"--least {config.least}: there are only {workers} workers")
    targets = _targets(config.goodput)
    asked = [(text, _roles(text, workers)) for text in config.roles]
    for path in (config.html, config.keep_trace):
        if path is not None:
            check_output(path)
    trace = _Trace(config)
    runs = tuple(_played(text, roles, config, model, targets, trace) for text, roles in asked)
    if config.keep_trace is not None:
        traces.write(config.keep_trace, trace.requests())
    result = Result(
        command=tuple(sys.argv),
        provenance=provenance("numpy"),
        trace=config.trace,
        worker=model,
        targets=targets,
        runs=runs,
    )
    if config.html is not None:
        made = [("command", " ".join(result.command)), ("trace", config.trace), ("worker", model.name)]
        made += [(name, str(value)) for name, value in result.provenance.items()]
        page = render(
            f"redline simulate: {config.trace}",
            sections(runs, config.price is not None),
            subtitle=f"{config.gpus} GPUs, {workers} workers of {model.name}",
            provenance=made,
        )
        save(config.html, page.encode())  # before printing, since a pipe may be closed
    if config.json:
        console.file.write(msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n")
    else:
        _show(runs, config.price is not None, console)
    if config.html is not None and not config.json:
        say(console, f"written to {config.html}", "dim")
    return 0


def _played(
    name: str,
    roles: Roles | None,
    config: SimulateConfig,
    model: WorkerModel,
    targets: dict[str, Targets],
    trace: "_Trace",
) -> Figures:
    workers = _workers(config.gpus, model)
    counted = None
    if roles is None and config.least is not None:
        counted = AutoscaleLimits(config.least, workers, config.start, config.spare)
    setting = Setting(
        model=model,
        roles=roles or Roles(both=workers if counted is None else counted.least),
        targets=targets,
        way=config.prompts,
        plan_s=config.every if roles is None else None,
        seed=config.seed,
        counted=counted,
    )
    with Working(f"simulate {name}", shown=not config.json) as working:
        seconds = trace.seconds
        simulation = Simulation(setting, lambda at: working.show(min(at, seconds), seconds))
        simulation.run(trace.requests())
    return figures(simulation, name, seconds, 1.0 if config.price is None else config.price)


class _Trace:
    """The requests, for any number of runs. seconds: time of the last request, or the end of a synthetic trace."""

    def __init__(self, config: SimulateConfig) -> None:
        self._scale, self._seed = config.time_scale, config.seed
        self._phases = phases(config.trace)
        self._read: list[TracedRequest] = [] if self._phases else traces.read(Path(config.trace))
        last = sum(phase.seconds for phase in self._phases) if self._phases else self._read[-1].at_s
        self.seconds = max(1.0, last * self._scale)
        if self.seconds > MOST_SECONDS:
            raise ConfigError(
                f"{config.trace}: takes {self.seconds:,.0f} s; at most {MOST_SECONDS:,.0f} can be simulated: use a "
                "smaller --time-scale"
            )

    def requests(self) -> Iterator[TracedRequest]:
        requests: Iterable[TracedRequest] = traces.made(self._phases, self._seed) if self._phases else self._read
        return (request._replace(at_s=request.at_s * self._scale) for request in requests)


def phases(text: str) -> list[Phase]:
    """The phases of a synthetic trace; none if the text names a file. Raises ConfigError, with an example."""
    words = text.split(",")
    if not any(word.partition(":")[0] in KINDS and "@" in word for word in words):
        return []
    found: list[Phase] = []
    for word in words:
        match = _PHASE.fullmatch(word.strip())
        try:
            kind, seconds, rate = KINDS[match[1]], float(match[2]), float(match[3])  # type: ignore[index]
        except (TypeError, KeyError, ValueError):
            raise ConfigError(
                f"TRACE {word!r}: expected KIND:SECONDS@RATE such as chat:600@20; kinds: {', '.join(KINDS)}"
            ) from None
        if not (seconds >= 1 and 0 < rate <= 1e5):
            raise ConfigError(f"TRACE {word!r}: give at least one second, and above 0 to 100,000 requests per second")
        found.append(Phase(kind, seconds, rate))
    return found


def _workers(gpus: int, model: WorkerModel) -> int:
    each = max(1, model.gpus)
    if gpus % each or gpus // each > MOST_WORKERS:
        raise ConfigError(
            f"--gpus {gpus}: a worker of {model.name} has {each}; give a multiple, for at most {MOST_WORKERS:,} workers"
        )
    return gpus // each


def _roles(text: str, workers: int) -> Roles | None:
    """The roles; None: chosen from the traffic."""
    if text == "auto":
        return None
    if text == "both":
        return Roles(both=workers)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) + int(match[2]) != workers or not int(match[2]):
        raise ConfigError(
            f"--roles {text!r}: expected auto, both, or P:D with {workers} workers in total, at least one for decode, "
            f"such as {max(0, workers // 4)}:{workers - workers // 4}"
        )
    return Roles(prefill=int(match[1]), decode=int(match[2]))


def _targets(words: Sequence[str]) -> dict[str, Targets]:
    found = {"": DEFAULT}
    matches: list[re.Match[str]] = []
    for word in words:
        match = _GOAL.fullmatch(word)
        if match is None or match[3].count(".") > 1 or not float(match[3]) > 0:
            raise ConfigError(f"--goodput {word!r}: expected [CLASS.]NAME:MS such as ttft:2000 or agents.itl:30")
        matches.append(match)
    for match in sorted(matches, key=lambda match: match[1] is not None):  # a class starts from the general targets
        of = match[1] or ""
        found[of] = found.get(of, found[""])._replace(**{f"{match[2]}_s": float(match[3]) / 1e3})
    return found


def _show(runs: Sequence[Figures], priced: bool, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name if priced or "cost" not in name else name.replace("cost", "GPU-h"), justify="right")
    for each in runs:
        table.add_row(*cells(each))
    console.print(table)
    for each in runs:
        say(console, f"\n{each.name}: over time", "bold")
        console.print(_over_time(each))
        for change in each.changes[1:]:
            say(console, f"{change.at_s:>8,.0f} s  {roles_of(change)}, {change.running} run: {change.why}", "dim")


def _over_time(each: Figures) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("from, s", "requests/s", "good/s", "good", "prompts : answers", "run"):
        table.add_column(name, justify="right")
    buckets = each.over_time
    size = -(-len(buckets) // ROWS)
    for begin in range(0, len(buckets), size):
        some = buckets[begin : begin + size]
        came, good = _mean(some, "requests_s"), _mean(some, "good_s")
        table.add_row(
            f"{some[0].at_s:,.0f}",
            f"{came:,.2f}",
            f"{good:,.2f}",
            f"{good / came:.0%}" if came else "",
            roles_of(some[-1]),
            f"{_mean(some, 'running'):,.1f}",
        )
    return table


def _mean(some: Sequence[FleetInterval], name: str) -> float:
    return sum(getattr(each, name) for each in some) / len(some)
