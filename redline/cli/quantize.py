"""`redline quantize`: flags become a configuration; `redline.quant` does the work."""

from pathlib import Path
from typing import Annotated, Any

import typer

from redline.cli.console import plain_console, until_interrupted
from redline.errors import ConfigError


def quantize(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint's folder: INT4, FP8 or bf16.")],
    out: Annotated[Path, typer.Argument(metavar="DST", help="The folder that is written. What it holds is kept.")],
    format: Annotated[
        str,
        typer.Option(
            metavar="nvfp4-modelopt|nvfp4-ct|int4|bf16", help="NVFP4 as ModelOpt or as compressed-tensors lays it out."
        ),
    ] = "nvfp4-modelopt",
    level: Annotated[
        str,
        typer.Option(
            metavar="fast|search", help="fast: max scaling, as ModelOpt. search: the scales with the least error."
        ),
    ] = "search",
    also: Annotated[
        str | None,
        typer.Option(metavar="shared,dense", help="What is quantised beside the routed experts. Absent: nothing."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Weights computed side by side. Absent: one a core.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Absent: the GPUs, if there are any.")] = None,
) -> None:
    """A checkpoint in another format: INT4, FP8 or bf16 to NVFP4, INT4 or bf16, shard by shard.

    The same command goes on where it was stopped.
    """
    import msgspec

    from redline.quant.quantize import run
    from redline.quant.settings import QuantizeConfig

    values: dict[str, Any] = {
        "source": str(source),
        "out": str(out),
        "format": format,
        "level": level,
        "also": tuple(filter(None, (also or "").split(","))),
        "workers": workers,
        "device": device,
    }
    try:
        config = msgspec.convert(values, QuantizeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    console = plain_console()
    raise typer.Exit(until_interrupted(lambda: run(config, console), console, "the same command goes on"))
