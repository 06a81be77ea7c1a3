"""Runs `redline bench serve`: waits for the server, sends the requests, prints and saves the result."""

import datetime
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from redline.bench.record import provenance
from redline.bench.serving import metrics, ready, saved
from redline.bench.serving.checks import mismatches
from redline.bench.serving.datasets import DatasetConfig, asks
from redline.bench.serving.load import Live, run_load
from redline.bench.serving.records import Run
from redline.bench.serving.remarks import remarks, scheduled
from redline.bench.serving.report import page_of
from redline.bench.serving.saved import Result, command_without_secrets, without_secrets
from redline.bench.serving.serve_page import heading, serve_tables
from redline.bench.serving.target import Pace, Target
from redline.bench.serving.vocabulary import Vocabulary, open_vocabulary
from redline.cli.bench import kept
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, say, until_interrupted
from redline.disk import check_output, save
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.progress import Working

BASE = ("ttft", "tpot", "itl", "e2el")
OF_THINKING = ("answer_ttft", "thinking")
OF_SCHEDULE = ("ttft_from_schedule", "e2el_from_schedule", "client_queue_time")


class ServeConfig(Record, frozen=True):
    """Configuration of `redline bench serve`.

    latencies: names of metrics.NAMES; (): all that apply. tokenizer: a path.
    """

    target: Target
    pace: Pace
    dataset: DatasetConfig
    model: str | None = None
    tokenizer: str | None = None
    goodput: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    latencies: tuple[str, ...] = ()
    percentiles: tuple[float, ...] = metrics.PERCENTILES
    ready_s: float | None = None
    quiet: bool = False
    label: str | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    save: bool = False
    detailed: bool = False
    folder: str = ""
    filename: str | None = None
    html: str | None = None


def bench_serve(config: ServeConfig, console: Console) -> int:
    """Measures, prints, saves. Returns the exit code: 0, 1 if every request failed, 130 after Ctrl-C.

    Raises ConfigError.
    """
    now = datetime.datetime.now()
    if config.html is not None:
        check_output(Path(config.html))
    vocabulary = None if config.tokenizer is None else open_vocabulary(Path(config.tokenizer))
    return until_interrupted(lambda: _bench_serve(config, vocabulary, console, now), console)


def _bench_serve(config: ServeConfig, vocabulary: Vocabulary | None, console: Console, now: datetime.datetime) -> int:
    def tell(text: str) -> None:
        say(console, text, "dim")

    target = kept.reached(config.target, config.ready_s, console)
    path = result_path(config, target, now) if config.save else None
    if path is not None:
        check_output(path)
        if config.html is not None and Path(config.html).resolve() == path.resolve():
            raise ConfigError(f"--html {config.html}: the result is written to this path; name another file")
    notes: list[str] = []
    with Working("prompts", shown=not config.quiet) as working:
        wanted = config.dataset.num_prompts
        dataset = msgspec.structs.replace(config.dataset, num_prompts=wanted + config.pace.warmups)
        with kept.prompt_tokenizer(vocabulary, target, dataset) as tokenizer:
            requests = asks(dataset, tokenizer, notes.append, working.show)
        pace = msgspec.structs.replace(config.pace, warmups=max(0, len(requests) - wanted))
        if pace.warmups < config.pace.warmups:
            few = f"{pace.warmups} of {config.pace.warmups}"
            notes.append(f"{few} warm-up requests were sent: the dataset has no other prompts than the measured ones")
        before = ready.drafting(target)
        working.show(0, len(requests) - pace.warmups, what="requests")
        run = run_load(target, requests, pace, lambda live: _watch(working, live))
    figures = {
        **described(config, target, len(run.answers), now),
        **measured(run, config, vocabulary),
        **ready.drafting_figures(before, ready.drafting(target)),
    }
    result = Result(
        kind="serve",
        figures=figures,
        command=command_without_secrets(["redline", *sys.argv[1:]]),
        provenance=provenance("httptools", "uvloop"),
        target=without_secrets(target),
        dataset=msgspec.to_builtins(config.dataset),
        pace=pace,
        generator=run.generator,
        began=run.began,
        stopped=run.stopped,
        notes=tuple(notes),
        details={"mismatches": msgspec.to_builtins(mismatches(run.answers, vocabulary))},
        answers=run.answers,
    )
    if path is not None:
        saved.save(path, result, detailed=config.detailed)
    if config.html is not None:
        save(Path(config.html), page_of([(Path(config.html).stem, result)]).encode())
    say(console, heading(result), "bold")
    show([*serve_tables(result), *remarks(result)], console)
    for written in filter(None, (path, config.html)):
        tell(f"written to {written}")
    if run.stopped and not _at_its_deadline(run, config.pace):
        return INTERRUPTED
    return 0 if figures["completed"] else 1


def measured(run: Run, config: ServeConfig, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """`metrics.figures` of the configured latencies, or of all that apply."""
    names = list(config.latencies)
    if names and scheduled(config.pace):  # the remark on coordinated omission needs these figures
        names += [f"{name}_from_schedule" for name in ("ttft", "e2el") if name in names]
        names = list(dict.fromkeys((*names, "client_queue_time")))
    if not names:
        thought = any(chunk.kind == "thinking" for answer in run.answers for chunk in answer.chunks)
        names = [*BASE, *(OF_THINKING if thought else ()), *(OF_SCHEDULE if scheduled(config.pace) else ())]
    return metrics.figures(
        run, percentiles=config.percentiles, names=names, goodput=config.goodput or None, counts=vocabulary
    )


def described(config: ServeConfig, target: Target, requests: int, now: datetime.datetime) -> dict[str, Any]:
    """The description of a run, under vLLM's keys."""
    pace = config.pace
    found: dict[str, Any] = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": target.backend,
        "backend": target.backend,
        "label": config.label,
        "model_id": config.model or target.model,
        "tokenizer_id": config.tokenizer,
        "num_prompts": requests,
        **config.metadata,
        "request_rate": pace.rate,
        "burstiness": pace.burstiness,
        "max_concurrency": pace.max_concurrency,
    }
    if pace.ramp is not None:
        found["ramp_up_strategy"] = pace.ramp.strategy
        found["ramp_up_start_rps"] = pace.ramp.start
        found["ramp_up_end_rps"] = pace.ramp.end
    return found


def result_path(config: ServeConfig, target: Target, now: datetime.datetime) -> Path:
    """The path of the saved result: the configured file name, or the name that vLLM's client would choose."""
    if config.filename is not None:
        return Path(config.folder) / config.filename
    pace = config.pace
    rate = f"{pace.rate}qps"
    if pace.ramp is not None:
        rate = f"ramp-up-{pace.ramp.strategy}-{pace.ramp.start:g}qps-{pace.ramp.end:g}qps"
    limit = "" if pace.max_concurrency is None else f"-concurrency{pace.max_concurrency}"
    model = (config.model or target.model).rstrip("/").split("/")[-1]
    name = f"{config.label or target.backend}-{rate}{limit}-{model}-{now:%Y%m%d-%H%M%S}.json"
    return Path(config.folder) / name.replace("/", "_")


def _watch(working: Working, live: Live) -> None:
    rate = live.tokens / live.seconds if live.seconds > 0 else 0.0
    failed = f", {live.failed:,} failed" if live.failed else ""
    working.show(live.done, live.total, note=f"{live.running:,} running, {rate:,.0f} tokens/s{failed}")


def _at_its_deadline(run: Run, pace: Pace) -> bool:
    return pace.deadline is not None and run.seconds >= pace.deadline - 0.5
