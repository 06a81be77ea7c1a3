"""`redline bench report`: saved results in the terminal and on one page."""

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.console import plain_console, say
from redline.errors import ConfigError


def bench_report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Results saved by `redline bench` or `vllm bench serve`."),
    ],
    html: Annotated[Path | None, typer.Option(help="Write one page with all results, which needs no network.")] = None,
) -> None:
    """Shows saved results: tables in the terminal, plots on a page; comparable results come first."""
    from redline.bench.serving import saved
    from redline.bench.serving.report import compared, names_of, page_of, sections_of
    from redline.cli.bench.show import show
    from redline.disk import check_output, save

    if html is not None:
        check_output(html)
        if html.resolve() in {path.resolve() for path in files}:
            raise ConfigError(f"--html {html}: is one of the given results; name another file")
    results = [(path.stem, saved.read(path)) for path in files]
    console = plain_console()
    if beside := compared(results):
        show(beside, console)
    for name, (_, result) in zip(names_of(results), results, strict=True):
        say(console, f"\n{name}", "bold")
        show(sections_of(result), console)
    if html is not None:
        save(html, page_of(results).encode())
        say(console, f"written to {html}", "dim")
