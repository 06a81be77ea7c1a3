"""`redline doctor --self-test`: runs the test, prints the verdict, the first failures and the tables, and writes the
report."""

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from redline.bench.step.depth_record import DepthRecord
from redline.bench.verify.self_test import SelfTest, self_test
from redline.cli.console import save_result, say
from redline.disk import check_output
from redline.errors import ConfigError
from redline.kernels.cuda.kernel import why_not
from redline.progress import Working

NAMED = 20  # maximum number of failures printed; the report has all


def doctor_self_test(save: Path, console: Console) -> int:
    """Returns the exit code: 1 if a kernel failed. Raises ConfigError without a GPU that the kernels are for, or if the
    report cannot be written."""
    if (reason := why_not()) is not None:
        raise ConfigError(f"--self-test tests the GPU kernels, which cannot run here: {reason}")
    check_output(save)
    device = torch.device("cuda", torch.cuda.current_device())
    with Working("preparing kernels") as working:
        report = self_test(device, working)
    show(report, console)
    save_result(save, report, console)
    if not report.was_run or report.failures:
        say(
            console, f"please attach {save} to an issue of Redline: it names the GPU, the versions and the measurements"
        )
    return int(bool(report.failures))


def show(report: SelfTest, console: Console) -> None:
    """Prints the verdict, the failures, and the time of each op over its floor."""
    broken = len({(failure.op, failure.case) for failure in report.failures if failure.ran})
    not_run = sum(not failure.ran for failure in report.failures)
    cases = f"{report.cases:,} cases of {report.kernels} kernels"
    where = "{} (compute capability {}.{})".format(report.gpu, *report.capability)
    but = f"; {not_run:,} were not run" if not_run else ""
    if broken:
        say(console, f"{where}: BROKEN: {broken:,} of {cases} failed{but}", "bold red")
    elif but:
        say(console, f"{where}: no failure in {cases}{but}", "yellow")
    else:
        say(console, f"{where}: sound: {cases} agree with their references", "bold green")
    for failure in report.failures[:NAMED]:
        say(console, f"  {failure.op}, {failure.case}: {failure.why}", "red")
    if len(report.failures) > NAMED:
        say(console, f"  and {len(report.failures) - NAMED:,} more, in the report", "red")
    rates = f"{report.bytes_per_s / 1e12:.2f} TB/s, {report.flops_per_s / 1e12:,.0f} TFLOP/s in bf16"
    say(console, f"measured: {rates}; the test took {report.seconds:.0f} s")
    if report.steps:
        console.print(_times(report.steps))
    if report.untimed is not None:
        say(console, f"steps were not timed: {report.untimed}", "yellow")


def _times(steps: tuple[DepthRecord, ...]) -> Table:
    """A row for the step and for each of its ops; time over floor by number of rows."""
    first = steps[0]
    title = f"a decode step of {first.shape}, {first.layers} layers, {first.context:,} tokens of context: us (x floor)"
    table = Table("op", title=title, title_justify="left")
    for step in steps:
        table.add_column(f"{step.tokens} row{'s' * (step.tokens > 1)}", justify="right")
    ops = [{"step": (1e3 * step.ms, 1e3 * step.floor_ms)} for step in steps]
    for cells, step in zip(ops, steps, strict=True):
        cells.update({op.name: (op.us, op.floor_us) for op in step.ops})
    for name in dict.fromkeys(name for cells in ops for name in cells):
        times = [cells.get(name) for cells in ops]
        table.add_row(name, *("" if one is None else f"{one[0]:,.1f} ({one[0] / one[1]:.2f})" for one in times))
    return table
