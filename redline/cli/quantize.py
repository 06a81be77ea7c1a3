"""`redline quantize` and `redline audit`: flags make a configuration; `redline.quant` does the work."""

from pathlib import Path
from typing import Annotated, Any

import typer

from redline.cli.console import plain_console, until_interrupted
from redline.cli.options import model
from redline.errors import ConfigError


def quantize(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A checkpoint's folder: INT4, FP8, bf16 or NVFP4.", callback=model)
    ],
    out: Annotated[Path, typer.Argument(metavar="DST", help="The output folder. Finished shards in it are kept.")],
    format: Annotated[
        str,
        typer.Option(
            metavar="nvfp4-modelopt|nvfp4-ct|int4|bf16", help="NVFP4 in the layout of ModelOpt or compressed-tensors."
        ),
    ] = "nvfp4-modelopt",
    level: Annotated[
        str,
        typer.Option(
            metavar="fast|search|calibrated",
            help="fast: max scaling, as in ModelOpt. search: scales with the least weight error. calibrated: the least "
            "error of each expert's outputs over texts; also writes scales for 4-bit activations.",
        ),
    ] = "search",
    also: Annotated[
        str | None,
        typer.Option(metavar="shared,dense", help="Quantise these too, besides the routed experts. Default: none."),
    ] = None,
    kv_scales: Annotated[
        bool,
        typer.Option(
            "--kv-scales",
            help="Write scales for an fp8 KV cache, from the calibration texts; vLLM then keeps its cache in fp8.",
        ),
    ] = False,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Calibration texts: a corpus of `redline draft synth`, or prompts (repeatable). Default: prompts from "
            "built-in templates. Half of the texts is held out for `redline audit`."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of calibration text.")] = 65536,
    most_weight_error: Annotated[
        float, typer.Option(help="Maximum relative error of any weight; above it the exit code is 1.")
    ] = 0.15,
    workers: Annotated[int | None, typer.Option(help="Weights computed in parallel. Default: one per core.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPUs, if there are any.")] = None,
) -> None:
    """Convert a checkpoint's format: INT4, FP8, bf16 or NVFP4 to NVFP4, INT4 or bf16, shard by shard.

    If it was stopped, the same command resumes.
    """
    import msgspec

    from redline.bench.quality.texts import read_texts
    from redline.messages.base import explained
    from redline.model.k2.config import K2Config
    from redline.quant.quantize import run
    from redline.quant.settings import QuantizeConfig
    from redline.quant.texts import CalibrationText, chosen, halves

    values: dict[str, Any] = {
        "source": str(source),
        "out": str(out),
        "format": format,
        "level": level,
        "also": tuple(filter(None, (also or "").split(","))),
        "kv_scales": kv_scales,
        "workers": workers,
        "device": device,
        "most_weight_error": most_weight_error,
    }
    try:
        config = msgspec.convert(values, QuantizeConfig)
    except msgspec.ValidationError as error:
        message, at = explained(error, QuantizeConfig)
        raise ConfigError(f"{at.removeprefix('.')}: {message}") from None
    texts: list[CalibrationText] = []
    if config.level == "calibrated":
        vocabulary = K2Config.from_folder(source).vocab_size
        texts = chosen(halves(read_texts(source, text or ()))[0], tokens, vocabulary)
    elif text:
        raise ConfigError(f"text: level {level} reads no texts; use --level calibrated")
    console = plain_console()
    raise typer.Exit(until_interrupted(lambda: run(config, console, texts), console, "run the same command to resume"))


def audit(
    a: Annotated[Path, typer.Argument(metavar="A", help="The reference checkpoint.", callback=model)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same model in another format.", callback=model)],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="A corpus of `redline draft synth`, or prompts (repeatable). Default: prompts from built-in templates."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Maximum tokens of text. 0: compare the weights only.")] = 16384,
    most_weight_error: Annotated[float, typer.Option(help="Maximum relative error of any weight.")] = 0.15,
    most_output_error: Annotated[float, typer.Option(help="Maximum relative error of any expert's output.")] = 0.25,
    most_kl: Annotated[float, typer.Option("--most-kl", help="Maximum KL of any domain, nats per token.")] = 0.05,
    least_agreement: Annotated[float, typer.Option(help="Minimum share of equal argmax tokens, any domain.")] = 0.9,
    save: Annotated[Path | None, typer.Option(help="Write the audit as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write it as one HTML page.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU, if there is one.")] = None,
) -> None:
    """Measure B's loss against A: weights, experts' outputs, next tokens by domain. Exit code 1 if over a limit."""
    from redline.cli.audit import AuditConfig, run
    from redline.quant.audit import Bounds

    bounds = Bounds(weight=most_weight_error, output=most_output_error, kl=most_kl, agreement=least_agreement)
    config = AuditConfig(
        a=a, b=b, texts=tuple(text or ()), tokens=tokens, bounds=bounds, save=save, html=html, device=device
    )
    console = plain_console()
    raise typer.Exit(until_interrupted(lambda: run(config, console), console))
