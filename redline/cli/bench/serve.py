"""`redline bench serve`: the flags of `vllm bench serve`, and the config that is built from them."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from redline.bench.serving.target import Ramp
from redline.cli.bench.options import (
    SERVER,
    BaseUrl,
    Quiet,
    ServerFlags,
    WaitingFlags,
    choices,
    goals,
    grouped,
    pairs,
    percentiles,
)
from redline.cli.console import plain_console
from redline.errors import ConfigError

DATA, TRAFFIC, SAMPLING, RESULT = "Dataset", "Traffic", "Sampling", "Output"


@grouped
def bench_serve(
    *,
    base_url: BaseUrl = None,
    server: ServerFlags,
    skip_tokenizer_init: Annotated[
        bool,
        typer.Option(
            "--skip-tokenizer-init",
            help="Load no tokenizer; use the token counts that the server reports.",
            rich_help_panel=SERVER,
        ),
    ] = False,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A known setting, such as lambda or chat; other flags override it.",
            rich_help_panel=DATA,
        ),
    ] = None,
    dataset_name: Annotated[
        str | None,
        typer.Option(
            metavar="random|sharegpt|custom|prefix_repetition|redline",
            help="Dataset of the prompts. Default: random.",
            rich_help_panel=DATA,
        ),
    ] = None,
    dataset_path: Annotated[
        str | None, typer.Option(metavar="FILE", help="File of the dataset.", rich_help_panel=DATA)
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Number of requests. Default: 1000.", rich_help_panel=DATA)
    ] = None,
    input_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per prompt: another name for --random-input-len.", rich_help_panel=DATA),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens per answer, for any dataset.", rich_help_panel=DATA),
    ] = None,
    random_input_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens per random prompt. Default: 1024.", rich_help_panel=DATA)
    ] = None,
    random_output_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per answer to a random prompt. Default: 128.", rich_help_panel=DATA),
    ] = None,
    random_range_ratio: Annotated[
        float | None,
        typer.Option(min=0, help="Lengths are uniform in L (1 - R) to L (1 + R). Default: 0.", rich_help_panel=DATA),
    ] = None,
    random_prefix_len: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens of a prefix that all random prompts share. Default: 0.", rich_help_panel=DATA),
    ] = None,
    sharegpt_output_len: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens per answer. Default: the length of the answer in the file.", rich_help_panel=DATA
        ),
    ] = None,
    custom_output_len: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens per answer. Default: the length given in the line, else 256.", rich_help_panel=DATA
        ),
    ] = None,
    prefix_repetition_prefix_len: Annotated[
        int | None, typer.Option(min=0, help="Tokens per shared prefix. Default: 256.", rich_help_panel=DATA)
    ] = None,
    prefix_repetition_suffix_len: Annotated[
        int | None, typer.Option(min=0, help="Tokens after the prefix. Default: 256.", rich_help_panel=DATA)
    ] = None,
    prefix_repetition_num_prefixes: Annotated[
        int | None, typer.Option(min=1, help="Number of prefixes. Default: 10.", rich_help_panel=DATA)
    ] = None,
    prefix_repetition_output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens per answer. Default: 128.", rich_help_panel=DATA)
    ] = None,
    no_oversample: Annotated[
        bool,
        typer.Option(
            "--no-oversample",
            help="Send no prompt of a file twice, even if the file has too few.",
            rich_help_panel=DATA,
        ),
    ] = False,
    skip_chat_template: Annotated[
        bool,
        typer.Option(
            "--skip-chat-template",
            help="Accepted and ignored: this client never applies a chat template.",
            rich_help_panel=DATA,
        ),
    ] = False,
    disable_shuffle: Annotated[
        bool, typer.Option("--disable-shuffle", help="Send prompts in the order of the file.", rich_help_panel=DATA)
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of prompts and arrival times. Default: 0.", rich_help_panel=DATA)
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Mean requests/s. inf: send as soon as --max-concurrency allows. Default: inf.",
            rich_help_panel=TRAFFIC,
        ),
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(
            min=0, help="1: a Poisson process; less: bursts; more: an even rate. Default: 1.", rich_help_panel=TRAFFIC
        ),
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Maximum concurrent requests. Default: no limit.", rich_help_panel=TRAFFIC)
    ] = None,
    ramp_up_strategy: Annotated[
        str | None,
        typer.Option(metavar="linear|exponential", help="A rate that changes over the run.", rich_help_panel=TRAFFIC),
    ] = None,
    ramp_up_start_rps: Annotated[
        float | None, typer.Option(min=0, help="Requests/s at the start of the ramp.", rich_help_panel=TRAFFIC)
    ] = None,
    ramp_up_end_rps: Annotated[
        float | None, typer.Option(min=0, help="Requests/s at the end of the ramp.", rich_help_panel=TRAFFIC)
    ] = None,
    num_warmups: Annotated[
        int | None, typer.Option(min=0, help="Warm-up requests, which are not measured.", rich_help_panel=TRAFFIC)
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="S",
            help="End the run after this many seconds and report the answers received so far.",
            rich_help_panel=TRAFFIC,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Generate every answer to its full length. Random prompts always do.",
            rich_help_panel=SAMPLING,
        ),
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Default: the server's own.", rich_help_panel=SAMPLING)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Default: the server's own.", rich_help_panel=SAMPLING)
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Default: the server's own.", rich_help_panel=SAMPLING)] = None,
    min_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Default: the server's own.", rich_help_panel=SAMPLING)
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Default: the server's own.", rich_help_panel=SAMPLING)
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Default: the server's own.", rich_help_panel=SAMPLING)
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Default: the server's own.", rich_help_panel=SAMPLING)
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="Number of log probabilities per token.", rich_help_panel=SAMPLING)
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="SLO targets that a good request meets: ttft:500 tpot:20 e2el:10000.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    percentile_metrics: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Latencies to report, comma-separated. Default: all that apply.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    metric_percentiles: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Percentiles to report, comma-separated.", rich_help_panel=RESULT)
    ] = "50,90,99",
    save_result: Annotated[
        bool,
        typer.Option("--save-result", help="Write the result as JSON, with a row per request.", rich_help_panel=RESULT),
    ] = False,
    save_detailed: Annotated[
        bool,
        typer.Option("--save-detailed", help="Save texts and vLLM's per-request lists too.", rich_help_panel=RESULT),
    ] = False,
    result_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of the result. Default: the current one.", rich_help_panel=RESULT),
    ] = None,
    result_filename: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Name of the result file. Default: made of label, rate, model and time.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with tables and plots.", rich_help_panel=RESULT)
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="A name for this run. Default: the backend.", rich_help_panel=RESULT)
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Saved in the result (repeatable).", rich_help_panel=RESULT),
    ] = None,
    disable_tqdm: Quiet = False,
    waiting: WaitingFlags,
) -> None:
    """Throughput and latencies of any OpenAI server, over HTTP. Flags and results are those of `vllm bench serve`.

    Reports TTFT, TPOT, ITL and E2EL with mean, median and percentiles; thinking and answer separately; the server's
    token counts compared with its stream; and the load of this client. The API key is read from OPENAI_API_KEY or
    REDLINE_API_KEY.
    """
    from redline.bench.serving.metrics import NAMES, SLOS
    from redline.bench.serving.presets import with_preset
    from redline.cli.bench.serve_run import ServeConfig
    from redline.cli.bench.serve_run import bench_serve as measure

    asked = {
        "dataset_name": dataset_name,
        "dataset_path": dataset_path,
        "num_prompts": num_prompts,
        "random_input_len": random_input_len or input_len,
        "random_output_len": random_output_len or output_len,
        "random_range_ratio": random_range_ratio,
        "random_prefix_len": random_prefix_len,
        "sharegpt_output_len": sharegpt_output_len or output_len,
        "custom_output_len": custom_output_len or output_len,
        "prefix_repetition_prefix_len": prefix_repetition_prefix_len,
        "prefix_repetition_suffix_len": prefix_repetition_suffix_len,
        "prefix_repetition_num_prefixes": prefix_repetition_num_prefixes,
        "prefix_repetition_output_len": prefix_repetition_output_len or output_len,
        "seed": seed,
        "ignore_eos": ignore_eos or (preset is None and dataset_name in (None, "random")) or None,
        "disable_shuffle": disable_shuffle or None,
        "no_oversample": no_oversample or None,
    }
    paced = {
        "rate": request_rate,
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
        "ramp": ramp_of(ramp_up_strategy, ramp_up_start_rps, ramp_up_end_rps, request_rate),
        "warmups": num_warmups,
        "deadline": max_seconds,
        "seed": seed,
    }
    for flag, number in (("--request-rate", request_rate), ("--burstiness", burstiness)):
        if number is not None and not number > 0:  # NaN neither
            raise ConfigError(f"{flag} {number:g}: expected a number above 0, or inf")
    if dataset_path is not None and dataset_name in (None, "random", "prefix_repetition"):
        raise ConfigError(f"--dataset-path {dataset_path}: which --dataset-name is it, sharegpt, custom or redline?")
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "logprobs": logprobs,
    }
    target = server.target(
        base_url,
        waiting.patience,
        body=given(sampling),
        otherwise="openai-chat" if dataset_name == "redline" else "openai",
    )
    dataset, pace = with_preset(preset, {**given(asked), "backend": target.backend}, given(paced))
    config = ServeConfig(
        target=target,
        pace=pace,
        dataset=dataset,
        model=server.model,
        tokenizer=None if skip_tokenizer_init else server.vocabulary,
        goodput=goals(goodput or (), SLOS),
        latencies=choices("--percentile-metrics", percentile_metrics, NAMES),
        percentiles=percentiles(metric_percentiles),
        ready_s=waiting.ready_check_timeout_sec,
        quiet=disable_tqdm,
        label=label,
        metadata=pairs("--metadata", metadata or ()),
        save=save_result or save_detailed or result_filename is not None,
        detailed=save_detailed,
        folder="" if result_dir is None else str(result_dir),
        filename=result_filename,
        html=None if html is None else str(html),
    )
    raise typer.Exit(measure(config, plain_console()))


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given."""
    return {name: value for name, value in flags.items() if value is not None}


def ramp_of(strategy: str | None, start: float | None, end: float | None, rate: float | None) -> Ramp | None:
    """A ramp from its three flags: all or none of them must be given. Raises ConfigError."""
    if strategy is None:
        if start is not None or end is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear|exponential")
        return None
    if strategy not in ("linear", "exponential"):
        raise ConfigError(f"--ramp-up-strategy {strategy!r}: expected linear or exponential")
    if rate is not None and rate < math.inf:
        raise ConfigError("--ramp-up-strategy sets the rate; leave --request-rate out")
    if start is None or end is None:
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if end < start or not end or (strategy == "exponential" and not start):
        raise ConfigError(
            f"--ramp-up-start-rps {start:g}, --ramp-up-end-rps {end:g}: a ramp must go up, and an exponential "
            "ramp must start above 0"
        )
    return Ramp(strategy=strategy, start=start, end=end)
