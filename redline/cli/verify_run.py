"""Runs the checks of `redline verify`, writes the report and prints the summary: the verdict, then each problem."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from redline.bench.serving.target import ServerTarget
from redline.bench.verify.report import Problem, VerifyReport
from redline.bench.verify.tool_calls import CallCounts, ask_all, read_requests
from redline.bench.verify.verify import Progress, verify
from redline.cli.bench.options import address
from redline.cli.console import save_result, say
from redline.disk import check_output, hold, human
from redline.folder import check_model
from redline.progress import Working
from redline.worker.engine import pick_device

NAMED = 50  # maximum number of files with problems, or answers, printed; the report has all


class FolderChecks(NamedTuple):
    """A folder, and the path of the report. again: also read shards that passed in an earlier run."""

    folder: Path
    save: Path
    again: bool
    device: str | None


class ServerChecks(NamedTuple):
    """A server, the requests to send, and the path of the report."""

    url: str
    requests: Path
    model: str | None
    key: str | None
    max_concurrency: int
    save: Path


def check_folder(checks: FolderChecks, console: Console) -> int:
    """Returns the exit code: 0, or 1 if there is a problem. Raises ConfigError if the report cannot be written."""
    if not any(file for pattern in ("config.json", "*.safetensors*") for file in checks.folder.glob(pattern)):
        check_model(checks.folder)  # nothing to verify: raises an error that names what is there instead
    check_output(checks.save)
    device = pick_device(checks.device)
    held = hold(checks.save)
    try:
        progress = Progress(checks.save.with_suffix(".shards.jsonl"), checks.again)
        with Working("verify") as working:
            report = verify(checks.folder, progress, device, working)
    finally:
        held.release()
    _print(report, console)
    save_result(checks.save, report, console)
    return int(not report.sound)


def _print(report: VerifyReport, console: Console) -> None:
    read = f"{len(report.shards):,} shards, {human(report.bytes)}, {report.tensors:,} tensors"
    if report.sound:
        but = f", but {len(report.unchecked)} checks were not made" if report.unchecked else ""
        say(console, f"{report.folder}: sound{but}: {read}", "yellow" if but else "bold green")
    else:
        count = sum(max(1, problem.tensors) for problem in report.problems)
        files = len({problem.file for problem in report.problems})
        places = f"{files} file{'s' * (files > 1)}"
        say(console, f"{report.folder}: BROKEN: {count:,} problem{'s' * (count > 1)} in {places}; {read}", "bold red")
    by_file: dict[str, list[Problem]] = {}
    for problem in report.problems:
        by_file.setdefault(problem.file, []).append(problem)
    for file, problems in list(by_file.items())[:NAMED]:
        for line in _of(file, problems):
            say(console, line)
    if len(by_file) > NAMED:
        say(console, f"and {len(by_file) - NAMED:,} more files, in the report", "red")
    for line in report.unchecked:
        say(console, f"not checked: {line}", "yellow")
    if report.earlier:
        say(
            console,
            f"{report.earlier:,} shards were read by an earlier run and have not changed; --again reads them",
            "dim",
        )
    for line in _measured(report):
        say(console, line)
    if any(not layer.why_not for layer in report.layers):
        console.print(_layers(report))


def _of(file: str, problems: Sequence[Problem]) -> Iterator[str]:
    """The lines on a file: its tensors, the problem of each, the fix."""
    yield f"\n{file}"
    for problem in problems:
        more = f" (and {problem.tensors - 1:,} more tensors alike)" if problem.tensors > 1 else ""
        yield f"  {f'{problem.tensor}: ' if problem.tensor else ''}{problem.what}{more}"
    yield from dict.fromkeys(f"  fix: {problem.fix}" for problem in problems)


def _measured(report: VerifyReport) -> Iterator[str]:
    if sum(report.codes):
        shares = " ".join(f"{count / sum(report.codes):.1%}" for count in report.codes)
        yield f"\nINT4 codes 0 to 15: {shares}"
    if (rates := report.rates) is not None:
        best = max(rates.disk, key=lambda read: read.gb_per_s)
        yield (
            f"load: {rates.load_gb_per_s:.2f} GB/s, {rates.of_disk:.2f} of a plain read by {best.threads} threads "
            f"({best.gb_per_s:.2f}): the whole model in {_time(rates.whole_load_s)} by one process"
        )
    if (steps := report.steps) is not None:
        predicted = "doctor has no prediction for this machine and model"
        if steps.predicted_ms is not None:
            predicted = f"doctor predicts {steps.predicted_ms:.2f} ms for a whole step on {steps.on}"
        yield (
            f"a step of one token: {steps.measured_ms:.2f} ms for all layers, extrapolated from the measured ones; "
            f"floor {steps.floor_ms:.2f} ({steps.floor_ms / steps.measured_ms:.0%}); {predicted}"
        )


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _layers(report: VerifyReport) -> Table:
    table = Table("layer", "kind", "bytes", "error", "limit", "tokens", "near ties", "load, s", "step, ms")
    for layer in report.layers:
        if layer.why_not:
            continue
        error = "NaN" if layer.error is None else f"{layer.error:.1e}"
        cells = human(layer.bytes), error, f"{layer.limit:.0e}", f"{layer.tokens}", f"{layer.near_ties}"
        table.add_row(f"{layer.layer}", "dense" if layer.dense else "experts", *cells, f"{layer.load_s:.2f}",
                      f"{layer.step_ms:.3f}")  # fmt: skip
    return table


def check_server(checks: ServerChecks, console: Console) -> int:
    """Returns the exit code: 0, or 1 if a call or an answer was wrong. Raises ConfigError for invalid requests, and if
    there is no server."""
    check_output(checks.save)
    asked = read_requests(checks.requests)
    url, headers = address(checks.url, "--server")
    target = ServerTarget(base_url=url, model=checks.model or "", key=checks.key, headers=headers)
    with Working("tool calls") as working:
        report = ask_all(asked, target, checks.max_concurrency, lambda done: working.show(done, len(asked)))
    _print_counts(report.counts, report.model, url, console)
    for wrong in report.wrong[:NAMED]:
        say(console, f"line {wrong.line}: {wrong.kind}: {wrong.why}")
    if len(report.wrong) > NAMED:
        say(console, f"and {len(report.wrong) - NAMED:,} more, in the report", "red")
    save_result(checks.save, report, console)
    return int(bool(report.wrong))


def _print_counts(counts: CallCounts, model: str, url: str, console: Console) -> None:
    wrong = sum(counts.wrong.values())
    verdict = f"{counts.valid:,} of {counts.calls:,} calls are valid; {counts.requests:,} requests"
    failed = f", {counts.failed:,} failed" if counts.failed else ""
    say(console, f"{model} at {url}: {verdict}{failed}", "bold red" if wrong or counts.failed else "bold green")
    for kind, count in sorted(counts.wrong.items()):
        say(console, f"  {kind}: {count:,}", "red")
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.finish_reasons.items()))
    say(console, f"finish reasons: {reasons or 'none'}")
    if counts.with_calls:
        say(
            console,
            f"schema accuracy: {counts.accurate:,} of {counts.with_calls:,} answers that ended with tool_calls have "
            f"only valid calls ({counts.accurate / counts.with_calls:.2%})",
        )
