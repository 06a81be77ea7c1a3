"""`redline serve` and `redline config`: one set of flags, which become a deployment."""

import functools
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import redline
from redline.cli.hub import fetched
from redline.cli.options import SYNTHETIC
from redline.cli.terminal import Terminal
from redline.errors import ConfigError
from redline.folder import check_model

SHIPPED = Path(redline.__file__).parent / "shipped"  # the small model that comes with the package, and its drafter


def _flags(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER|deployment.toml|OWNER/NAME",
            help="A checkpoint's folder, a TOML file with the keys below, or a model on Hugging Face: it is fetched.",
        ),
    ] = None,
    nano: Annotated[
        bool, typer.Option("--nano", help="Serve Kimi-Nano, the small model that comes with Redline, with its drafter.")
    ] = False,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. 0.0.0.0: every network; then set keys_file.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port. 0: any free one.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model (repeatable). Absent: the folder's name.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of one request, prompt and answer. Absent: what fits.")
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for all contexts, of each GPU: 500MB, 2GB. Absent: a quarter of what is free, at most 4 GiB; "
            "of a GPU that a worker has for itself nine tenths.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|fp8|float32",
            help="How pages hold contexts. fp8 (e4m3): twice as many tokens fit, rounded to 4 bits. Absent: bf16.",
        ),
    ] = None,
    keys_file: Annotated[str | None, typer.Option(help="API keys, one per line.")] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            metavar="debug|info|warning|error",
            help="What is written while it serves. Absent: info, a line per request.",
        ),
    ] = None,
    max_running: Annotated[int | None, typer.Option(metavar="N", help="Requests in one step. Absent: 64.")] = None,
    admit_together: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Waiting requests begin once so many can: more throughput, later first tokens. Absent: 1."
        ),
    ] = None,
    step_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Positions computed in one step. Absent: 512, on a GPU 8192."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Absent: the GPU, if there is one.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="GPUs of this host that share the model (1, 2, 4 or 8); on a CPU, processes. Absent: 1.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|suffix",
            help="Speculate: the folder of an EAGLE-3 drafter of this model, or `suffix`, which repeats what the text "
            "has said before. The answers are the same, sooner. Absent: no speculation.",
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Tokens drafted per step and request, 0 to 15 at most; fewer where they do not pay. Absent: 3.",
        ),
    ] = None,
    draft_head_bits: Annotated[
        int | None,
        typer.Option(
            metavar="16|8",
            help="How the drafter's head is kept: 8 halves the bytes of a pass's largest part on a GPU, and drafts are "
            "rounded a little. Absent: 16.",
        ),
    ] = None,
    draft_trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write what was accepted where, for `redline draft mine`. The file holds users' text."
        ),
    ] = None,
    synthetic_acceptance: Annotated[str | None, typer.Option(metavar="RATES|LENGTH", help=SYNTHETIC)] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any key of deployment.toml: engine.speculation.adaptive=false (repeatable).",
        ),
    ] = None,
) -> None:
    """Declares the flags, for typer to read."""


# What a flag is called in the file. Those of `engine.speculation` need one who drafts.
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
    """A verb with these flags. act: takes the source, and the flags by key of the file."""

    @functools.wraps(_flags)
    def verb(source: Path | None = None, nano: bool = False, set_: list[str] | None = None, **given: Any) -> None:
        if (source is None) != nano:
            raise ConfigError(
                "what to serve is not said: name a checkpoint's folder or a deployment.toml, or say --nano"
                if source is None
                else f"--nano serves the model that comes with Redline, and {source} another; leave one of them out"
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
    """KEY=VALUE. The value is read as TOML has it, and is text where it is none of that."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {text}: expected KEY=VALUE, as in --set requests.timeout_s=600")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _serve(source: Path, flags: dict[str, Any]) -> int:
    """Serve a model over the OpenAI API.

    Loads the checkpoint, then answers /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /health, /metrics,
    and browsers with a page at /. Every flag is a key of deployment.toml (--draft and those after it: of its table
    engine.speculation), and wins over the file; `redline config` shows what is in force.
    """
    from redline.fleet import config as deployment
    from redline.fleet.process import check_process
    from redline.fleet.serve import serve as run_server

    check_process()
    terminal = Terminal()
    return run_server(deployment.read(fetched(source, terminal), flags), terminal)


def _config(source: Path, flags: dict[str, Any]) -> int:
    """What is in force, and why, as a deployment.toml: the keys of file and flags, and the defaults of all others.

    `redline config FOLDER > deployment.toml` is a file to begin with. Nothing is loaded or served.
    """
    from redline.fleet import config as deployment
    from redline.fleet.shown import as_toml

    if source.is_dir():
        check_model(source, weights=False)
    print(as_toml(deployment.read(source, flags), source, flags), end="")
    return 0


serve, show_config = _verb(_serve), _verb(_config)


def manifests(
    source: Annotated[Path, typer.Argument(metavar="deployment.toml", help="A deployment.")],
    image: Annotated[str, typer.Option(help="The container's image, with Redline's version as its tag.")],
    kind: Annotated[
        str, typer.Option(metavar="leaderworkerset|kuberay", help="Who keeps the workers' pods.")
    ] = "leaderworkerset",
    name: Annotated[str, typer.Option(help="What the manifests call themselves.")] = "redline",
    claim: Annotated[
        str, typer.Option(help="A PersistentVolumeClaim with the folders of the weights and the drafter.")
    ] = "redline-weights",
    secret: Annotated[
        str, typer.Option(help="A Secret with cluster.key, and each file of keys that the deployment names.")
    ] = "redline",
) -> None:
    """Kubernetes manifests of a deployment, for `kubectl apply`: a server, and pods whose agents join it."""
    from redline.fleet import config as deployment
    from redline.fleet.manifests import Around, as_yaml, rendered

    config = deployment.read(source, {})
    print(as_yaml(rendered(config, kind, Around(image, name, claim, secret))), end="")
