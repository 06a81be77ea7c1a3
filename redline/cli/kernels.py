"""`redline kernels`: compiles a model's GPU kernels ahead of a server's start, for this machine's GPU or another."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec import Meta

from redline.cli.console import plain_console
from redline.cli.flags import Argument, AtLeast1, Flag, verb
from redline.folder import check_drafter, check_model
from redline.messages.base import Record

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""GPU kernels, compiled without a GPU.

    A worker compiles its kernels at its first start, and keeps them in ~/.cache/redline and ~/.triton/cache.
    [bold]build[/bold] fills these folders before: copy both to the machines that serve, with the same versions of torch
    and Triton.""",
)


class BuildFlags(Record, frozen=True):
    """Flags of `redline kernels build`."""

    folder: Annotated[
        Path | None, Meta(description="The model's folder; config.json is enough."), Argument(check=check_model)
    ] = None
    shape: Annotated[
        str | None, Meta(description="Instead of a folder: kimi-k2.6 (or with -nvfp4 or -bf16 experts) or kimi-nano.")
    ] = None
    arch: Annotated[
        str | None,
        Meta(description="The GPU's architecture: sm_90a, sm_100a, sm_103a or sm_120a. Default: this machine's GPU."),
    ] = None
    max_running: Annotated[AtLeast1, Meta(description="As in `serve`.")] = 64
    draft: Annotated[
        Path | None, Meta(description="The drafter's folder; config.json is enough."), Flag(check=check_drafter)
    ] = None
    draft_tokens: Annotated[int, Meta(ge=0, le=15, description="As in `serve`.")] = 3
    draft_head_bits: Annotated[Literal[16, 8], Meta(description="As in `serve`.")] = 16
    max_model_len: Annotated[AtLeast1 | None, Meta(description="As in `serve`. Default: the model's longest.")] = None
    kv_dtype: Annotated[str, Meta(description="As in `serve`."), Flag(metavar="bf16|fp8")] = "bf16"
    save: Annotated[
        Path | None,
        Meta(description="JSON file for registers, spills and shared memory of each kernel; other models' rows stay."),
    ] = None


@verb(app, "build", BuildFlags)
def build(flags: BuildFlags) -> int:
    """Compile the kernels of all decode shapes and of prompts.

    Exit code 1 if a kernel needs more shared memory than the chip has.
    """
    from redline.cli.kernels_build import run

    return run(flags, plain_console())
