"""`redline bench accept`: its flags."""

from typing import Annotated

from msgspec import Meta

from redline.cli.bench.options import (
    DatasetName,
    DatasetPath,
    Html,
    IgnoreEosIfServed,
    NotNegative,
    Quiet,
    RandomSeed,
    Save,
    ServerFlags,
    WaitingFlags,
)
from redline.cli.console import plain_console
from redline.cli.flags import AtLeast1, Flag
from redline.messages.base import Record


class AcceptFlags(Record, frozen=True):
    """The flags of `redline bench accept`."""

    base_url: Annotated[
        tuple[str, ...],
        Meta(description="The server; repeat it to put several on one page, such as one per k."),
        Flag(metavar="URL", panel="Server"),
    ] = ()
    server: ServerFlags = ServerFlags()
    metrics_url: Annotated[
        str | None,
        Meta(description="Address of /metrics, if it differs from the API's."),
        Flag(metavar="URL", panel="Server"),
    ] = None
    dataset_name: DatasetName = "redline"
    dataset_path: DatasetPath = None
    domain: Annotated[
        tuple[str, ...], Meta(description="Only this domain of the prompts (repeatable). Default: all.")
    ] = ()
    num_prompts: Annotated[AtLeast1, Meta(description="At most this many prompts per domain.")] = 16
    output_len: Annotated[int, Meta(ge=2, description="Maximum tokens per answer.")] = 256
    temperature: Annotated[
        tuple[NotNegative, ...], Meta(description="Sampling temperature (repeatable). Default: 0, greedy.")
    ] = (0.0,)
    max_concurrency: Annotated[AtLeast1, Meta(description="Maximum concurrent requests.")] = 1
    ignore_eos: IgnoreEosIfServed = False
    seed: RandomSeed = 0
    save: Save = None
    html: Html = None
    disable_tqdm: Quiet = False
    waiting: WaitingFlags = WaitingFlags()


def bench_accept(flags: AcceptFlags) -> int:
    """Acceptance of draft tokens by position and by domain, and tokens per round by k next to the golden curve.

    Computed from the counters in the server's /metrics before and after each domain. The server should have no other
    traffic during the run.
    """
    from redline.cli.bench.accept_run import run

    return run(flags, plain_console())
