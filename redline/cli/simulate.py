"""`redline simulate`: the flags, and what becomes of them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from redline.cli.console import plain_console


def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A file in Mooncake's format (JSONL: timestamp, input_length, output_length, hash_ids), or a made "
            "one: KIND:SECONDS@REQUESTS_A_SECOND with commas between phases, of chat, documents and agents.",
        ),
    ],
    gpus: Annotated[int, typer.Option(min=1, help="Of the whole fleet; a worker has as many as its model says.")] = 64,
    worker: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="What one worker does: a name, or a JSON file (docs/simulate.md).")
    ] = "kimi-8xh200",
    roles: Annotated[
        list[str] | None,
        typer.Option(
            metavar="auto|both|P:D",
            help="auto: chosen as the traffic goes, as a server does it. both: every worker computes prompts and "
            "answers. P:D: so many compute prompts, so many answer. Repeat it to see them side by side. Absent: auto.",
        ),
    ] = None,
    prompts: Annotated[
        Literal["predicted", "remote", "local"],
        typer.Option(help="Where a prompt is computed, where some workers compute prompts alone."),
    ] = "predicted",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[CLASS.]NAME:MS",
            help="What a good request keeps: ttft and itl, such as ttft:2000, or documents.ttft:8000 for those of a "
            "class. Absent: ttft:2000 and itl:50.",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Of a GPU for an hour. Absent: costs are GPU-hours.")
    ] = None,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two looks at the roles, with auto.")] = 5.0,
    least: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Workers that run in any case, with auto; others are started and ended as the traffic asks, up to all "
            "that --gpus has. Absent: all run.",
        ),
    ] = None,
    start: Annotated[float, typer.Option(min=0, help="Seconds that a worker's start takes, with --least.")] = 120.0,
    spare: Annotated[
        float,
        typer.Option(min=1, help="Seconds for which fewer workers have to be enough before one ends, with --least."),
    ] = 300.0,
    time_scale: Annotated[
        float, typer.Option(min=0.001, help="Times of the trace times this: 0.5 is twice the load.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of a made trace, and of what is drawn at random.")] = 1,
    keep_trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the trace that is played.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the place of tables.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with plots that stands alone.")
    ] = None,
) -> None:
    """A fleet on a trace, simulated on one core: cost, goodput and the ratio of roles over time.

    \b
    Ten minutes of chat on 64 GPUs, roles chosen as a server does it:
      redline simulate chat:600@20
    Traffic that changes, and fixed ratios beside the chosen ones:
      redline simulate chat:600@20,documents:600@4,agents:600@5 --roles auto --roles both --roles 3:5 --html page.html
    Two workers at least, and eight at most:
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
