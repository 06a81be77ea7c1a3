"""`redline eval`: opens the engine, shows the progress, prints the table."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from redline.bench.quality.answering import Greedy
from redline.bench.quality.kept import KeptAnswers
from redline.bench.quality.quality import caption, grade_all, table
from redline.chat.template import style_of
from redline.chat.tokenizer import Tokenizer
from redline.cli.console import save_result, until_interrupted
from redline.cli.verbs import GradeConfig
from redline.disk import check_output
from redline.model.k2.checkpoint import Checkpoint
from redline.model.spec import spec_of
from redline.progress import Working
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine, kv_dtype_of

KEPT = "the answers so far are kept; run the same command to resume"
CONTEXT = 8192  # tokens: the longest evaluation prompt with its answer


def run(config: GradeConfig, console: Console) -> int:
    """Grade, print, save; returns the exit code: 0, or 130 after Ctrl-C.

    Raises ConfigError or CheckpointError, if possible before anything is loaded.
    """
    kv_dtype_of(config.kv_dtype)
    for folder in filter(None, (config.folder, config.against)):
        Checkpoint.open(folder)
        Tokenizer.open(folder)
        style_of(folder, spec_of(folder).chat)
    if config.save is not None:
        check_output(config.save)
    return until_interrupted(lambda: _run(config, console), console, KEPT)


def _run(config: GradeConfig, console: Console) -> int:
    opened: list[KeptAnswers] = []

    @contextmanager
    def answerer(folder: Path) -> Generator[KeptAnswers]:
        with Engine.open(folder, EngineConfig(max_model_len=CONTEXT, kv_dtype=config.kv_dtype)) as engine:
            file = _state() / f"eval-{engine.fingerprint[:16]}-{config.kv_dtype}.jsonl"
            opened.append(KeptAnswers(Greedy(engine), file))
            yield opened[-1]

    with Working("answers") as working:
        report = grade_all(
            config.folder,
            answerer,
            sets=config.sets,
            against=config.against,
            run_code=config.run_code,
            limit=config.limit,
            progress=working.show,
        )
    report = msgspec.structs.replace(report, seconds=round(report.seconds + opened[0].earlier_s, 2))
    for one in opened:
        one.forget()
    if config.save is not None:
        save_result(config.save, report, console)
    console.print(table(report))
    console.print(caption(report), style="dim", highlight=False, soft_wrap=True)
    return 0


def _state() -> Path:
    """The folder in which answers are kept until an evaluation is complete."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "redline"
