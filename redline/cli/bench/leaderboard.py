"""`redline bench leaderboard`: the flags, and the run from them."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from redline.bench.serving import leaderboard, ready
from redline.bench.serving.datasets import COMPLETIONS
from redline.bench.serving.leaderboard import Outcome, Workload
from redline.bench.serving.records import Answer
from redline.bench.serving.target import Patience, Target
from redline.bench.serving.vocabulary import o200k, open_vocabulary
from redline.cli.bench import kept, options
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, plain_console, say, until_interrupted
from redline.disk import check_output
from redline.errors import ConfigError
from redline.progress import Working
from redline.wire.base import Record

RUNS = 8  # the leaderboard asks eight times a day


class LeaderboardConfig(Record, frozen=True):
    """What `redline bench leaderboard` is told. input_len, output_len: in the place of a preset's, both or either."""

    target: Target
    workload: tuple[str, ...] = ()
    input_len: int | None = None
    output_len: int | None = None
    parallel: tuple[int, ...] = (1,)
    runs: int = RUNS
    warmups: int = 1
    ignore_eos: bool = False
    temperature: float | None = None
    tokenizer: str | None = None
    o200k: str | None = None
    seed: int | None = None
    ready_s: float | None = None
    quiet: bool = False
    save: str | None = None
    html: str | None = None


def bench_leaderboard(
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
    workload: Annotated[
        list[str] | None,
        typer.Option(metavar="100/300|1k/1k|10k/1.5k|100k/2k|all", help="Tokens in and out. Absent: 10k/1.5k."),
    ] = None,
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt, in the place of a preset's.")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of an answer, at most, in the place of a preset's.")
    ] = None,
    parallel: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Prompts at a time (repeatable). Absent: 1; the other setting is 10."),
    ] = None,
    runs: Annotated[
        int, typer.Option(min=1, help="How often, each time with prompts that were not asked before.")
    ] = RUNS,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before, which are not counted.")] = 1,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Every answer has its whole length, where the server knows the field.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(min=0, help="Absent: the server's own.")] = None,
    o200k_file: Annotated[
        Path | None,
        typer.Option(
            "--o200k",
            metavar="FILE",
            help="o200k_base.tiktoken: figures in its tokens too. Absent: where tiktoken's cache has it.",
        ),
    ] = None,
    seed: kept.Seed = None,
    save: kept.Save = None,
    html: kept.Html = None,
    disable_tqdm: options.Quiet = False,
    ready_check_timeout_sec: options.ReadyTimeout = None,
    connect_timeout_sec: options.ConnectTimeout = 10.0,
    first_token_timeout_sec: options.FirstTokenTimeout = 600.0,
    silence_timeout_sec: options.SilenceTimeout = 60.0,
    request_timeout_sec: options.RequestTimeout = 6 * 3600.0,
) -> None:
    """A leaderboard's claim, checked: TTFT, first answer token, output speed, end to end for 500 tokens; P50 of runs.

    Artificial Analysis' protocol: 10,000 tokens in, 1,500 out, one prompt at a time, none asked twice. What differs
    from the leaderboard's own setting is said with the figures.
    """
    target = options.target_of(
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
    )
    config = LeaderboardConfig(
        target=target,
        workload=tuple(workload or ()),
        input_len=input_len,
        output_len=output_len,
        parallel=tuple(parallel or (1,)),
        runs=runs,
        warmups=num_warmups,
        ignore_eos=ignore_eos,
        temperature=temperature,
        tokenizer=tokenizer or (model if model and Path(model).is_dir() else None),
        o200k=None if o200k_file is None else str(o200k_file),
        seed=seed,
        ready_s=ready_check_timeout_sec,
        quiet=disable_tqdm,
        save=None if save is None else str(save),
        html=None if html is None else str(html),
    )
    raise typer.Exit(run(config, plain_console()))


def run(config: LeaderboardConfig, console: Console) -> int:
    """Measures, prints, saves; the exit code: 0, 1 where every request failed, 130 after Ctrl-C.

    Raises ConfigError.
    """
    workloads = asked_for(config)
    for path in (config.save, config.html):
        if path is not None:
            check_output(Path(path))
    return until_interrupted(lambda: _run(config, workloads, console), console)


def asked_for(config: LeaderboardConfig) -> list[Workload]:
    """The workloads of a config. Raises ConfigError."""
    if (config.input_len or config.output_len) and len(config.workload) > 1:
        raise ConfigError("--input-len and --output-len take the place of one --workload; several were given")
    found = leaderboard.workloads(config.workload or (leaderboard.DEFAULT,), sorted(set(config.parallel)))
    return [
        Workload(
            input_len=config.input_len or one.input_len,
            output_len=config.output_len or one.output_len,
            parallel=one.parallel,
        )
        for one in found
    ]


def _run(config: LeaderboardConfig, workloads: list[Workload], console: Console) -> int:
    other = o200k(None if config.o200k is None else Path(config.o200k))
    target = kept.reached(config.target, config.ready_s, console)
    room = ready.max_model_len(target)
    for workload in workloads:
        leaderboard.check_fits(workload, room)
    counts = None if config.tokenizer is None else open_vocabulary(Path(config.tokenizer))
    seed = kept.seed_of(config.seed)
    began, outcomes, answers = time.time(), list[Outcome](), list[Answer]()
    total = sum(config.runs * workload.parallel for workload in workloads)
    with Working("requests", shown=not config.quiet) as working:
        for place, workload in enumerate(workloads):
            asks = leaderboard.prompts(
                workload,
                config.runs * workload.parallel,
                seed + place,
                counts,
                bare=target.backend in COMPLETIONS,
                extra=body(config),
                made=lambda many: working.show(len(answers), total, note=f"{many} prompts written"),
            )
            outcomes.append(
                leaderboard.measure(
                    workload,
                    asks,
                    target,
                    kept.watched(working, lambda: len(answers), total, f"{workload.name}: "),
                    counts=counts,
                    o200k=other,
                    warmups=config.warmups,
                    kept=answers.append,
                )
            )
            if outcomes[-1].stopped:
                break
    stopped = outcomes[-1].stopped
    differs = leaderboard.differs(target, outcomes, config.runs, o200k=other is not None)
    found = kept.result(
        "leaderboard",
        leaderboard.figures(outcomes),
        target,
        dataset={"name": "natural", "seed": seed, "workloads": [workload.name for workload in workloads]},
        details={"outcomes": outcomes, "differs": differs, "runs": config.runs},
        began=began,
        stopped=stopped,
        answers=answers,
    )
    sections = leaderboard.leaderboard_sections(found)
    show(sections, console)
    kept.keep(found, sections, f"redline bench leaderboard: {target.model}", config.save, config.html, console)
    if stopped:
        say(console, "stopped: the figures are of what had been answered")
        return INTERRUPTED
    return 0 if any(outcome.good for outcome in outcomes) else 1


def body(config: LeaderboardConfig) -> dict[str, Any]:
    """The fields that a config's flags put into every body."""
    found: dict[str, Any] = {}
    if config.ignore_eos:
        found["ignore_eos"] = True
    if config.temperature is not None:
        found["temperature"] = config.temperature
    return found
