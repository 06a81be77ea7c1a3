"""`redline bench sweep`: the flags, and the config that is built from them."""

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.bench.options import (
    KEPT,
    BaseUrl,
    DatasetName,
    DatasetPath,
    Html,
    Quiet,
    Seed,
    ServerFlags,
    WaitingFlags,
    goals,
    grouped,
)
from redline.cli.console import plain_console
from redline.errors import ConfigError

STREAMS = 64  # concurrent streams of the highest default load


@grouped
def bench_sweep(
    *,
    base_url: BaseUrl = None,
    server: ServerFlags,
    max_concurrency: Annotated[
        list[str] | None,
        typer.Option(
            metavar="1,2,4", help="Concurrent requests (repeatable, or comma-separated). Default: 1, 2, 4 ... 64."
        ),
    ] = None,
    request_rate: Annotated[
        list[str] | None, typer.Option(metavar="0.5,1,2", help="Requests/s, instead of --max-concurrency.")
    ] = None,
    dataset_name: DatasetName = "random",
    dataset_path: DatasetPath = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens per random prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens per answer to a random prompt.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(min=0, help="Lengths are uniform in L (1 - R) to L (1 + R).")
    ] = 0.0,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens per answer, for a dataset that is a file.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests per point. Default: 10 per stream, or one minute of a rate.")
    ] = None,
    num_warmups: Annotated[
        int | None, typer.Option(min=0, help="Warm-up requests before each point. Default: 2 per stream.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate every answer to its full length. Random prompts always do.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(min=0, help="Default: the server's own.")] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:MS", help="SLO targets that a good request meets: ttft:500 tpot:20 e2el:10000."),
    ] = None,
    attainment: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of requests that must meet the SLO targets.")
    ] = 0.99,
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Bisect between the last load that meets the SLO targets and the first that does not."
        ),
    ] = False,
    to_the_end: Annotated[
        bool, typer.Option("--to-the-end", help="Measure every load, even after throughput has stopped rising.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of the server; throughput is then also reported per GPU.")
    ] = None,
    seed: Seed = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the result as JSON after each point; an existing file with the same settings is resumed.",
            rich_help_panel=KEPT,
        ),
    ] = None,
    html: Html = None,
    disable_tqdm: Quiet = False,
    waiting: WaitingFlags,
) -> None:
    """Throughput against latency at rising loads: the frontier, and the highest load that meets the SLO targets.

    Stops when more load raises latency without raising throughput. With --save every point is written at once, and
    the same command resumes an interrupted sweep.
    """
    from redline.bench.serving import sweep
    from redline.bench.serving.datasets import DatasetConfig
    from redline.bench.serving.metrics import SLOS
    from redline.bench.serving.sweep import Plan
    from redline.cli.bench import kept
    from redline.cli.bench.sweep_run import SweepConfig, run

    if max_concurrency and request_rate:
        raise ConfigError("--max-concurrency and --request-rate: a sweep varies one of the two")
    if search and not goodput:
        raise ConfigError(
            "--search looks for the load that meets the SLO targets: set them, such as --goodput ttft:500"
        )
    if request_rate:
        plan_by, loads = "requests/s", kept.numbers("--request-rate", request_rate, whole=False)
    elif max_concurrency:
        plan_by, loads = "streams", kept.numbers("--max-concurrency", max_concurrency, whole=True)
    else:
        plan_by, loads = "streams", sweep.doubling(STREAMS)
    if num_prompts is not None and plan_by == "streams" and num_prompts < loads[-1]:
        raise ConfigError(
            f"--num-prompts {num_prompts} is fewer than {loads[-1]:g} streams: give at least one request per stream"
        )
    config = SweepConfig(
        target=server.target(
            base_url,
            waiting.patience,
        ),
        plan=Plan(
            by=plan_by,
            loads=tuple(loads),
            slos=goals(goodput or (), SLOS),
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
        tokenizer=server.vocabulary,
        temperature=temperature,
        num_prompts=num_prompts,
        warmups=num_warmups,
        seed=seed,
        gpus=gpus,
        ready_s=waiting.ready_check_timeout_sec,
        quiet=disable_tqdm,
        save=None if save is None else str(save),
        html=None if html is None else str(html),
    )
    raise typer.Exit(run(config, plain_console()))
