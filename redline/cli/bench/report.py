"""`redline bench report`: saved results in the terminal and on one page."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from redline.cli.console import plain_console, say
from redline.cli.flags import Argument
from redline.errors import ConfigError
from redline.messages.base import Record


class ReportFlags(Record, frozen=True):
    """The flags of `redline bench report`."""

    files: Annotated[
        tuple[Path, ...],
        Meta(description="Results saved by `redline bench` or `vllm bench serve`."),
        Argument(metavar="FILE..."),
    ]
    html: Annotated[Path | None, Meta(description="Write one page with all results, which needs no network.")] = None


def bench_report(flags: ReportFlags) -> None:
    """Shows saved results: tables in the terminal, plots on a page; comparable results come first."""
    from redline.bench.serving import saved
    from redline.bench.serving.report import compared, names_of, page_of, sections_of
    from redline.cli.bench.show import show
    from redline.disk import check_output, save

    html = flags.html
    if html is not None:
        check_output(html)
        if html.resolve() in {path.resolve() for path in flags.files}:
            raise ConfigError(f"--html {html}: is one of the given results; name another file")
    results = [(path.stem, saved.read(path)) for path in flags.files]
    console = plain_console()
    if beside := compared(results):
        show(beside, console)
    for name, (_, result) in zip(names_of(results), results, strict=True):
        say(console, f"\n{name}", "bold")
        show(sections_of(result), console)
    if html is not None:
        save(html, page_of(results).encode())
        say(console, f"written to {html}", "dim")
