"""Helpers shared by the bench commands: find the model, run a load with progress, build and save a result."""

import secrets
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from redline.bench.record import provenance
from redline.bench.serving import ready, saved
from redline.bench.serving.datasets import NAMES, Name
from redline.bench.serving.load import Live, run_load
from redline.bench.serving.records import LoadRequest, LoadRun, TimedAnswer
from redline.bench.serving.report import page_of
from redline.bench.serving.saved import BenchResult, command_without_secrets, without_secrets
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.bench.serving.vocabulary import TextTokenizer, TextVocabulary
from redline.cli.console import say
from redline.disk import check_output
from redline.disk import save as save_bytes
from redline.errors import ConfigError
from redline.progress import Working

Load = Callable[[ServerTarget, Sequence[LoadRequest], LoadPace], LoadRun]


def dataset(name: str) -> Name:
    """Checks a dataset's name. Raises ConfigError for an unknown one."""
    if name not in NAMES:
        raise ConfigError(f"--dataset-name {name!r}: expected one of {', '.join(NAMES)}")
    return msgspec.convert(name, Name)


def reached(target: ServerTarget, ready_s: float | None, console: Console) -> ServerTarget:
    """Waits until the server is ready, and returns the target with its model. Raises ConfigError."""

    return named(target, ready.models(target, ready_s, lambda text: say(console, text, "dim")))


def named(target: ServerTarget, listed: Sequence[str]) -> ServerTarget:
    """The target with its model; if it names none, the first that the server lists.

    Raises ConfigError if the server lists no model, or lists others.
    """
    if not target.model and not listed:
        raise ConfigError(f"{target.base_url} lists no model under /v1/models; name one with --model")
    if listed and target.model and target.model not in listed:
        more = ", ..." if len(listed) > 5 else ""
        raise ConfigError(
            f"--model {target.model}: {target.base_url} serves {', '.join(listed[:5])}{more}; give one of these as "
            "--model, or as --served-model-name beside a folder"
        )
    return target if target.model else msgspec.structs.replace(target, model=listed[0])


@contextmanager
def prompt_tokenizer(
    vocabulary: TextVocabulary | None, target: ServerTarget, file: object = None
) -> Generator[TextTokenizer | None]:
    """What counts the tokens of prompts: the vocabulary of --tokenizer, else the server's /tokenize.

    None if there is neither, and for a file, of which the server would have to tokenize every line.
    """
    if vocabulary is not None or file is not None:
        yield vocabulary
        return
    with ready.tokenizer_of(target) as found:
        yield found


def numbered(answer: TimedAnswer, index: int) -> TimedAnswer:
    """The answer with its index among the answers of all loads of a result."""
    return msgspec.structs.replace(answer, index=index)


def seed_of(given: int | None) -> int:
    """The given seed, or a random one."""
    return secrets.randbelow(1 << 31) if given is None else given


def watched(working: Working, done: Callable[[], int], total: int, what: str = "") -> Load:
    """`run_load` with a progress bar over all loads. done: requests finished in earlier loads; total: of all loads."""

    def load(target: ServerTarget, asks: Sequence[LoadRequest], pace: LoadPace) -> LoadRun:
        def show(live: Live) -> None:
            rate = live.tokens / live.seconds if live.seconds > 0 else 0.0
            failed = f", {live.failed:,} failed" if live.failed else ""
            note = f"{what}{live.running:,} running, {rate:,.0f} tokens/s{failed}"
            working.show(done() + live.done, total, note=note)

        return run_load(target, asks, pace, show)

    return load


def result(
    kind: str,
    figures: dict[str, Any],
    target: ServerTarget,
    *,
    dataset: dict[str, Any],
    details: dict[str, Any],
    began: float,
    stopped: bool,
    pace: LoadPace | None = None,
    answers: Sequence[TimedAnswer] = (),
    notes: Sequence[str] = (),
) -> BenchResult:
    """A command's result with its provenance. details may contain records."""
    return BenchResult(
        kind=kind,
        figures=figures,
        command=command_without_secrets(["redline", *sys.argv[1:]]),
        provenance=provenance("httptools", "uvloop"),
        target=without_secrets(target),
        dataset=dataset,
        pace=pace,
        began=began,
        stopped=stopped,
        notes=tuple(notes),
        details=msgspec.to_builtins(details),
        answers=tuple(answers),
    )


def check_files(save: Path | None, html: Path | None) -> None:
    """Checks the output files before a run. Raises ConfigError if one cannot be written, or if both are the same."""
    for path in (save, html):
        if path is not None:
            check_output(path)
    if save is not None and html is not None and save.resolve() == html.resolve():
        raise ConfigError(f"--html {html}: the result is written to this path; name another file")


def keep(found: BenchResult, save: Path | None, html: Path | None, console: Console) -> None:
    """Writes the result and its page, each if a path is given. Raises ConfigError if a file cannot be written.

    Call it before printing: standard output may be a closed pipe.
    """
    if save is not None:
        saved.save(save, found)
    if html is not None:
        save_bytes(html, page_of([(str(save or html), found)]).encode())
    for path in filter(None, (save, html)):
        say(console, f"written to {path}", "dim")


def numbers(flag: str, words: Sequence[str], *, whole: bool) -> list[float]:
    """The positive numbers of a repeatable, comma-separated flag, in rising order. Raises ConfigError."""
    found: list[float] = []
    for word in (part.strip() for text in words for part in text.split(",")):
        try:
            value = float(word)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf") or (whole and value != int(value)):
            raise ConfigError(f"{flag} {word!r}: expected {'whole numbers' if whole else 'numbers'} such as 1,2,4")
        found.append(value)
    return sorted(set(found))
