"""`redline serve` and `redline config`: one set of flags that define a deployment."""

import functools
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Meta

import redline
from redline.cli.flags import Argument, Flag
from redline.cli.hub import fetched
from redline.cli.options import SYNTHETIC
from redline.cli.terminal import Terminal
from redline.errors import ConfigError
from redline.folder import check_model
from redline.messages.base import Record

SHIPPED = Path(redline.__file__).parent / "shipped"  # the small model that comes with the package, and its drafter


def _flags(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER|deployment.toml|OWNER/NAME",
            help="A checkpoint's folder, a TOML file with the keys below, or a Hugging Face model to download.",
        ),
    ] = None,
    nano: Annotated[
        bool, typer.Option("--nano", help="Serve Kimi-Nano, the small model that comes with Redline, with its drafter.")
    ] = False,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. 0.0.0.0: all networks; then set keys_file.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port. 0: any free one.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Model name for clients (repeatable). Default: the folder's name.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Maximum tokens of a request, prompt and answer. Default: whatever fits.")
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="KV cache memory per GPU: 500MB, 2GB. Default: a quarter of the free memory, at most 4 GiB; nine "
            "tenths of a GPU that is not shared with other workers.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|fp8|float32",
            help="Dtype of the KV cache. fp8 (e4m3): twice the tokens, 4 significant bits. Default: bf16.",
        ),
    ] = None,
    keys_file: Annotated[str | None, typer.Option(help="API keys, one per line.")] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            metavar="debug|info|warning|error",
            help="Log level while serving. Default: info, one line per request.",
        ),
    ] = None,
    max_running: Annotated[int | None, typer.Option(metavar="N", help="Maximum batch size. Default: 64.")] = None,
    admit_together: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Admit waiting requests once N can start: more throughput, later first token. Default: 1."
        ),
    ] = None,
    step_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Maximum tokens per step. Default: 512, on a GPU 8192."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU, if there is one.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tensor parallel size: GPUs of this host (1, 2, 4 or 8); on a CPU, processes. Default: 1.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|suffix",
            help="Speculative decoding: the folder of an EAGLE-3 drafter for this model, or `suffix`, which repeats "
            "earlier parts of the text. Same answers, less time. Default: no speculation.",
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Draft tokens per step and request, 0 to 15 at most; fewer if they do not pay. Default: 3.",
        ),
    ] = None,
    draft_head_bits: Annotated[
        int | None,
        typer.Option(
            metavar="16|8",
            help="Precision of the drafter's head: 8 halves the bytes of the largest part of a pass on a GPU; drafts "
            "are rounded a little. Default: 16.",
        ),
    ] = None,
    draft_trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write a trace of accepted draft tokens, for `redline draft mine`. Contains users' text.",
        ),
    ] = None,
    synthetic_acceptance: Annotated[str | None, typer.Option(metavar="RATES|LENGTH", help=SYNTHETIC)] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set any key of deployment.toml: engine.speculation.adaptive=false (repeatable).",
        ),
    ] = None,
) -> None:
    """Declares the flags for typer."""


# Key in the file by flag. Keys of `engine.speculation` need a drafter.
_KEYS = {
    "host": "host",
    "port": "port",
    "served_model_name": "served_model_name",
    "keys_file": "keys_file",
    "log_level": "log_level",
    "max_model_len": "engine.max_model_len",
    "kv_memory": "engine.kv_memory",
    "kv_dtype": "engine.kv_dtype",
    "max_running": "engine.max_running",
    "admit_together": "engine.admit_together",
    "step_tokens": "engine.step_tokens",
    "device": "engine.device",
    "ranks": "engine.ranks",
    "draft": "engine.speculation",
    "draft_tokens": "engine.speculation.tokens",
    "draft_head_bits": "engine.speculation.head_bits",
    "draft_trace": "engine.speculation.trace",
    "synthetic_acceptance": "engine.speculation.synthetic_acceptance",
}


def _verb(act: Callable[[Path, dict[str, Any]], int]) -> Callable[..., None]:
    """Make a command with these flags. act: takes the source, and the flags by key of the file."""

    @functools.wraps(_flags)
    def verb(source: Path | None = None, nano: bool = False, set_: list[str] | None = None, **given: Any) -> None:
        if (source is None) != nano:
            raise ConfigError(
                "no model given: name a checkpoint's folder or a deployment.toml, or use --nano"
                if source is None
                else f"--nano serves the model that comes with Redline, not {source}; leave one of them out"
            )
        flags = {_KEYS[name]: value for name, value in given.items() if value is not None}
        flags |= dict(map(_pair, set_ or ()))
        if nano:
            source = SHIPPED / "kimi-nano"
            flags = {"engine.speculation": str(SHIPPED / "kimi-nano-eagle3")} | flags
        assert source is not None
        raise typer.Exit(act(source, flags))

    verb.__name__, verb.__doc__ = act.__name__.strip("_"), act.__doc__
    return verb


def _pair(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE. The value is parsed as TOML, and is plain text if that fails."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {text}: expected KEY=VALUE, as in --set requests.timeout_s=600")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _serve(source: Path, flags: dict[str, Any]) -> int:
    """Serve a model over the OpenAI API.

    Loads the checkpoint, then serves /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /health, /metrics,
    and a page for browsers at /. Every flag is a key of deployment.toml (--draft and those after it: of its table
    engine.speculation), and overrides the file; `redline config` shows the effective values.
    """
    from redline.deploy import config as deployment
    from redline.deploy.process import check_process
    from redline.deploy.serve import serve as run_server

    check_process()
    terminal = Terminal()
    return run_server(deployment.read(fetched(source, terminal), flags), terminal)


def _config(source: Path, flags: dict[str, Any]) -> int:
    """Show the effective configuration as a deployment.toml, with the origin of each value: file, flag or default.

    `redline config FOLDER > deployment.toml` makes a file to begin with. Loads and serves nothing.
    """
    from redline.deploy import config as deployment
    from redline.deploy.shown import as_toml

    if source.is_dir():
        check_model(source, weights=False)
    print(as_toml(deployment.read(source, flags), source, flags), end="")
    return 0


serve, show_config = _verb(_serve), _verb(_config)


class ManifestsFlags(Record, frozen=True):
    """Flags of `redline manifests`."""

    source: Annotated[Path, Meta(description="A deployment."), Argument(metavar="deployment.toml")]
    image: Annotated[str, Meta(description="The container's image, with Redline's version as its tag.")]
    kind: Annotated[
        str,
        Meta(description="The resource that manages the workers' pods."),
        Flag(metavar="leaderworkerset|kuberay"),
    ] = "leaderworkerset"
    name: Annotated[str, Meta(description="Name of the resources in the manifests.")] = "redline"
    claim: Annotated[
        str, Meta(description="A PersistentVolumeClaim with the folders of the model's and the drafter's weights.")
    ] = "redline-weights"
    secret: Annotated[
        str, Meta(description="A Secret with cluster.key, and each file of keys that the deployment refers to.")
    ] = "redline"


def manifests(flags: ManifestsFlags) -> None:
    """Print the Kubernetes manifests of a deployment, for `kubectl apply`: a server, and pods with agents."""
    from redline.deploy import config as deployment
    from redline.deploy.manifests import Around, as_yaml, rendered

    config = deployment.read(flags.source, {})
    print(as_yaml(rendered(config, flags.kind, Around(flags.image, flags.name, flags.claim, flags.secret))), end="")
