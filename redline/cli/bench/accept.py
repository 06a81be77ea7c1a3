"""`redline bench accept`: the flags, and the config that is built from them."""

from typing import Annotated

import typer

from redline.cli.bench.options import (
    SERVER,
    DatasetName,
    DatasetPath,
    Html,
    Quiet,
    Save,
    Seed,
    ServerFlags,
    WaitingFlags,
    grouped,
    target_of,
)
from redline.cli.console import plain_console
from redline.errors import ConfigError

QUESTIONS, MOST_TOKENS = 16, 256
MOST_LINES = 100_000  # lines read from a file, at most


@grouped
def bench_accept(
    *,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="The server; repeat it to put several on one page, such as one per k.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    server: ServerFlags,
    metrics_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Address of /metrics, if it differs from the API's.", rich_help_panel=SERVER),
    ] = None,
    dataset_name: DatasetName = "redline",
    dataset_path: DatasetPath = None,
    domain: Annotated[
        list[str] | None, typer.Option(help="Only this domain of the prompts (repeatable). Default: all.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="At most this many prompts per domain.")] = QUESTIONS,
    output_len: Annotated[int, typer.Option(min=2, help="Maximum tokens per answer.")] = MOST_TOKENS,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="Sampling temperature (repeatable). Default: 0, greedy.")
    ] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests.")] = 1,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Generate every answer to its full length, if the server supports the field."
        ),
    ] = False,
    seed: Seed = 0,
    save: Save = None,
    html: Html = None,
    disable_tqdm: Quiet = False,
    waiting: WaitingFlags,
) -> None:
    """Acceptance of draft tokens by position and by domain, and tokens per round by k next to the golden curve.

    Computed from the counters in the server's /metrics before and after each domain. The server should have no other
    traffic during the run.
    """
    from redline.bench.serving.datasets import DatasetConfig
    from redline.cli.bench import kept
    from redline.cli.bench.accept_run import AcceptConfig, run

    targets = tuple(
        server.target(
            url,
            waiting.patience,
        )
        for url in base_url or [None]
    )
    if metrics_url is not None and len(targets) > 1:
        raise ConfigError("--metrics-url applies to one server, but several --base-url were given")
    config = AcceptConfig(
        targets=targets,
        dataset=DatasetConfig(
            dataset_name=kept.dataset(dataset_name),
            dataset_path=None if dataset_path is None else str(dataset_path),
            num_prompts=num_prompts if dataset_name == "random" else MOST_LINES,
            random_output_len=output_len,
            sharegpt_output_len=output_len,
            custom_output_len=output_len,
            seed=kept.seed_of(seed),
            ignore_eos=ignore_eos,
            no_oversample=True,
        ),
        questions=num_prompts,
        domains=tuple(domain or ()),
        temperatures=tuple(dict.fromkeys(temperature or (0.0,))),
        concurrency=max_concurrency,
        tokenizer=server.vocabulary,
        metrics_url=None if metrics_url is None else target_of(base_url=metrics_url.removesuffix("/metrics")).base_url,
        ready_s=waiting.ready_check_timeout_sec,
        quiet=disable_tqdm,
        save=None if save is None else str(save),
        html=None if html is None else str(html),
    )
    raise typer.Exit(run(config, plain_console()))
