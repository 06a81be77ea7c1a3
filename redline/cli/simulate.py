"""`redline simulate`: its flags, and their conversion to a configuration."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from redline.cli.console import plain_console


def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A file in Mooncake's format (JSONL: timestamp, input_length, output_length, hash_ids), or a "
            "synthetic one: KIND:SECONDS@REQUESTS_A_SECOND with commas between phases; kinds: chat, documents, agents.",
        ),
    ],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the whole fleet, a multiple of the worker's.")] = 64,
    worker: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="The worker model: a name, or a JSON file (docs/routing.md).")
    ] = "kimi-8xh200",
    roles: Annotated[
        list[str] | None,
        typer.Option(
            metavar="auto|both|P:D",
            help="auto: chosen from the traffic, as in a server. both: every worker runs prefill and decode. P:D: P "
            "prefill workers and D decode workers. Repeat it to compare several. Default: auto.",
        ),
    ] = None,
    prompts: Annotated[
        Literal["predicted", "remote", "local"],
        typer.Option(help="Where prompts are prefilled, if there are prefill workers."),
    ] = "predicted",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[CLASS.]NAME:MS",
            help="SLO targets of a good request: ttft and itl, such as ttft:2000, or documents.ttft:8000 for one "
            "class. Default: ttft:2000 and itl:50.",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Price of a GPU per hour. Default: costs are in GPU-hours.")
    ] = None,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two role decisions, with auto.")] = 5.0,
    least: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Minimum number of workers, with auto; more are started and stopped with the traffic, up to all of "
            "--gpus. Default: all run.",
        ),
    ] = None,
    start: Annotated[float, typer.Option(min=0, help="Seconds to start a worker, with --least.")] = 120.0,
    spare: Annotated[
        float,
        typer.Option(min=1, help="Seconds for which fewer workers must suffice before one is stopped, with --least."),
    ] = 300.0,
    time_scale: Annotated[
        float, typer.Option(min=0.001, help="Factor for the times of the trace: 0.5 is twice the load.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed, also of a synthetic trace.")] = 1,
    keep_trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the simulated trace.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained page with plots.")] = None,
) -> None:
    """Simulate a fleet on a trace, on one core: cost, goodput and the ratio of roles over time.

    \b
    Ten minutes of chat on 64 GPUs, roles chosen as in a server:
      redline simulate chat:600@20
    Changing traffic, with fixed ratios compared with the chosen one:
      redline simulate chat:600@20,documents:600@4,agents:600@5 --roles auto --roles both --roles 3:5 --html page.html
    At least two workers, and at most eight:
      redline simulate chat:1800@5,chat:1800@20,chat:1800@5 --least 2 --roles auto --roles both
    An hour of 2,000 GPUs on a recorded trace:
      redline simulate trace.jsonl --gpus 2000 --price 2.5
    """
    from redline.cli.simulate_run import SimulateConfig, run

    config = SimulateConfig(
        trace=trace,
        gpus=gpus,
        worker=worker,
        roles=tuple(roles or ("auto",)),
        way=prompts,
        goodput=tuple(goodput or ()),
        price=price,
        every_s=every,
        least=least,
        start_s=start,
        spare_s=spare,
        time_scale=time_scale,
        seed=seed,
        keep_trace=keep_trace,
        json=json,
        html=html,
    )
    raise typer.Exit(run(config, plain_console()))
