"""`redline bench sweep`: the flags, and what becomes of them."""

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

STREAMS = 64  # the most at once where no loads are given


@grouped
def bench_sweep(
    *,
    base_url: BaseUrl = None,
    server: ServerFlags,
    max_concurrency: Annotated[
        list[str] | None,
        typer.Option(metavar="1,2,4", help="Streams at once (repeatable, or with commas). Absent: 1, 2, 4 ... 64."),
    ] = None,
    request_rate: Annotated[
        list[str] | None, typer.Option(metavar="0.5,1,2", help="Requests/s, in the place of streams.")
    ] = None,
    dataset_name: DatasetName = "random",
    dataset_path: DatasetPath = None,
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
    seed: Seed = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the result as JSON, point by point; a file of the same settings is continued.",
            rich_help_panel=KEPT,
        ),
    ] = None,
    html: Html = None,
    disable_tqdm: Quiet = False,
    waiting: WaitingFlags,
) -> None:
    """Throughput against latency at rising loads: the frontier, and the highest load that keeps the SLOs.

    Ends by itself where more load only costs. With --save, what is measured is kept at once, and the same command
    continues where it was stopped.
    """
    from redline.bench.serving import sweep
    from redline.bench.serving.datasets import DatasetConfig
    from redline.bench.serving.metrics import SLOS
    from redline.bench.serving.sweep import Plan
    from redline.cli.bench import kept
    from redline.cli.bench.sweep_run import SweepConfig, run

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
    if num_prompts is not None and plan_by == "streams" and num_prompts < loads[-1]:
        raise ConfigError(f"--num-prompts {num_prompts} cannot keep {loads[-1]:g} streams busy: give at least as many")
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
