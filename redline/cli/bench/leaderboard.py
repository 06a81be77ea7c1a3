"""`redline bench leaderboard`: its flags."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from redline.cli.bench.options import (
    BaseUrl,
    Html,
    IgnoreEosIfServed,
    Quiet,
    RandomSeed,
    Save,
    ServerFlags,
    Temperature,
    WaitingFlags,
)
from redline.cli.console import plain_console
from redline.cli.flags import AtLeast1, Flag
from redline.messages.base import Record


class LeaderboardFlags(Record, frozen=True):
    """The flags of `redline bench leaderboard`. input_len, output_len: override the preset, if given."""

    base_url: BaseUrl = None
    server: ServerFlags = ServerFlags()
    workload: Annotated[
        tuple[str, ...],
        Meta(description="Input and output tokens. Default: 10k/1.5k."),
        Flag(metavar="100/300|1k/1k|10k/1.5k|100k/2k|all"),
    ] = ()
    input_len: Annotated[AtLeast1 | None, Meta(description="Tokens per prompt, instead of the preset's.")] = None
    output_len: Annotated[
        Annotated[int, Meta(ge=2)] | None, Meta(description="Maximum tokens per answer, instead of the preset's.")
    ] = None
    parallel: Annotated[
        tuple[AtLeast1, ...],
        Meta(description="Concurrent prompts (repeatable). Default: 1; the leaderboard's other setting is 10."),
    ] = (1,)
    runs: Annotated[AtLeast1, Meta(description="Number of runs, each with new prompts.")] = 8  # as many a day
    num_warmups: Annotated[int, Meta(ge=0, description="Warm-up requests, which are not measured.")] = 1
    ignore_eos: IgnoreEosIfServed = False
    temperature: Temperature = None
    o200k: Annotated[
        Path | None,
        Meta(
            description="o200k_base.tiktoken, to report figures in its tokens too. Default: the file in tiktoken's "
            "cache."
        ),
        Flag(metavar="FILE"),
    ] = None
    seed: RandomSeed = None
    save: Save = None
    html: Html = None
    disable_tqdm: Quiet = False
    waiting: WaitingFlags = WaitingFlags()


def bench_leaderboard(flags: LeaderboardFlags) -> int:
    """Checks a leaderboard's claim: TTFT, first answer token, output speed, end to end for 500 tokens; P50 of runs.

    Artificial Analysis' protocol: 10,000 tokens in, 1,500 out, one prompt at a time, none sent twice. Differences from
    the leaderboard's own setting are reported with the figures.
    """
    from redline.cli.bench.leaderboard_run import run

    return run(flags, plain_console())
