"""`redline bench serve`: the flags of `vllm bench serve`."""

import math
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from redline.bench.serving.target import Ramp, ServerTarget
from redline.cli.bench.options import (
    OUTPUT,
    SERVER,
    BaseUrl,
    Goodput,
    Html,
    NotNegative,
    Positive,
    Quiet,
    ServerFlags,
    WaitingFlags,
)
from redline.cli.console import plain_console
from redline.cli.flags import AtLeast1, Flag
from redline.errors import ConfigError
from redline.messages.base import Record

DATA, TRAFFIC, SAMPLING, RESULT = (Flag(panel=name) for name in ("Dataset", "Traffic", "Sampling", OUTPUT))
AtLeast0 = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
OWN = Meta(description="Default: the server's own.")


class DataFlags(Record, frozen=True):
    """The prompts. Every default is None, or false: a preset applies where no flag is given."""

    preset: Annotated[
        str | None,
        Meta(description="A known setting, such as lambda or chat; other flags override it."),
        Flag(metavar="NAME", panel="Dataset"),
    ] = None
    dataset_name: Annotated[
        str | None,
        Meta(description="Dataset of the prompts. Default: random."),
        Flag(metavar="random|sharegpt|custom|prefix_repetition|redline", panel="Dataset"),
    ] = None
    dataset_path: Annotated[
        str | None, Meta(description="File of the dataset."), Flag(metavar="FILE", panel="Dataset")
    ] = None
    num_prompts: Annotated[AtLeast1 | None, Meta(description="Number of requests. Default: 1000."), DATA] = None
    input_len: Annotated[
        AtLeast1 | None, Meta(description="Tokens per prompt: another name for --random-input-len."), DATA
    ] = None
    output_len: Annotated[AtLeast1 | None, Meta(description="Maximum tokens per answer, for any dataset."), DATA] = None
    random_input_len: Annotated[AtLeast1 | None, Meta(description="Tokens per random prompt. Default: 1024."), DATA] = (
        None
    )
    random_output_len: Annotated[
        AtLeast1 | None, Meta(description="Tokens per answer to a random prompt. Default: 128."), DATA
    ] = None
    random_range_ratio: Annotated[
        NotNegative | None, Meta(description="Lengths are uniform in L (1 - R) to L (1 + R). Default: 0."), DATA
    ] = None
    random_prefix_len: Annotated[
        AtLeast0 | None, Meta(description="Tokens of a prefix that all random prompts share. Default: 0."), DATA
    ] = None
    sharegpt_output_len: Annotated[
        AtLeast1 | None, Meta(description="Tokens per answer. Default: the length of the answer in the file."), DATA
    ] = None
    custom_output_len: Annotated[
        AtLeast1 | None, Meta(description="Tokens per answer. Default: the length given in the line, else 256."), DATA
    ] = None
    prefix_repetition_prefix_len: Annotated[
        AtLeast0 | None, Meta(description="Tokens per shared prefix. Default: 256."), DATA
    ] = None
    prefix_repetition_suffix_len: Annotated[
        AtLeast0 | None, Meta(description="Tokens after the prefix. Default: 256."), DATA
    ] = None
    prefix_repetition_num_prefixes: Annotated[
        AtLeast1 | None, Meta(description="Number of prefixes. Default: 10."), DATA
    ] = None
    prefix_repetition_output_len: Annotated[
        AtLeast1 | None, Meta(description="Tokens per answer. Default: 128."), DATA
    ] = None
    no_oversample: Annotated[
        bool, Meta(description="Send no prompt of a file twice, even if the file has too few."), DATA
    ] = False
    skip_chat_template: Annotated[
        bool, Meta(description="Accepted and ignored: this client never applies a chat template."), DATA
    ] = False
    disable_shuffle: Annotated[bool, Meta(description="Send prompts in the order of the file."), DATA] = False
    seed: Annotated[AtLeast0 | None, Meta(description="Seed of prompts and arrival times. Default: 0."), DATA] = None
    ignore_eos: Annotated[
        bool, Meta(description="Generate every answer to its full length. Random prompts always do."), SAMPLING
    ] = False

    def fields(self) -> dict[str, Any]:
        """The fields of a `DatasetConfig` that the flags set."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__}
        for name in ("preset", "input_len", "output_len", "skip_chat_template"):
            del found[name]
        found["random_input_len"] = self.random_input_len or self.input_len
        for name in ("random", "sharegpt", "custom", "prefix_repetition"):
            found[f"{name}_output_len"] = found[f"{name}_output_len"] or self.output_len
        found["ignore_eos"] = self.ignore_eos or (self.preset is None and self.dataset_name in (None, "random"))
        return {name: value for name, value in found.items() if value is not None and value is not False}


class TrafficFlags(Record, frozen=True):
    """When requests are sent."""

    request_rate: Annotated[
        NotNegative | None,
        Meta(description="Mean requests/s. inf: send as soon as --max-concurrency allows. Default: inf."),
        TRAFFIC,
    ] = None
    burstiness: Annotated[
        NotNegative | None,
        Meta(description="1: a Poisson process; less: bursts; more: an even rate. Default: 1."),
        TRAFFIC,
    ] = None
    max_concurrency: Annotated[
        AtLeast1 | None, Meta(description="Maximum concurrent requests. Default: no limit."), TRAFFIC
    ] = None
    ramp_up_strategy: Annotated[
        str | None,
        Meta(description="A rate that changes over the run."),
        Flag(metavar="linear|exponential", panel="Traffic"),
    ] = None
    ramp_up_start_rps: Annotated[
        NotNegative | None, Meta(description="Requests/s at the start of the ramp."), TRAFFIC
    ] = None
    ramp_up_end_rps: Annotated[NotNegative | None, Meta(description="Requests/s at the end of the ramp."), TRAFFIC] = (
        None
    )
    num_warmups: Annotated[AtLeast0 | None, Meta(description="Warm-up requests, which are not measured."), TRAFFIC] = (
        None
    )
    max_seconds: Annotated[
        Positive | None,
        Meta(description="End the run after this many seconds and report the answers received so far."),
        Flag(metavar="S", panel="Traffic"),
    ] = None

    def fields(self, seed: int | None) -> dict[str, Any]:
        """The fields of a `Pace` that the flags set. Raises ConfigError for flags that contradict each other."""
        for flag, number in (("--request-rate", self.request_rate), ("--burstiness", self.burstiness)):
            if number is not None and not number > 0:  # NaN neither
                raise ConfigError(f"{flag} {number:g}: expected a number above 0, or inf")
        found: dict[str, Any] = {
            "rate": self.request_rate,
            "burstiness": self.burstiness,
            "max_concurrency": self.max_concurrency,
            "ramp": self._ramp(),
            "warmups": self.num_warmups,
            "deadline": self.max_seconds,
            "seed": seed,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _ramp(self) -> Ramp | None:
        strategy, start, end = self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps
        if strategy is None:
            if start is not None or end is not None:
                raise ConfigError(
                    "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear|exponential"
                )
            return None
        if strategy not in ("linear", "exponential"):
            raise ConfigError(f"--ramp-up-strategy {strategy!r}: expected linear or exponential")
        if self.request_rate is not None and self.request_rate < math.inf:
            raise ConfigError("--ramp-up-strategy sets the rate; leave --request-rate out")
        if start is None or end is None:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        if end < start or not end or (strategy == "exponential" and not start):
            raise ConfigError(
                f"--ramp-up-start-rps {start:g}, --ramp-up-end-rps {end:g}: a ramp must go up, and an exponential "
                "ramp must start above 0"
            )
        return Ramp(strategy=strategy, start=start, end=end)


class SamplingFlags(Record, frozen=True):
    """Fields of every request's body; None: left out."""

    temperature: Annotated[NotNegative | None, OWN, SAMPLING] = None
    top_p: Annotated[Share | None, OWN, SAMPLING] = None
    top_k: Annotated[int | None, OWN, SAMPLING] = None
    min_p: Annotated[Share | None, OWN, SAMPLING] = None
    frequency_penalty: Annotated[float | None, OWN, SAMPLING] = None
    presence_penalty: Annotated[float | None, OWN, SAMPLING] = None
    repetition_penalty: Annotated[float | None, OWN, SAMPLING] = None
    logprobs: Annotated[AtLeast0 | None, Meta(description="Number of log probabilities per token."), SAMPLING] = None


class ServeBenchFlags(Record, frozen=True):
    """The flags of `redline bench serve`."""

    base_url: BaseUrl = None
    server: ServerFlags = ServerFlags()
    skip_tokenizer_init: Annotated[
        bool, Meta(description="Load no tokenizer; use the token counts that the server reports."), SERVER
    ] = False
    data: DataFlags = DataFlags()
    traffic: TrafficFlags = TrafficFlags()
    sampling: SamplingFlags = SamplingFlags()
    goodput: Goodput = ()
    percentile_metrics: Annotated[
        str | None,
        Meta(description="Latencies to report, comma-separated. Default: all that apply."),
        Flag(metavar="NAMES", panel=OUTPUT),
    ] = None
    metric_percentiles: Annotated[
        str,
        Meta(description="Percentiles to report, comma-separated."),
        Flag(metavar="NUMBERS", panel=OUTPUT),
    ] = "50,90,99"
    save_result: Annotated[bool, Meta(description="Write the result as JSON, with a row per request."), RESULT] = False
    save_detailed: Annotated[bool, Meta(description="Save texts and vLLM's per-request lists too."), RESULT] = False
    result_dir: Annotated[
        Path,
        Meta(description="Folder of the result. Default: the current one."),
        Flag(metavar="FOLDER", panel=OUTPUT),
    ] = Path()
    result_filename: Annotated[
        str | None,
        Meta(description="Name of the result file. Default: made of label, rate, model and time."),
        Flag(metavar="FILE", panel=OUTPUT),
    ] = None
    html: Html = None
    label: Annotated[str | None, Meta(description="A name for this run. Default: the backend."), RESULT] = None
    metadata: Annotated[
        tuple[str, ...],
        Meta(description="Saved in the result (repeatable)."),
        Flag(metavar="KEY=VALUE", panel=OUTPUT),
    ] = ()
    disable_tqdm: Quiet = False
    waiting: WaitingFlags = WaitingFlags()

    @property
    def target(self) -> ServerTarget:
        """The server, with the fields that the flags add to every body. Raises ConfigError."""
        sampling = {name: getattr(self.sampling, name) for name in self.sampling.__struct_fields__}
        return self.server.target(
            self.base_url,
            self.waiting.patience,
            body={name: value for name, value in sampling.items() if value is not None},
            otherwise="openai-chat" if self.data.dataset_name == "redline" else "openai",
        )


def bench_serve(flags: ServeBenchFlags) -> int:
    """Throughput and latencies of any OpenAI server, over HTTP. Flags and results are those of `vllm bench serve`.

    Reports TTFT, TPOT, ITL and E2EL with mean, median and percentiles; thinking and answer separately; the server's
    token counts compared with its stream; and the load of this client. The API key is read from OPENAI_API_KEY or
    REDLINE_API_KEY.
    """
    from redline.cli.bench.serve_run import run

    return run(flags, plain_console())
