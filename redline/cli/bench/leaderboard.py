"""`redline bench leaderboard`: the flags, and what becomes of them."""

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

RUNS = 8  # the leaderboard asks eight times a day


@grouped
def bench_leaderboard(
    *,
    base_url: BaseUrl = None,
    server: ServerFlags,
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
    seed: Seed = None,
    save: Save = None,
    html: Html = None,
    disable_tqdm: Quiet = False,
    waiting: WaitingFlags,
) -> None:
    """A leaderboard's claim, checked: TTFT, first answer token, output speed, end to end for 500 tokens; P50 of runs.

    Artificial Analysis' protocol: 10,000 tokens in, 1,500 out, one prompt at a time, none asked twice. What differs
    from the leaderboard's own setting is said with the figures.
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
