"""`redline verify`: flags become the checks of a folder or of a server; the verdict is printed first."""

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.console import plain_console, until_interrupted
from redline.errors import ConfigError


def verify(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="A checkpoint's folder. Absent: a server is asked.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="An OpenAI server whose tool calls are judged, by --requests.")
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(help="JSON lines, each a request with `messages` and `tools`, as of Moonshot's vendor verifier."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Of the server. Absent: the first that it names.")] = None,
    key: Annotated[str | None, typer.Option(envvar="REDLINE_API_KEY", help="API key, if the server wants one.")] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    save: Annotated[
        Path | None, typer.Option(help="The report, as JSON. Absent: verify-NAME.json in the current folder.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Read shards again that an earlier run found sound.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Absent: the GPU, if there is one.")] = None,
) -> None:
    """Whether a checkpoint is whole and computes here what it should, before it is served; or a server's tool calls.

    Every shard is read; three layers are computed by this machine's kernels and by the float32 references. Exit code 1
    if there is a problem. The same command goes on where it was stopped.
    """
    from redline.cli.verify_run import FolderChecks, ServerChecks, check_folder, check_server

    console = plain_console()
    if (folder is None) == (server is None):
        raise ConfigError("verify takes a checkpoint's FOLDER or --server URL, and one of them")
    if folder is not None:
        if requests is not None:
            raise ConfigError("--requests are for --server; a FOLDER is verified without")
        to = save or Path(f"verify-{folder.resolve().name}.json")
        checks = FolderChecks(folder, to, again, device)
        kept = "the same command goes on with the shards that are not done"
        raise typer.Exit(until_interrupted(lambda: check_folder(checks, console), console, kept))
    assert server is not None
    if requests is None:
        raise ConfigError("--server needs --requests FILE: JSON lines with `messages` and `tools`")
    asked = ServerChecks(server, requests, model, key, max_concurrency, save or Path("verify-server.json"))
    raise typer.Exit(until_interrupted(lambda: check_server(asked, console), console))
