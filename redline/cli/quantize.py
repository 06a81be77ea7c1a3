"""`redline quantize` and `redline audit`: flags make a configuration; `redline.quant` does the work."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from redline.cli.console import plain_console, until_interrupted
from redline.cli.flags import Argument, AtLeast1, Flag
from redline.cli.options import Device
from redline.errors import ConfigError
from redline.folder import check_model
from redline.messages.base import Record


class QuantizeFlags(Record, frozen=True):
    """Flags of `redline quantize`."""

    source: Annotated[
        Path,
        Meta(description="A checkpoint's folder: INT4, FP8, bf16 or NVFP4."),
        Argument(metavar="SRC", check=check_model),
    ]
    out: Annotated[
        Path, Meta(description="The output folder. Finished shards in it are kept."), Argument(metavar="DST")
    ]
    format: Annotated[
        str,
        Meta(description="NVFP4 in the layout of ModelOpt or compressed-tensors."),
        Flag(metavar="nvfp4-modelopt|nvfp4-ct|int4|bf16"),
    ] = "nvfp4-modelopt"
    level: Annotated[
        str,
        Meta(
            description="fast: max scaling, as in ModelOpt. search: scales with the least weight error. calibrated: "
            "the least error of each expert's outputs over texts; also writes scales for 4-bit activations."
        ),
        Flag(metavar="fast|search|calibrated"),
    ] = "search"
    also: Annotated[
        str | None,
        Meta(description="Quantise these too, besides the routed experts. Default: none."),
        Flag(metavar="shared,dense"),
    ] = None
    kv_scales: Annotated[
        bool,
        Meta(
            description="Write scales for an fp8 KV cache, from the calibration texts; vLLM then keeps its cache in "
            "fp8."
        ),
    ] = False
    text: Annotated[
        tuple[Path, ...],
        Meta(
            description="Calibration texts: a corpus of `redline draft synth`, or prompts (repeatable). Default: "
            "prompts from built-in templates. Half of the texts is held out for `redline audit`."
        ),
    ] = ()
    tokens: Annotated[AtLeast1, Meta(description="Maximum tokens of calibration text.")] = 65536
    most_weight_error: Annotated[
        float, Meta(description="Maximum relative error of any weight; above it the exit code is 1.")
    ] = 0.15
    workers: Annotated[int | None, Meta(description="Weights computed in parallel. Default: one per core.")] = None
    device: Annotated[str | None, Meta(description="cpu or cuda. Default: the GPUs, if there are any.")] = None


def quantize(flags: QuantizeFlags) -> int:
    """Convert a checkpoint's format: INT4, FP8, bf16 or NVFP4 to NVFP4, INT4 or bf16, shard by shard.

    If it was stopped, the same command resumes.
    """
    from redline.bench.quality.texts import read_texts
    from redline.messages.base import explained
    from redline.model.k2.config import K2Config
    from redline.quant.quantize import run
    from redline.quant.settings import QuantizeConfig
    from redline.quant.texts import CalibrationText, chosen, halves

    values: dict[str, Any] = msgspec.to_builtins(flags, enc_hook=str)
    for name in ("text", "tokens"):
        del values[name]
    values["also"] = tuple(filter(None, (flags.also or "").split(",")))
    try:
        config = msgspec.convert(values, QuantizeConfig)
    except msgspec.ValidationError as error:
        message, at = explained(error, QuantizeConfig)
        raise ConfigError(f"{at.removeprefix('.')}: {message}") from None
    texts: list[CalibrationText] = []
    if config.level == "calibrated":
        vocabulary = K2Config.from_folder(flags.source).vocab_size
        texts = chosen(halves(read_texts(flags.source, flags.text))[0], flags.tokens, vocabulary)
    elif flags.text:
        raise ConfigError(f"text: level {config.level} reads no texts; use --level calibrated")
    console = plain_console()
    return until_interrupted(lambda: run(config, console, texts), console, "run the same command to resume")


class AuditConfig(Record, frozen=True):
    """The settings of `redline audit`."""

    a: Annotated[Path, Meta(description="The reference checkpoint."), Argument(check=check_model)]
    b: Annotated[Path, Meta(description="The same model in another format."), Argument(check=check_model)]
    text: Annotated[
        tuple[Path, ...],
        Meta(
            description="A corpus of `redline draft synth`, or prompts (repeatable). Default: prompts from built-in "
            "templates."
        ),
    ] = ()
    tokens: Annotated[int, Meta(ge=0, description="Maximum tokens of text. 0: compare the weights only.")] = 16384
    most_weight_error: Annotated[float, Meta(description="Maximum relative error of any weight.")] = 0.15
    most_output_error: Annotated[float, Meta(description="Maximum relative error of any expert's output.")] = 0.25
    most_kl: Annotated[float, Meta(description="Maximum KL of any domain, nats per token.")] = 0.05
    least_agreement: Annotated[float, Meta(description="Minimum share of equal argmax tokens, any domain.")] = 0.9
    save: Annotated[Path | None, Meta(description="Write the audit as JSON.")] = None
    html: Annotated[Path | None, Meta(description="Write it as one HTML page.")] = None
    device: Device = None


def audit(config: AuditConfig) -> int:
    """Measure B's loss against A: weights, experts' outputs, next tokens by domain. Exit code 1 if over a limit."""
    from redline.cli.audit import run

    console = plain_console()
    return until_interrupted(lambda: run(config, console), console)
