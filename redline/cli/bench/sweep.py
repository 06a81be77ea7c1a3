"""`redline bench sweep`: its flags."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from redline.cli.bench.options import (
    OUTPUT,
    BaseUrl,
    DatasetName,
    DatasetPath,
    Goodput,
    Html,
    IgnoreEos,
    Quiet,
    RandomSeed,
    Rising,
    ServerFlags,
    Temperature,
    WaitingFlags,
)
from redline.cli.console import plain_console
from redline.cli.flags import AtLeast1, Flag
from redline.messages.base import Record


class SweepFlags(Record, frozen=True):
    """The flags of `redline bench sweep`. num_prompts, num_warmups: per point; None: derived from the load."""

    base_url: BaseUrl = None
    server: ServerFlags = ServerFlags()
    max_concurrency: Annotated[
        tuple[str, ...],
        Meta(description="Concurrent requests (repeatable, or comma-separated). Default: 1, 2, 4 ... 64."),
        Flag(metavar="1,2,4"),
    ] = ()
    request_rate: Annotated[
        tuple[str, ...], Meta(description="Requests/s, instead of --max-concurrency."), Flag(metavar="0.5,1,2")
    ] = ()
    dataset_name: DatasetName = "random"
    dataset_path: DatasetPath = None
    random_input_len: Annotated[AtLeast1, Meta(description="Tokens per random prompt.")] = 1024
    random_output_len: Annotated[AtLeast1, Meta(description="Tokens per answer to a random prompt.")] = 128
    random_range_ratio: Rising = 0.0
    output_len: Annotated[
        AtLeast1 | None, Meta(description="Maximum tokens per answer, for a dataset that is a file.")
    ] = None
    num_prompts: Annotated[
        AtLeast1 | None, Meta(description="Requests per point. Default: 10 per stream, or one minute of a rate.")
    ] = None
    num_warmups: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Warm-up requests before each point. Default: 2 per stream."),
    ] = None
    ignore_eos: IgnoreEos = False
    temperature: Temperature = None
    goodput: Goodput = ()
    attainment: Annotated[float, Meta(ge=0, le=1, description="Share of requests that must meet the SLO targets.")] = (
        0.99
    )
    search: Annotated[
        bool, Meta(description="Bisect between the last load that meets the SLO targets and the first that does not.")
    ] = False
    to_the_end: Annotated[bool, Meta(description="Measure every load, even after throughput has stopped rising.")] = (
        False
    )
    gpus: Annotated[
        AtLeast1 | None, Meta(description="GPUs of the server; throughput is then also reported per GPU.")
    ] = None
    seed: RandomSeed = None
    save: Annotated[
        Path | None,
        Meta(
            description="Write the result as JSON after each point; an existing file with the same settings is resumed."
        ),
        Flag(metavar="FILE", panel=OUTPUT),
    ] = None
    html: Html = None
    disable_tqdm: Quiet = False
    waiting: WaitingFlags = WaitingFlags()


def bench_sweep(flags: SweepFlags) -> int:
    """Throughput against latency at rising loads: the frontier, and the highest load that meets the SLO targets.

    Stops when more load raises latency without raising throughput. With --save every point is written at once, and
    the same command resumes an interrupted sweep.
    """
    from redline.cli.bench.sweep_run import run

    return run(flags, plain_console())
