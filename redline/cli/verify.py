"""`redline verify`: flags make the checks of a folder or of a server; the verdict is printed first."""

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.console import plain_console, until_interrupted
from redline.errors import ConfigError


def verify(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="A checkpoint's folder. Default: check a server.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="An OpenAI server to check for valid tool calls, with --requests.")
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(help="JSON lines, each a request with `messages` and `tools`, as in Moonshot's vendor verifier."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The server's model. Default: the first it lists.")] = None,
    key: Annotated[str | None, typer.Option(envvar="REDLINE_API_KEY", help="API key, if required.")] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests.")] = 8,
    save: Annotated[
        Path | None, typer.Option(help="File for the report, JSON. Default: verify-NAME.json in the current folder.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Read shards again that passed in an earlier run.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU, if there is one.")] = None,
) -> None:
    """Check a checkpoint before serving: complete files and correct computation here; or check a server's tool calls.

    Reads every shard; computes three layers with this machine's kernels and with the float32 references. Exit code 1
    if there is a problem. If it was stopped, the same command resumes.
    """
    from redline.cli.verify_run import FolderChecks, ServerChecks, check_folder, check_server

    console = plain_console()
    if (folder is None) == (server is None):
        raise ConfigError("verify takes either a checkpoint's FOLDER or --server URL")
    if folder is not None:
        if requests is not None:
            raise ConfigError("--requests is for --server only; leave it out for a FOLDER")
        to = save or Path(f"verify-{folder.resolve().name}.json")
        checks = FolderChecks(folder, to, again, device)
        kept = "run the same command to resume with the remaining shards"
        raise typer.Exit(until_interrupted(lambda: check_folder(checks, console), console, kept))
    assert server is not None
    if requests is None:
        raise ConfigError("--server needs --requests FILE: JSON lines with `messages` and `tools`")
    asked = ServerChecks(server, requests, model, key, max_concurrency, save or Path("verify-server.json"))
    raise typer.Exit(until_interrupted(lambda: check_server(asked, console), console))
