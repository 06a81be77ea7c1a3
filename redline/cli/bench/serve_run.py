"""Runs `redline bench serve`: waits for the server, sends the requests, prints and saves the result."""

import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from redline.bench.serving import metrics, ready, saved
from redline.bench.serving.checks import mismatches
from redline.bench.serving.datasets import asks
from redline.bench.serving.presets import with_preset
from redline.bench.serving.records import LoadRequest, LoadRun
from redline.bench.serving.remarks import remarks, scheduled
from redline.bench.serving.report import page_of
from redline.bench.serving.serve_page import heading, serve_tables
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.bench.serving.vocabulary import open_vocabulary
from redline.cli.bench import kept
from redline.cli.bench.options import choices, goals, pairs, percentiles
from redline.cli.bench.serve import ServeBenchFlags
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, say, until_interrupted
from redline.disk import check_output, save
from redline.errors import ConfigError
from redline.progress import Working

BASE = ("ttft", "tpot", "itl", "e2el")
OF_THINKING = ("answer_ttft", "thinking")
OF_SCHEDULE = ("ttft_from_schedule", "e2el_from_schedule", "client_queue_time")


class ServeRun:
    """One run of `redline bench serve`: what its flags ask for, checked. Raises ConfigError.

    latencies: names of metrics.NAMES; (): all that apply.
    """

    def __init__(self, flags: ServeBenchFlags) -> None:
        self.flags, self.target = flags, flags.target
        if flags.data.dataset_path is not None and flags.data.dataset_name in (None, "random", "prefix_repetition"):
            raise ConfigError(
                f"--dataset-path {flags.data.dataset_path}: which --dataset-name is it, sharegpt, custom or redline?"
            )
        data = {**flags.data.fields(), "backend": self.target.backend}
        self.dataset, self.pace = with_preset(flags.data.preset, data, flags.traffic.fields(flags.data.seed))
        self.goodput = goals(flags.goodput, metrics.SLOS)
        self.latencies = choices("--percentile-metrics", flags.percentile_metrics, metrics.NAMES)
        self.percentiles = percentiles(flags.metric_percentiles)
        self.metadata = pairs("--metadata", flags.metadata)
        self.tokenizer = None if flags.skip_tokenizer_init else flags.server.vocabulary
        self.vocabulary = None if self.tokenizer is None else open_vocabulary(Path(self.tokenizer))
        self.now = datetime.datetime.now()
        self.saves = flags.save_result or flags.save_detailed or flags.result_filename is not None


def run(flags: ServeBenchFlags, console: Console) -> int:
    """Measures, prints, saves. Returns the exit code: 0, 1 if every request failed, 130 after Ctrl-C.

    Raises ConfigError.
    """
    config = ServeRun(flags)
    if flags.html is not None:
        check_output(flags.html)
    return until_interrupted(lambda: _run(config, console), console)


def _run(config: ServeRun, console: Console) -> int:
    flags = config.flags
    target = kept.reached(config.target, flags.waiting.ready_check_timeout_sec, console)
    path = result_path(config, target) if config.saves else None
    kept.check_files(path, flags.html)
    notes: list[str] = []
    with Working("prompts", shown=not flags.disable_tqdm) as working:
        requests, pace = _requests(config, target, notes, working)
        before = ready.drafting(target)
        load = kept.watched(working, lambda: 0, len(requests) - pace.warmups)
        working.show(0, len(requests) - pace.warmups, what="requests")
        found = load(target, requests, pace)
    figures = {
        **described(config, target, len(found.answers)),
        **measured(found, config),
        **ready.drafting_figures(before, ready.drafting(target)),
    }
    result = kept.result(
        "serve",
        figures,
        target,
        dataset=msgspec.to_builtins(config.dataset),
        details={"mismatches": mismatches(found.answers, config.vocabulary)},
        began=found.began,
        stopped=found.stopped,
        pace=pace,
        answers=found.answers,
        notes=notes,
    )
    result = msgspec.structs.replace(result, generator=found.generator)
    if path is not None:
        saved.save(path, result, detailed=flags.save_detailed)
    if flags.html is not None:
        save(flags.html, page_of([(flags.html.stem, result)]).encode())
    say(console, heading(result), "bold")
    show([*serve_tables(result), *remarks(result)], console)
    for written in filter(None, (path, flags.html)):
        say(console, f"written to {written}", "dim")
    if found.stopped and not _at_its_deadline(found, config.pace):
        return INTERRUPTED
    return 0 if figures["completed"] else 1


def _requests(
    config: ServeRun, target: ServerTarget, notes: list[str], working: Working
) -> tuple[list[LoadRequest], LoadPace]:
    """The requests, warm-ups first, and the pace with the number of warm-ups that there are prompts for."""
    wanted = config.dataset.num_prompts
    dataset = msgspec.structs.replace(config.dataset, num_prompts=wanted + config.pace.warmups)
    with kept.prompt_tokenizer(config.vocabulary, target, dataset.dataset_path) as tokenizer:
        requests = asks(dataset, tokenizer, notes.append, working.show)
    pace = msgspec.structs.replace(config.pace, warmups=max(0, len(requests) - wanted))
    if pace.warmups < config.pace.warmups:
        few = f"{pace.warmups} of {config.pace.warmups}"
        notes.append(f"{few} warm-up requests were sent: the dataset has no other prompts than the measured ones")
    return requests, pace


def measured(run: LoadRun, config: ServeRun) -> dict[str, Any]:
    """`metrics.figures` of the configured latencies, or of all that apply."""
    names = list(config.latencies)
    if names and scheduled(config.pace):  # the remark on coordinated omission needs these figures
        names += [f"{name}_from_schedule" for name in ("ttft", "e2el") if name in names]
        names = list(dict.fromkeys((*names, "client_queue_time")))
    if not names:
        thought = any(chunk.kind == "thinking" for answer in run.answers for chunk in answer.chunks)
        names = [*BASE, *(OF_THINKING if thought else ()), *(OF_SCHEDULE if scheduled(config.pace) else ())]
    return metrics.figures(
        run,
        percentiles=config.percentiles,
        names=names,
        goodput=config.goodput or None,
        counts=config.vocabulary,
    )


def described(config: ServeRun, target: ServerTarget, requests: int) -> dict[str, Any]:
    """The description of a run, under vLLM's keys."""
    pace, flags = config.pace, config.flags
    found: dict[str, Any] = {
        "date": config.now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": target.backend,
        "backend": target.backend,
        "label": flags.label,
        "model_id": flags.server.model or target.model,
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


def result_path(config: ServeRun, target: ServerTarget) -> Path:
    """The path of the saved result: the configured file name, or the name that vLLM's client would choose."""
    pace, flags = config.pace, config.flags
    if flags.result_filename is not None:
        return flags.result_dir / flags.result_filename
    rate = f"{pace.rate}qps"
    if pace.ramp is not None:
        rate = f"ramp-up-{pace.ramp.strategy}-{pace.ramp.start:g}qps-{pace.ramp.end:g}qps"
    limit = "" if pace.max_concurrency is None else f"-concurrency{pace.max_concurrency}"
    model = (flags.server.model or target.model).rstrip("/").split("/")[-1]
    name = f"{flags.label or target.backend}-{rate}{limit}-{model}-{config.now:%Y%m%d-%H%M%S}.json"
    return flags.result_dir / name.replace("/", "_")


def _at_its_deadline(run: LoadRun, pace: LoadPace) -> bool:
    return pace.deadline is not None and run.seconds >= pace.deadline - 0.5
