"""`redline bench leaderboard`: the flags, and the config that is built from them."""

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.bench.options import (
    BaseUrl,
    Html,
    Quiet,
    Save,
    Seed,
    ServerFlags,
    WaitingFlags,
    grouped,
)
from redline.cli.console import plain_console

RUNS = 8  # the leaderboard measures eight times a day


@grouped
def bench_leaderboard(
    *,
    base_url: BaseUrl = None,
    server: ServerFlags,
    workload: Annotated[
        list[str] | None,
        typer.Option(metavar="100/300|1k/1k|10k/1.5k|100k/2k|all", help="Input and output tokens. Default: 10k/1.5k."),
    ] = None,
    input_len: Annotated[int | None, typer.Option(min=1, help="Tokens per prompt, instead of the preset's.")] = None,
    output_len: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens per answer, instead of the preset's.")
    ] = None,
    parallel: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Concurrent prompts (repeatable). Default: 1; the leaderboard's other setting is 10."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Number of runs, each with new prompts.")] = RUNS,
    num_warmups: Annotated[int, typer.Option(min=0, help="Warm-up requests, which are not measured.")] = 1,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Generate every answer to its full length, if the server supports the field."
        ),
    ] = False,
    temperature: Annotated[float | None, typer.Option(min=0, help="Default: the server's own.")] = None,
    o200k_file: Annotated[
        Path | None,
        typer.Option(
            "--o200k",
            metavar="FILE",
            help="o200k_base.tiktoken, to report figures in its tokens too. Default: the file in tiktoken's cache.",
        ),
    ] = None,
    seed: Seed = None,
    save: Save = None,
    html: Html = None,
    disable_tqdm: Quiet = False,
    waiting: WaitingFlags,
) -> None:
    """Checks a leaderboard's claim: TTFT, first answer token, output speed, end to end for 500 tokens; P50 of runs.

    Artificial Analysis' protocol: 10,000 tokens in, 1,500 out, one prompt at a time, none sent twice. Differences from
    the leaderboard's own setting are reported with the figures.
    """
    from redline.cli.bench.leaderboard_run import LeaderboardConfig, run

    target = server.target(
        base_url,
        waiting.patience,
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
        tokenizer=server.vocabulary,
        o200k=None if o200k_file is None else str(o200k_file),
        seed=seed,
        ready_s=waiting.ready_check_timeout_sec,
        quiet=disable_tqdm,
        save=None if save is None else str(save),
        html=None if html is None else str(html),
    )
    raise typer.Exit(run(config, plain_console()))
