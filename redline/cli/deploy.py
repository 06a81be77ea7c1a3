"""`redline serve` and `redline config`: one set of flags that define a deployment."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, cast, get_origin

import msgspec
from msgspec import Meta

import redline
from redline.cli.flags import Argument, Flag
from redline.cli.hub import fetched
from redline.cli.terminal import Terminal
from redline.deploy.settings import settings
from redline.errors import ConfigError
from redline.folder import check_model
from redline.messages.base import Record, parts

SHIPPED = Path(redline.__file__).parent / "shipped"  # the small model that comes with the package, and its drafter


# Flags that are keys of the file. Keys of `engine.speculation` need a drafter.
_KEYS = {
    "host": ("host", Flag()),
    "port": ("port", Flag()),
    "served_model_name": ("served_model_name", Flag()),
    "max_model_len": ("engine.max_model_len", Flag()),
    "kv_memory": ("engine.kv_memory", Flag(metavar="SIZE")),
    "kv_dtype": ("engine.kv_dtype", Flag(metavar="bf16|fp8|float32")),
    "keys_file": ("keys_file", Flag()),
    "log_level": ("log_level", Flag(metavar="debug|info|warning|error")),
    "max_running": ("engine.max_running", Flag(metavar="N")),
    "admit_together": ("engine.admit_together", Flag(metavar="N")),
    "step_tokens": ("engine.step_tokens", Flag(metavar="N")),
    "device": ("engine.device", Flag()),
    "ranks": ("engine.ranks", Flag(metavar="N")),
    "draft": ("engine.speculation", Flag(metavar="FOLDER|suffix")),
    "draft_tokens": ("engine.speculation.tokens", Flag(metavar="K")),
    "draft_head_bits": ("engine.speculation.head_bits", Flag(metavar="16|8")),
    "draft_trace": ("engine.speculation.trace", Flag(metavar="FILE")),
    "synthetic_acceptance": ("engine.speculation.synthetic_acceptance", Flag(metavar="RATES|LENGTH")),
}


class _Source(Record, frozen=True):
    source: Annotated[
        Path | None,
        Meta(
            description="A checkpoint's folder, a TOML file with the keys below, or a Hugging Face model to download."
        ),
        Argument(metavar="FOLDER|deployment.toml|OWNER/NAME"),
    ] = None
    nano: Annotated[
        bool, Meta(description="Serve Kimi-Nano, the small model that comes with Redline, with its drafter.")
    ] = False
    set: Annotated[
        tuple[str, ...],
        Meta(description="Set any key of deployment.toml: engine.speculation.adaptive=false (repeatable)."),
        Flag(metavar="KEY=VALUE"),
    ] = ()


def _field(name: str, key: str, flag: Flag) -> tuple[str, Any, Any]:
    """A field of `DeploymentFlags`, of the key's type and meaning. The key's bounds are checked with the whole file."""
    hint = settings()[key].hint
    kinds = [get_origin(each) or each for each in parts(hint)]
    kind = next((each for each in kinds if each in (int, tuple)), str) if flag.metavar != "SIZE" else str
    typed: Any = tuple[str, ...] if kind is tuple else kind | None
    return name, Annotated[typed, Meta(description=settings()[key].help), flag], () if kind is tuple else None


_FIELDS = [_field(name, key, flag) for name, (key, flag) in _KEYS.items()]
DeploymentFlags = cast(
    "type[Record]", msgspec.defstruct("DeploymentFlags", _FIELDS, bases=(_Source,), frozen=True, kw_only=True)
)


def _read(given: Record) -> tuple[Path, dict[str, Any]]:
    """The source, and the flags by key of the file. given: a `DeploymentFlags`."""
    values = msgspec.structs.asdict(given)
    source: Path | None = values["source"]
    if (source is None) != values["nano"]:
        raise ConfigError(
            "no model given: name a checkpoint's folder or a deployment.toml, or use --nano"
            if source is None
            else f"--nano serves the model that comes with Redline, not {source}; leave one of them out"
        )
    flags: dict[str, Any] = {key: values[name] for name, (key, _) in _KEYS.items() if values[name] not in (None, ())}
    flags |= dict(map(_pair, values["set"]))
    if source is None:
        return SHIPPED / "kimi-nano", {"engine.speculation": str(SHIPPED / "kimi-nano-eagle3")} | flags
    return source, flags


def _pair(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE. The value is parsed as TOML, and is plain text if that fails."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {text}: expected KEY=VALUE, as in --set requests.timeout_s=600")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def serve(given: Record) -> int:
    """Serve a model over the OpenAI API.

    Loads the checkpoint, then serves /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /health, /metrics,
    and a page for browsers at /. Every flag is a key of deployment.toml (--draft and those after it: of its table
    engine.speculation), and overrides the file; `redline config` shows the effective values.
    """
    from redline.deploy import config as deployment
    from redline.deploy.process import check_process
    from redline.deploy.serve import serve as run_server

    source, flags = _read(given)
    check_process()
    terminal = Terminal()
    return run_server(deployment.read(fetched(source, terminal), flags), terminal)


def show_config(given: Record) -> int:
    """Show the effective configuration as a deployment.toml, with the origin of each value: file, flag or default.

    `redline config FOLDER > deployment.toml` makes a file to begin with. Loads and serves nothing.
    """
    from redline.deploy import config as deployment
    from redline.deploy.shown import as_toml

    source, flags = _read(given)
    if source.is_dir():
        check_model(source, weights=False)
    print(as_toml(deployment.read(source, flags), source, flags), end="")
    return 0


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
