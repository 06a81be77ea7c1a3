"""`redline bench compare`: its flags."""

from typing import Annotated, Any

from msgspec import Meta

from redline.cli.bench.options import (
    DatasetName,
    DatasetPath,
    ExtraBody,
    Header,
    Html,
    IgnoreEos,
    Insecure,
    NotNegative,
    Positive,
    Quiet,
    RandomSeed,
    Save,
    Tokenizer,
    WaitingFlags,
)
from redline.cli.console import plain_console
from redline.cli.flags import Argument, AtLeast1, Flag
from redline.messages.base import Record

STREAMS, EACH = 4, 2  # default concurrent requests, and requests per load for each of them


def _of(what: str) -> Any:
    return Meta(description=what)


_NAME, _PATH = (Flag(metavar=metavar, panel="The two servers") for metavar in ("NAME", "PATH"))


class CompareFlags(Record, frozen=True):
    """The flags of `redline bench compare`."""

    a: Annotated[str, _of("A server, such as http://127.0.0.1:8000."), Argument(metavar="A")]
    b: Annotated[str, _of("The other server."), Argument(metavar="B")]
    model_a: Annotated[str | None, _of("A's model by name. Default: the first that it lists."), _NAME] = None
    model_b: Annotated[str | None, _of("B's model by name. Default: the first that it lists."), _NAME] = None
    backend_a: Annotated[str | None, _of("A's backend, such as openai-chat or openai: its API dialect."), _NAME] = None
    backend_b: Annotated[str | None, _of("B's backend, such as openai-chat or openai: its API dialect."), _NAME] = None
    endpoint_a: Annotated[str | None, _of("A's path. Default: the backend's path."), _PATH] = None
    endpoint_b: Annotated[str | None, _of("B's path. Default: the backend's path."), _PATH] = None
    key_env_a: Annotated[str | None, _of("A's API key: the environment variable that contains it."), _NAME] = None
    key_env_b: Annotated[str | None, _of("B's API key: the environment variable that contains it."), _NAME] = None
    tokenizer: Tokenizer = None
    header: Header = ()
    extra_body: ExtraBody = None
    insecure: Insecure = False
    max_concurrency: Annotated[
        AtLeast1 | None, _of(f"Concurrent requests. Default: {STREAMS}; with a rate: no limit.")
    ] = None
    request_rate: Annotated[
        Positive | None, _of("Requests/s of a load. Default: send whenever --max-concurrency allows.")
    ] = None
    num_prompts: Annotated[
        AtLeast1 | None, _of(f"Requests per load. Default: {EACH} per stream, or 10 s of the rate.")
    ] = None
    num_warmups: Annotated[
        Annotated[int, Meta(ge=0)] | None, _of("Warm-up requests to each server. Default: one load.")
    ] = None
    blocks: Annotated[AtLeast1, _of("Blocks of four loads; with --until the minimum.")] = 8
    until: Annotated[
        str | None,
        _of("Add blocks until the confidence interval is within ± this share."),
        Flag(metavar="2%"),
    ] = None
    max_blocks: Annotated[AtLeast1, _of("With --until: maximum number of blocks.")] = 40
    figure: Annotated[
        str | None,
        _of("The figure for --until. Default: output_throughput; with a rate: e2el."),
        Flag(metavar="NAME"),
    ] = None
    dataset_name: DatasetName = "random"
    dataset_path: DatasetPath = None
    random_input_len: Annotated[AtLeast1, _of("Tokens per random prompt.")] = 1024
    random_output_len: Annotated[AtLeast1, _of("Tokens per answer to a random prompt.")] = 128
    random_range_ratio: Annotated[
        float, Meta(ge=0, le=0.999, description="Lengths vary by this share, up and down.")
    ] = 0.0
    output_len: Annotated[AtLeast1 | None, _of("Maximum tokens per answer, for a dataset that is a file.")] = None
    ignore_eos: IgnoreEos = False
    temperature: Annotated[
        NotNegative, _of("Sampling temperature. 0: greedy, so that answers can be compared too.")
    ] = 0.0
    seed: RandomSeed = None
    save: Save = None
    html: Html = None
    disable_tqdm: Quiet = False
    waiting: WaitingFlags = WaitingFlags()

    @property
    def size(self) -> int:
        """Number of requests per load."""
        if self.num_prompts is not None:
            return self.num_prompts
        streams, rate = self.max_concurrency or STREAMS, self.request_rate
        return streams * EACH if rate is None else max(10, round(rate * 10))


def bench_compare(flags: CompareFlags) -> int:
    """Which of two servers is faster, by how much, with a confidence interval; and whether their answers agree.

    Both servers get the same requests in small alternating loads, so that drift of the machine or network cancels.
    """
    from redline.cli.bench.compare_run import run

    return run(flags, plain_console())
