"""`redline bench compare`: the flags, and the config that is built from them."""

import math
import os
from typing import Annotated, Any

import msgspec
import typer

from redline.bench.serving.target import Pace, Target
from redline.cli.bench.options import (
    DatasetName,
    DatasetPath,
    ExtraBody,
    Header,
    Html,
    Insecure,
    Quiet,
    Save,
    Seed,
    Tokenizer,
    WaitingFlags,
    grouped,
    target_of,
)
from redline.cli.console import plain_console
from redline.errors import ConfigError

STREAMS, EACH = 4, 2  # default concurrent requests, and requests per load for each of them
THE_TWO = "The two servers"


def _of(side: str, what: str, metavar: str) -> Any:
    return typer.Option(metavar=metavar, help=f"{side}'s {what}", rich_help_panel=THE_TWO)


@grouped
def bench_compare(
    *,
    a: Annotated[str, typer.Argument(metavar="A", help="A server, such as http://127.0.0.1:8000.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other server.")],
    model_a: Annotated[str | None, _of("A", "model by name. Default: the first that it lists.", "NAME")] = None,
    model_b: Annotated[str | None, _of("B", "model by name. Default: the first that it lists.", "NAME")] = None,
    backend_a: Annotated[
        str | None, _of("A", "backend, such as openai-chat or openai: its API dialect.", "NAME")
    ] = None,
    backend_b: Annotated[
        str | None, _of("B", "backend, such as openai-chat or openai: its API dialect.", "NAME")
    ] = None,
    endpoint_a: Annotated[str | None, _of("A", "path. Default: the backend's path.", "PATH")] = None,
    endpoint_b: Annotated[str | None, _of("B", "path. Default: the backend's path.", "PATH")] = None,
    key_env_a: Annotated[str | None, _of("A", "API key: the environment variable that contains it.", "NAME")] = None,
    key_env_b: Annotated[str | None, _of("B", "API key: the environment variable that contains it.", "NAME")] = None,
    tokenizer: Tokenizer = None,
    header: Header = None,
    extra_body: ExtraBody = None,
    insecure: Insecure = False,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help=f"Concurrent requests. Default: {STREAMS}; with a rate: no limit.")
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Requests/s of a load. Default: send whenever --max-concurrency allows."),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help=f"Requests per load. Default: {EACH} per stream, or 10 s of the rate.")
    ] = None,
    num_warmups: Annotated[
        int | None, typer.Option(min=0, help="Warm-up requests to each server. Default: one load.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of four loads; with --until the minimum.")] = 8,
    until: Annotated[
        str | None, typer.Option(metavar="2%", help="Add blocks until the confidence interval is within ± this share.")
    ] = None,
    max_blocks: Annotated[int, typer.Option(min=1, help="With --until: maximum number of blocks.")] = 40,
    figure: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The figure for --until. Default: output_throughput; with a rate: e2el.",
        ),
    ] = None,
    dataset_name: DatasetName = "random",
    dataset_path: DatasetPath = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens per random prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens per answer to a random prompt.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(min=0.0, max=0.999, help="Lengths vary by this share, up and down.")
    ] = 0.0,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens per answer, for a dataset that is a file.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate every answer to its full length. Random prompts always do.")
    ] = False,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature. 0: greedy, so that answers can be compared too.")
    ] = 0.0,
    seed: Seed = None,
    save: Save = None,
    html: Html = None,
    disable_tqdm: Quiet = False,
    waiting: WaitingFlags,
) -> None:
    """Which of two servers is faster, by how much, with a confidence interval; and whether their answers agree.

    Both servers get the same requests in small alternating loads, so that drift of the machine or network cancels.
    """
    from redline.bench.serving.compare import FIGURES, Plan
    from redline.bench.serving.datasets import COMPLETIONS, DatasetConfig
    from redline.cli.bench import kept
    from redline.cli.bench.compare_run import CompareConfig, run

    if figure is not None and figure not in FIGURES:
        raise ConfigError(f"--figure {figure!r}: expected one of {', '.join(FIGURES)}")
    many, drawn = loads_size(num_prompts, max_concurrency, request_rate), kept.seed_of(seed)
    patience = waiting.patience

    def target(url: str, model: str | None, backend: str | None, endpoint: str | None, variable: str | None) -> Target:
        found = target_of(
            base_url=url,
            endpoint=endpoint,
            backend=backend,
            model=model,
            header=header,
            extra_body=extra_body,
            insecure=insecure,
            body={"temperature": temperature},
            patience=patience,
        )
        return found if variable is None else msgspec.structs.replace(found, key=key_of(variable))

    one = target(a, model_a, backend_a, endpoint_a, key_env_a)
    other = target(b, model_b, backend_b, endpoint_b, key_env_b)
    if (one.backend in COMPLETIONS) != (other.backend in COMPLETIONS):
        raise ConfigError(
            f"--backend-a {one.backend}, --backend-b {other.backend}: one takes plain text, the other a "
            "chat, so the two would not get the same requests; use the same kind for both"
        )
    config = CompareConfig(
        a=one,
        b=other,
        plan=Plan(
            blocks=blocks,
            until=None if until is None else share("--until", until),
            most=max(blocks, max_blocks),
            figure=figure or ("output_throughput" if request_rate is None else "e2el"),
            seed=drawn,
            scheduled=request_rate is not None,
        ),
        pace=Pace(
            rate=request_rate or math.inf,
            max_concurrency=max_concurrency or (STREAMS if request_rate is None else None),
            seed=drawn,
        ),
        dataset=DatasetConfig(
            dataset_name=kept.dataset(dataset_name),
            dataset_path=None if dataset_path is None else str(dataset_path),
            num_prompts=many,
            random_input_len=random_input_len,
            random_output_len=random_output_len,
            random_range_ratio=random_range_ratio,
            sharegpt_output_len=output_len,
            custom_output_len=output_len,
            seed=drawn,
            ignore_eos=ignore_eos or dataset_name == "random",
            backend=one.backend,
        ),
        warmups=many if num_warmups is None else num_warmups,
        temperature=temperature,
        tokenizer=tokenizer,
        ready_s=waiting.ready_check_timeout_sec,
        quiet=disable_tqdm,
        save=None if save is None else str(save),
        html=None if html is None else str(html),
    )
    raise typer.Exit(run(config, plain_console()))


def loads_size(given: int | None, streams: int | None, rate: float | None) -> int:
    """Number of requests per load."""
    if given is not None:
        return given
    return (streams or STREAMS) * EACH if rate is None else max(10, round(rate * 10))


def share(flag: str, words: str) -> float:
    """Parses a share such as 2% or 0.02. Raises ConfigError."""
    text = words.strip()
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ConfigError(f"{flag} {words!r}: expected a share such as 2% or 0.02")
    return value


def key_of(variable: str) -> str:
    """The API key in an environment variable. Raises ConfigError if it is not set or not a valid key."""
    key = os.environ.get(variable, "")
    if not key or not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"environment variable {variable}: expected the server's API key, in printable ASCII characters"
        )
    return key
