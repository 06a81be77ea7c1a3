"""`redline bench sweep`: the flags, and the run from them."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from redline.bench.serving import saved, sweep
from redline.bench.serving.datasets import DatasetConfig, asks
from redline.bench.serving.metrics import SLOS
from redline.bench.serving.records import Ask
from redline.bench.serving.saved import Result, without_secrets
from redline.bench.serving.sweep import Plan, Point
from redline.bench.serving.target import Pace, Patience, Target
from redline.bench.serving.vocabulary import Vocabulary, open_vocabulary
from redline.cli.bench import kept, options
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, plain_console, say, until_interrupted
from redline.disk import check_output
from redline.errors import ConfigError
from redline.progress import Working
from redline.wire.base import Record

STREAMS = 64  # the most at once where no loads are given
EACH, WARMUPS = 10, 2  # requests and warm-ups for each stream, as InferenceX has them
OF_A_RATE_S, LEAST_OF_A_RATE = 60.0, 20  # seconds' worth of requests at a rate, and the fewest


class SweepConfig(Record, frozen=True):
    """What `redline bench sweep` is told. num_prompts, warmups: of each point; None: by its load."""

    target: Target
    plan: Plan
    dataset: DatasetConfig
    tokenizer: str | None = None
    temperature: float | None = None
    num_prompts: int | None = None
    warmups: int | None = None
    seed: int | None = None
    gpus: int | None = None
    ready_s: float | None = None
    quiet: bool = False
    save: str | None = None
    html: str | None = None


def bench_sweep(
    base_url: options.BaseUrl = None,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    endpoint: options.Endpoint = None,
    backend: options.Backend = None,
    model: options.Model = None,
    served_model_name: options.ServedModelName = None,
    tokenizer: options.Tokenizer = None,
    header: options.Header = None,
    extra_body: options.ExtraBody = None,
    insecure: options.Insecure = False,
    max_concurrency: Annotated[
        list[str] | None,
        typer.Option(metavar="1,2,4", help="Streams at once (repeatable, or with commas). Absent: 1, 2, 4 ... 64."),
    ] = None,
    request_rate: Annotated[
        list[str] | None, typer.Option(metavar="0.5,1,2", help="Requests/s, in the place of streams.")
    ] = None,
    dataset_name: kept.DatasetName = "random",
    dataset_path: kept.DatasetPath = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer to it.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(min=0, help="Lengths are uniform in L (1 - R) to L (1 + R).")
    ] = 0.0,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer, at most, of a dataset that is a file.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests of each point. Absent: 10 a stream, a minute's of a rate.")
    ] = None,
    num_warmups: Annotated[
        int | None, typer.Option(min=0, help="Requests before each point, not counted. Absent: 2 a stream.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Every answer has its whole length. Random prompts ask so anyway.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(min=0, help="Absent: the server's own.")] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:MS", help="SLOs that a good request keeps: ttft:500 tpot:20 e2el:10000."),
    ] = None,
    attainment: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share of requests that has to keep the SLOs.")
    ] = 0.99,
    search: Annotated[
        bool,
        typer.Option("--search", help="Measure between the last load that keeps the SLOs and the first that does not."),
    ] = False,
    to_the_end: Annotated[
        bool, typer.Option("--to-the-end", help="Measure every load, also where more only costs.")
    ] = False,
    gpus: Annotated[int | None, typer.Option(min=1, help="The server's: throughput is also said for each.")] = None,
    seed: kept.Seed = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the result as JSON, point by point; a file of the same settings is continued.",
            rich_help_panel=kept.KEPT,
        ),
    ] = None,
    html: kept.Html = None,
    disable_tqdm: options.Quiet = False,
    ready_check_timeout_sec: options.ReadyTimeout = None,
    connect_timeout_sec: options.ConnectTimeout = 10.0,
    first_token_timeout_sec: options.FirstTokenTimeout = 600.0,
    silence_timeout_sec: options.SilenceTimeout = 60.0,
    request_timeout_sec: options.RequestTimeout = 6 * 3600.0,
) -> None:
    """Throughput against latency at rising loads: the frontier, and the highest load that keeps the SLOs.

    Ends by itself where more load only costs. With --save, what is measured is kept at once, and the same command
    continues where it was stopped.
    """
    if max_concurrency and request_rate:
        raise ConfigError("--max-concurrency and --request-rate: a sweep is over one of the two")
    if search and not goodput:
        raise ConfigError("--search looks for the load that keeps the SLOs: give them, such as --goodput ttft:500")
    if request_rate:
        plan_by, loads = "requests/s", kept.numbers("--request-rate", request_rate, whole=False)
    elif max_concurrency:
        plan_by, loads = "streams", kept.numbers("--max-concurrency", max_concurrency, whole=True)
    else:
        plan_by, loads = "streams", sweep.doubling(STREAMS)
    config = SweepConfig(
        target=options.target_of(
            base_url=base_url,
            host=host,
            port=port,
            endpoint=endpoint,
            backend=backend,
            model=model,
            served_model_name=served_model_name,
            header=header,
            extra_body=extra_body,
            insecure=insecure,
            patience=Patience(
                connect=connect_timeout_sec,
                first=first_token_timeout_sec,
                silence=silence_timeout_sec,
                whole=request_timeout_sec,
            ),
        ),
        plan=Plan(
            by=plan_by,
            loads=tuple(loads),
            slos=options.goals(goodput or (), SLOS),
            attainment=attainment,
            search=search,
            to_the_end=to_the_end,
        ),
        dataset=DatasetConfig(
            dataset_name=kept.dataset(dataset_name),
            dataset_path=None if dataset_path is None else str(dataset_path),
            random_input_len=random_input_len,
            random_output_len=output_len or random_output_len,
            random_range_ratio=random_range_ratio,
            sharegpt_output_len=output_len,
            custom_output_len=output_len,
            ignore_eos=ignore_eos or dataset_name == "random",
        ),
        tokenizer=tokenizer or (model if model and Path(model).is_dir() else None),
        temperature=temperature,
        num_prompts=num_prompts,
        warmups=num_warmups,
        seed=seed,
        gpus=gpus,
        ready_s=ready_check_timeout_sec,
        quiet=disable_tqdm,
        save=None if save is None else str(save),
        html=None if html is None else str(html),
    )
    raise typer.Exit(run(config, plain_console()))


def run(config: SweepConfig, console: Console) -> int:
    """Measures what is missing, prints, saves; the exit code: 0, 1 where every request failed, 130 after Ctrl-C.

    Raises ConfigError.
    """
    for path in (config.save, config.html):
        if path is not None:
            check_output(Path(path))
    continued = "nothing was saved" if config.save is None else f"{config.save} holds the points, and is continued"
    return until_interrupted(lambda: _run(config, console), console, continued)


def settings(config: SweepConfig, target: Target) -> dict[str, Any]:
    """What two runs must have in common for the one to continue the other: whom, what, how hard; not which loads."""
    server = without_secrets(target)
    plan = config.plan
    return msgspec.to_builtins(
        {
            "server": {name: server[name] for name in ("base_url", "backend", "endpoint", "model", "body")},
            "dataset": config.dataset,
            "tokenizer": config.tokenizer,
            "temperature": config.temperature,
            "num_prompts": config.num_prompts,
            "warmups": config.warmups,
            "by": plan.by,
            "slos": plan.slos,
        }
    )


def continued(config: SweepConfig, target: Target) -> tuple[list[Point], int, float]:
    """The points that the file has, its seed and its beginning; none, and new ones, where there is no file.

    Raises ConfigError where the file is of something else: nothing in it is lost.
    """
    path = None if config.save is None else Path(config.save)
    if path is None or not path.exists():
        return [], kept.seed_of(config.seed), time.time()
    found = saved.read(path)
    if found.kind != "sweep":
        raise ConfigError(f"--save {path}: holds a result of {found.kind}; name another file")
    now, then = settings(config, target), found.details["settings"]
    differing = [name for name in now if now[name] != then.get(name)]
    if config.seed not in (None, found.dataset["seed"]):
        differing.append("seed")
    if differing:
        raise ConfigError(
            f"--save {path}: was measured with other settings ({', '.join(differing)}); name another file, or "
            "give the same again"
        )
    return msgspec.convert(found.details["points"], list[Point]), found.dataset["seed"], found.began


def _run(config: SweepConfig, console: Console) -> int:
    plan = config.plan
    target = kept.reached(config.target, config.ready_s, console)
    points, seed, began = continued(config, target)
    if points:
        say(console, f"{config.save} has {len(points)} points; what is missing is measured", "dim")
    counts = None if config.tokenizer is None else open_vocabulary(Path(config.tokenizer))
    notes: dict[str, None] = {}
    requests = {load: requests_of(config, load) for load in plan.loads}
    done = sum(requests.get(one.load, 0) for one in points)

    def result(*, stopped: bool) -> Result:
        return kept.result(
            "sweep",
            figures(plan, points, config.gpus),
            target,
            dataset={**msgspec.to_builtins(config.dataset), "seed": seed},
            details={"plan": plan, "points": points, "gpus": config.gpus, "settings": settings(config, target)},
            began=began,
            stopped=stopped,
        )

    with Working("requests", shown=not config.quiet) as working:

        def measure(load: float) -> Point | None:
            nonlocal done
            many = requests_of(config, load)
            requested = asks_of(config, target, many, seed + round(load * 1000), counts, notes)
            total = sum(requests.values()) if load in requests else done + many
            found = kept.watched(working, lambda: done, total, f"{load:g} {plan.by}: ")(
                target, requested, pace(config, load)
            )
            if found.stopped:
                return None
            done += many
            one = sweep.point(load, plan.by, found, plan.slos, counts)
            say(console, line(one), "dim")
            return one

        def save() -> None:
            if config.save is not None:
                saved.save(Path(config.save), result(stopped=True))

        whole = sweep.sweep(plan, points, measure, save)
    for note in notes:
        say(console, note, "yellow")
    found = result(stopped=not whole)
    sections = sweep.sweep_sections(found)
    show(sections, console)
    if len(points) > 1:
        for bar in sweep.text_plot(plan, points):
            say(console, bar)
    kept.keep(found, sections, f"redline bench sweep: {target.model}", config.save, config.html, console)
    if not whole:
        say(console, "stopped: the load that ran is not counted")
        return INTERRUPTED
    return 0 if any(one.completed for one in points) else 1


def asks_of(
    config: SweepConfig, target: Target, many: int, seed: int, counts: Vocabulary | None, notes: dict[str, None]
) -> list[Ask]:
    """A point's requests, which are no other point's. notes: gets what a reader has to know of them."""
    dataset = msgspec.structs.replace(config.dataset, num_prompts=many, seed=seed, backend=target.backend)
    extra = {} if config.temperature is None else {"temperature": config.temperature}
    found = asks(dataset, counts, lambda text: notes.setdefault(text))
    return [msgspec.structs.replace(ask, extra={**ask.extra, **extra}) for ask in found]


def requests_of(config: SweepConfig, load: float) -> int:
    """How many requests a load's point has."""
    if config.num_prompts is not None:
        return config.num_prompts
    return int(load) * EACH if config.plan.by == "streams" else max(LEAST_OF_A_RATE, round(load * OF_A_RATE_S))


def pace(config: SweepConfig, load: float) -> Pace:
    """How a load is put on."""
    if config.plan.by == "streams":
        warmups = int(load) * WARMUPS if config.warmups is None else config.warmups
        return Pace(max_concurrency=int(load), warmups=warmups)
    return Pace(rate=load, warmups=WARMUPS if config.warmups is None else config.warmups)


def line(one: Point) -> str:
    """A point as it is said while the sweep goes on."""
    user = "" if one.interactivity is None else f", {one.interactivity:,.1f} tokens/s a user"
    first = "" if one.ttft_p99 is None else f", TTFT p99 {one.ttft_p99 * 1000:,.0f} ms"
    failed = f", {one.failed} failed" if one.failed else ""
    share = "" if one.kept is None else f", {one.kept:.1%} kept the SLOs"
    return f"{one.name}: {one.output_throughput:,.1f} output tokens/s{user}{first}{share}{failed}"


def figures(plan: Plan, points: Sequence[Point], gpus: int | None) -> dict[str, Any]:
    """The sweep's figures at the top of a file: the most throughput, the frontier and the SLOs' point."""
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
