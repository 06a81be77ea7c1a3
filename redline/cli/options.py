"""Arguments and help texts shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Meta

from redline.cli.flags import Argument, Flag
from redline.folder import check_drafter, check_model
from redline.worker import config

SYNTHETIC = f"{config.SYNTHETIC} Default: real verification."


def model(context: typer.Context, folder: Path | None) -> Path | None:
    """Callback of an argument: checks that the folder contains a model, before torch is imported."""
    if folder is not None and not context.resilient_parsing:
        check_model(folder)
    return folder


def drafter(context: typer.Context, folder: Path | None) -> Path | None:
    """As `model`, for a drafter's folder."""
    if folder is not None and not context.resilient_parsing:
        check_drafter(folder)
    return folder


Folder = Annotated[
    Path, typer.Argument(help="A checkpoint's folder: config.json, *.safetensors, tiktoken.model.", callback=model)
]
Drafter = Annotated[Path, typer.Option(help="The drafter's folder.", callback=drafter)]
ModelFolder = Annotated[
    Path,
    Meta(description="A checkpoint's folder: config.json, *.safetensors, tiktoken.model."),
    Argument(check=check_model),
]
DrafterFolder = Annotated[Path, Meta(description="The drafter's folder."), Flag(check=check_drafter)]
Device = Annotated[str | None, Meta(description="cpu or cuda. Default: the GPU, if there is one.")]
