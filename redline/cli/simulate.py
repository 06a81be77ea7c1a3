"""`redline simulate`: its flags."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from redline.cli.console import plain_console
from redline.cli.flags import Argument, AtLeast1, Flag
from redline.messages.base import Record

Seconds = Annotated[float, Meta(ge=1)]


class SimulateConfig(Record, frozen=True):
    """The settings of `redline simulate`."""

    trace: Annotated[
        str,
        Meta(
            description="A file in Mooncake's format (JSONL: timestamp, input_length, output_length, hash_ids), or a "
            "synthetic one: KIND:SECONDS@REQUESTS_A_SECOND with commas between phases; kinds: chat, documents, agents."
        ),
        Argument(metavar="TRACE"),
    ]
    gpus: Annotated[AtLeast1, Meta(description="GPUs of the whole fleet, a multiple of the worker's.")] = 64
    worker: Annotated[
        str, Meta(description="The worker model: a name, or a JSON file (docs/routing.md)."), Flag(metavar="NAME|FILE")
    ] = "kimi-8xh200"
    roles: Annotated[
        tuple[str, ...],
        Meta(
            description="auto: chosen from the traffic, as in a server. both: every worker runs prefill and decode. "
            "P:D: P prefill workers and D decode workers. Repeat it to compare several. Default: auto."
        ),
        Flag(metavar="auto|both|P:D"),
    ] = ("auto",)
    prompts: Annotated[
        Literal["predicted", "remote", "local"],
        Meta(description="Where prompts are prefilled, if there are prefill workers."),
    ] = "predicted"
    goodput: Annotated[
        tuple[str, ...],
        Meta(
            description="SLO targets of a good request: ttft and itl, such as ttft:2000, or documents.ttft:8000 for "
            "one class. Default: ttft:2000 and itl:50."
        ),
        Flag(metavar="[CLASS.]NAME:MS"),
    ] = ()
    price: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Price of a GPU per hour. Default: costs are in GPU-hours."),
    ] = None
    every: Annotated[Seconds, Meta(description="Seconds between two role decisions, with auto.")] = 5.0
    least: Annotated[
        AtLeast1 | None,
        Meta(
            description="Minimum number of workers, with auto; more are started and stopped with the traffic, up to "
            "all of --gpus. Default: all run."
        ),
    ] = None
    start: Annotated[float, Meta(ge=0, description="Seconds to start a worker, with --least.")] = 120.0
    spare: Annotated[
        Seconds,
        Meta(description="Seconds for which fewer workers must suffice before one is stopped, with --least."),
    ] = 300.0
    time_scale: Annotated[
        float, Meta(ge=0.001, description="Factor for the times of the trace: 0.5 is twice the load.")
    ] = 1.0
    seed: Annotated[int, Meta(ge=0, description="Random seed, also of a synthetic trace.")] = 1
    keep_trace: Annotated[Path | None, Meta(description="Write the simulated trace."), Flag(metavar="FILE")] = None
    json: Annotated[bool, Meta(description="Print the figures as JSON instead of tables.")] = False
    html: Annotated[Path | None, Meta(description="Write a self-contained page with plots."), Flag(metavar="FILE")] = (
        None
    )


def simulate(config: SimulateConfig) -> int:
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
    from redline.cli.simulate_run import run

    return run(config, plain_console())
