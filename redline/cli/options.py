"""Arguments and words of help that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

SYNTHETIC = (
    "For benchmarks: drafting and verifying run in full, and a draw says how many drafts hold. 0.83,0.6,0.45: the "
    "share of rounds in which the first 1, 2, 3 all hold; 2.88: the mean tokens of a round. Answers are not the "
    "model's, so a server listens on this machine alone. Absent: drafts are verified."
)
Folder = Annotated[Path, typer.Argument(help="A checkpoint's folder: config.json, *.safetensors, tiktoken.model.")]
