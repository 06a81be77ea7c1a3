"""Runs `redline bench sweep`: measures each load, prints and saves the points."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from redline import clock
from redline.bench.serving import saved, sweep
from redline.bench.serving.datasets import DatasetConfig, asks
from redline.bench.serving.metrics import SLOS
from redline.bench.serving.records import LoadRequest
from redline.bench.serving.saved import BenchResult, without_secrets
from redline.bench.serving.sweep import Point, SweepPlan
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.bench.serving.vocabulary import TextVocabulary, open_vocabulary
from redline.cli.bench import kept
from redline.cli.bench.options import goals
from redline.cli.bench.show import show
from redline.cli.bench.sweep import SweepFlags
from redline.cli.console import INTERRUPTED, say, until_interrupted
from redline.errors import ConfigError
from redline.progress import Working

STREAMS = 64  # concurrent streams of the highest default load
EACH, WARMUPS = 10, 2  # requests and warm-ups per stream, as in InferenceX
AGAIN = "Prompts of a file are repeated at other loads and may hit the prefix cache; random prompts are not repeated."
OF_A_RATE_S, LEAST_OF_A_RATE = 60.0, 20  # duration of a point at a rate in seconds; fewest requests of such a point


class SweepRun:
    """One run of `redline bench sweep`: what its flags ask for, checked. Raises ConfigError."""

    def __init__(self, flags: SweepFlags) -> None:
        self.flags, output_len = flags, flags.output_len
        self.target = flags.server.target(flags.base_url, flags.waiting.patience)
        self.tokenizer = flags.server.vocabulary
        self.plan = _plan(flags)
        self.dataset = DatasetConfig(
            dataset_name=kept.dataset(flags.dataset_name),
            dataset_path=None if flags.dataset_path is None else str(flags.dataset_path),
            random_input_len=flags.random_input_len,
            random_output_len=output_len or flags.random_output_len,
            random_range_ratio=flags.random_range_ratio,
            sharegpt_output_len=output_len,
            custom_output_len=output_len,
            ignore_eos=flags.ignore_eos or flags.dataset_name == "random",
        )


def _plan(flags: SweepFlags) -> SweepPlan:
    if flags.max_concurrency and flags.request_rate:
        raise ConfigError("--max-concurrency and --request-rate: a sweep varies one of the two")
    if flags.search and not flags.goodput:
        raise ConfigError(
            "--search looks for the load that meets the SLO targets: set them, such as --goodput ttft:500"
        )
    by: sweep.By = "requests/s" if flags.request_rate else "streams"
    if flags.request_rate:
        loads = kept.numbers("--request-rate", flags.request_rate, whole=False)
    elif flags.max_concurrency:
        loads = kept.numbers("--max-concurrency", flags.max_concurrency, whole=True)
    else:
        loads = sweep.doubling(STREAMS)
    if flags.num_prompts is not None and by == "streams" and flags.num_prompts < loads[-1]:
        raise ConfigError(
            f"--num-prompts {flags.num_prompts} is fewer than {loads[-1]:g} streams: give at least one request per "
            "stream"
        )
    return SweepPlan(
        by=by,
        loads=tuple(loads),
        slos=goals(flags.goodput, SLOS),
        attainment=flags.attainment,
        search=flags.search,
        to_the_end=flags.to_the_end,
    )


def run(flags: SweepFlags, console: Console) -> int:
    """Measures the missing points, prints, saves.

    Returns the exit code: 0, 1 if every request failed, 130 after Ctrl-C.

    Raises ConfigError.
    """
    config = SweepRun(flags)
    kept.check_files(flags.save, flags.html)
    resumed = f"{flags.save} contains the points; the same command resumes the sweep"
    said = "nothing was saved" if flags.save is None else resumed
    return until_interrupted(lambda: _run(config, console), console, said)


def settings(config: SweepRun, target: ServerTarget) -> dict[str, Any]:
    """Settings that must be equal for a run to resume another: server, dataset, SLO targets; not the list of loads."""
    server = without_secrets(target)
    plan = config.plan
    return msgspec.to_builtins(
        {
            "server": {name: server[name] for name in ("base_url", "backend", "endpoint", "model", "body")},
            "dataset": config.dataset,
            "tokenizer": config.tokenizer,
            "temperature": config.flags.temperature,
            "num_prompts": config.flags.num_prompts,
            "warmups": config.flags.num_warmups,
            "by": plan.by,
            "slos": plan.slos,
        }
    )


class ResumedSweep(NamedTuple):
    """The state that a sweep resumes from. notes: remarks for readers of the points."""

    points: list[Point]
    seed: int
    began: float
    notes: tuple[str, ...] = ()


def continued(config: SweepRun, target: ServerTarget) -> ResumedSweep:
    """The points of the saved file, with its seed and start time. Without a file: no points, a new seed, the time now.

    Raises ConfigError if the file contains another kind of result or other settings; the file is left as it is.
    """
    path = config.flags.save
    if path is None or not path.exists():
        return ResumedSweep([], kept.seed_of(config.flags.seed), clock.now())
    found = saved.read(path)
    if found.kind != "sweep":
        raise ConfigError(f"--save {path}: contains a result of `{found.kind}`; name another file")
    now, then = settings(config, target), found.details.get("settings", {})
    differing = [name for name in now if now[name] != then.get(name)]
    seed = found.dataset.get("seed", 0)
    if config.flags.seed not in (None, seed):
        differing.append("seed")
    if differing:
        raise ConfigError(
            f"--save {path}: was measured with other settings ({', '.join(differing)}); name another file, or "
            "use the same settings"
        )
    try:
        points = msgspec.convert(found.details.get("points"), list[Point])
    except msgspec.ValidationError as error:
        raise ConfigError(f"--save {path}: its points cannot be read ({error}); name another file") from None
    return ResumedSweep(points, seed, found.began, found.notes)


def _run(config: SweepRun, console: Console) -> int:
    plan = config.plan
    target = kept.reached(config.target, config.flags.waiting.ready_check_timeout_sec, console)
    points, seed, began, before_notes = continued(config, target)
    if points:
        say(console, f"{config.flags.save} has {len(points)} points; measuring the missing ones", "dim")
    counts = None if config.tokenizer is None else open_vocabulary(Path(config.tokenizer))
    notes = dict.fromkeys(before_notes)
    requests = {load: requests_of(config, load) for load in plan.loads}
    done = sum(requests.get(one.load, 0) for one in points)

    def result(*, stopped: bool) -> BenchResult:
        return kept.result(
            "sweep",
            figures(plan, points, config.flags.gpus),
            target,
            dataset={**msgspec.to_builtins(config.dataset), "seed": seed},
            details={"plan": plan, "points": points, "gpus": config.flags.gpus, "settings": settings(config, target)},
            began=began,
            stopped=stopped,
            notes=tuple(notes),
        )

    with Working("requests", shown=not config.flags.disable_tqdm) as working:

        def measure(load: float) -> Point | None:
            nonlocal done
            many = requests_of(config, load)
            requested = asks_of(config, target, warmups_of(config, load) + many, load, seed, counts, notes)
            before = max(0, len(requested) - many)  # a dataset may have fewer prompts than requested
            if config.dataset.dataset_path is not None and points:
                notes.setdefault(AGAIN)
            total = sum(requests.values()) if load in requests else done + many
            if before:  # prompts of its own: the measured prompts must not be in the prefix cache
                warm = kept.watched(working, lambda: done, total + before, f"{load:g} {plan.by}, warm-up: ")
                if warm(target, requested[:before], pace(plan, load)).stopped:
                    return None
            found = kept.watched(working, lambda: done, total, f"{load:g} {plan.by}: ")(
                target, requested[before:], pace(plan, load)
            )
            if found.stopped:
                return None
            done += many
            one = sweep.point(load, plan.by, found, plan.slos, counts)
            say(console, line(one), "dim")
            return one

        def save() -> None:
            if config.flags.save is not None:
                saved.save(config.flags.save, result(stopped=True))

        whole = sweep.sweep(plan, points, measure, save)
    found = result(stopped=not whole)
    kept.keep(found, config.flags.save, config.flags.html, console)
    show(sweep.sweep_sections(found), console)
    if len(points) > 1:
        for bar in sweep.text_plot(plan, points):
            say(console, bar)
    if not whole:
        say(console, "stopped: the unfinished load is not counted")
        return INTERRUPTED
    return 0 if any(one.completed for one in points) else 1


def asks_of(
    config: SweepRun,
    target: ServerTarget,
    many: int,
    load: float,
    seed: int,
    counts: TextVocabulary | None,
    notes: dict[str, None],
) -> list[LoadRequest]:
    """The requests of a point. Random prompts differ between points; prompts of a file may be repeated.

    notes: receives remarks for readers of the result.
    """
    own = seed + round(load * 1000)
    dataset = msgspec.structs.replace(config.dataset, num_prompts=many, seed=own, backend=target.backend)
    extra = {} if config.flags.temperature is None else {"temperature": config.flags.temperature}
    with kept.prompt_tokenizer(counts, target, dataset.dataset_path) as tokenizer:
        found = asks(dataset, tokenizer, lambda text: notes.setdefault(text))
    return [msgspec.structs.replace(ask, extra={**ask.extra, **extra}) for ask in found]


def requests_of(config: SweepRun, load: float) -> int:
    """Number of requests of a load's point."""
    if config.flags.num_prompts is not None:
        return config.flags.num_prompts
    return int(load) * EACH if config.plan.by == "streams" else max(LEAST_OF_A_RATE, round(load * OF_A_RATE_S))


def warmups_of(config: SweepRun, load: float) -> int:
    """Number of warm-up requests before a load's point; they are not counted."""
    if config.flags.num_warmups is not None:
        return config.flags.num_warmups
    return int(load) * WARMUPS if config.plan.by == "streams" else WARMUPS


def pace(plan: SweepPlan, load: float) -> LoadPace:
    """The request rate or concurrency limit of a load."""
    return LoadPace(max_concurrency=int(load)) if plan.by == "streams" else LoadPace(rate=load)


def line(one: Point) -> str:
    """The progress line of a measured point."""
    user = "" if one.interactivity is None else f", {one.interactivity:,.1f} tokens/s per user"
    first = "" if one.ttft_p99 is None else f", TTFT p99 {one.ttft_p99 * 1000:,.0f} ms"
    failed = f", {one.failed} failed" if one.failed else ""
    share = "" if one.kept is None else f", {one.kept:.1%} met the SLOs"
    return f"{one.name}: {one.output_throughput:,.1f} output tokens/s{user}{first}{share}{failed}"


def figures(plan: SweepPlan, points: Sequence[Point], gpus: int | None) -> dict[str, Any]:
    """The figures at the top of a result file: highest throughput, frontier, highest load within the SLO targets."""
    good, bad = sweep.around_slo(points, plan.attainment) if plan.slos else (None, None)
    best = max((one.output_throughput for one in points), default=0.0)
    return {
        "max_output_throughput": best,
        "max_output_throughput_per_gpu": best / gpus if gpus else None,
        "frontier": [
            {"load": one.load, "interactivity": one.interactivity, "output_throughput": one.output_throughput}
            for one in sweep.frontier(points)
        ],
        "slo_load": None if good is None else good.load,
        "slo_broken_at": None if bad is None else bad.load,
        "slo_output_throughput": None if good is None else good.output_throughput,
        "slo_goodput": None if good is None else good.goodput,
    }
