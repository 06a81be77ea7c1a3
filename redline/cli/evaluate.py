"""`redline eval`: opens the engine, shows the progress, prints the table."""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from redline.bench.local.answering import Greedy
from redline.bench.local.quality import caption, table
from redline.bench.local.quality import evaluate as grade_all
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine

CONTEXT = 8192  # the longest evaluation prompt and its answer


@contextmanager
def _open(kv_dtype: str, folder: Path) -> Generator[Greedy]:
    with Engine.open(folder, EngineConfig(max_model_len=CONTEXT, kv_dtype=kv_dtype)) as engine:
        yield Greedy(engine)


def evaluate(
    folder: Path,
    sets: Path | None,
    run_code: bool,
    against: Path | None,
    kv_dtype: str,
    save: Path | None,
    console: Console,
) -> int:
    columns = TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("answers", total=None)
        report = grade_all(
            folder,
            functools.partial(_open, kv_dtype),
            sets=sets,
            against=against,
            run_code=run_code,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(table(report))
    console.print(caption(report), style="dim", highlight=False)
    if save is not None:
        save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
        console.print(f"written to {save}", style="dim")
    return 0
