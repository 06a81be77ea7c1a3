"""`redline verify`: flags make the checks of a folder or of a server; the verdict is printed first."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from redline.cli.console import plain_console, until_interrupted
from redline.cli.flags import Argument, AtLeast1, Flag
from redline.cli.options import Device
from redline.errors import ConfigError
from redline.messages.base import Record


class VerifyFlags(Record, frozen=True):
    """Flags of `redline verify`."""

    folder: Annotated[Path | None, Meta(description="A checkpoint's folder. Default: check a server."), Argument()] = (
        None
    )
    server: Annotated[
        str | None,
        Meta(description="An OpenAI server to check for valid tool calls, with --requests."),
        Flag(metavar="URL"),
    ] = None
    requests: Annotated[
        Path | None,
        Meta(description="JSON lines, each a request with `messages` and `tools`, as in Moonshot's vendor verifier."),
    ] = None
    model: Annotated[str | None, Meta(description="The server's model. Default: the first it lists.")] = None
    key: Annotated[str | None, Meta(description="API key, if required."), Flag(envvar="REDLINE_API_KEY")] = None
    max_concurrency: Annotated[AtLeast1, Meta(description="Maximum concurrent requests.")] = 8
    save: Annotated[
        Path | None,
        Meta(description="File for the report, JSON. Default: verify-NAME.json in the current folder."),
    ] = None
    again: Annotated[bool, Meta(description="Read shards again that passed in an earlier run.")] = False
    device: Device = None


def verify(flags: VerifyFlags) -> int:
    """Check a checkpoint before serving: complete files and correct computation here; or check a server's tool calls.

    Reads every shard; computes three layers with this machine's kernels and with the float32 references. Exit code 1
    if there is a problem. If it was stopped, the same command resumes.
    """
    from redline.cli.verify_run import FolderChecks, ServerChecks, check_folder, check_server

    console = plain_console()
    folder, server, requests = flags.folder, flags.server, flags.requests
    if (folder is None) == (server is None):
        raise ConfigError("verify takes either a checkpoint's FOLDER or --server URL")
    if folder is not None:
        if requests is not None:
            raise ConfigError("--requests is for --server only; leave it out for a FOLDER")
        to = flags.save or Path(f"verify-{folder.resolve().name}.json")
        checks = FolderChecks(folder, to, flags.again, flags.device)
        kept = "run the same command to resume with the remaining shards"
        return until_interrupted(lambda: check_folder(checks, console), console, kept)
    assert server is not None
    if requests is None:
        raise ConfigError("--server needs --requests FILE: JSON lines with `messages` and `tools`")
    asked = ServerChecks(
        server, requests, flags.model, flags.key, flags.max_concurrency, flags.save or Path("verify-server.json")
    )
    return until_interrupted(lambda: check_server(asked, console), console)
