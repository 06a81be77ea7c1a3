"""Arguments and words of help that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

from redline.folder import check_drafter, check_model

SYNTHETIC = (
    "For benchmarks: drafting and verifying run in full, and a draw says how many drafts hold. 0.83,0.6,0.45: the "
    "share of rounds in which the first 1, 2, 3 all hold; 2.88: the mean tokens of a round. Answers are not the "
    "model's, so a server listens on this machine alone. Absent: drafts are verified."
)


def model(context: typer.Context, folder: Path | None) -> Path | None:
    """A callback of an argument: a folder that holds no model is named as what it is, before torch is imported."""
    if folder is not None and not context.resilient_parsing:
        check_model(folder)
    return folder


def geometry(context: typer.Context, folder: Path | None) -> Path | None:
    """As `model`, where config.json alone is enough."""
    if folder is not None and not context.resilient_parsing:
        check_model(folder, weights=False)
    return folder


def drafter(context: typer.Context, folder: Path | None) -> Path | None:
    """As `model`, of a drafter's folder."""
    if folder is not None and not context.resilient_parsing:
        check_drafter(folder)
    return folder


Folder = Annotated[
    Path, typer.Argument(help="A checkpoint's folder: config.json, *.safetensors, tiktoken.model.", callback=model)
]
Drafter = Annotated[Path, typer.Option(help="The drafter's folder.", callback=drafter)]
