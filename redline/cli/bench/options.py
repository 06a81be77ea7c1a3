"""The flags shared by the `redline bench` commands that measure a server over HTTP.

They have the names and the syntax of `vllm bench serve`, so that one of its command lines works with one word changed.
A vLLM flag that is not supported here is refused by name, and the error names the alternative.
"""

import base64
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints
from urllib.parse import unquote, urlsplit

import msgspec
import typer
from typer.core import TyperCommand

from redline.bench.serving.target import Patience, Target
from redline.errors import ConfigError

SERVER, WAITING = "Server", "Timeouts"

BaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The server, such as http://127.0.0.1:8000. Overrides --host and --port.",
        rich_help_panel=SERVER,
    ),
]
Host = Annotated[str, typer.Option(help="The server's host.", rich_help_panel=SERVER)]
Port = Annotated[int, typer.Option(min=1, max=65535, help="The server's port.", rich_help_panel=SERVER)]
Endpoint = Annotated[
    str | None, typer.Option(metavar="PATH", help="Default: the backend's path.", rich_help_panel=SERVER)
]
Backend = Annotated[
    str | None,
    typer.Option(
        metavar="openai|openai-chat|...",
        help="API of the server: completions, chat, or another dialect.",
        rich_help_panel=SERVER,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="The model's name or folder. Default: the first that the server lists.", rich_help_panel=SERVER),
]
ServedModelName = Annotated[
    str | None, typer.Option(help="The model's name on the server. Default: --model.", rich_help_panel=SERVER)
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Tokenizer that counts tokens. Default: --model, if that is a folder.",
        rich_help_panel=SERVER,
    ),
]
Header = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Headers of every request (repeatable).", rich_help_panel=SERVER),
]
ExtraBody = Annotated[
    str | None,
    typer.Option(
        metavar="JSON", help="Fields for the body of every request; they override other flags.", rich_help_panel=SERVER
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Do not verify the server's certificate.", rich_help_panel=SERVER)
]
ConnectTimeout = Annotated[
    float, typer.Option(min=0.001, metavar="S", help="Seconds to connect.", rich_help_panel=WAITING)
]
FirstTokenTimeout = Annotated[
    float,
    typer.Option(
        min=0.001, metavar="S", help="Seconds from sending a request to its first token.", rich_help_panel=WAITING
    ),
]
SilenceTimeout = Annotated[
    float,
    typer.Option(
        min=0.001, metavar="S", help="Seconds without a byte on a stream that has started.", rich_help_panel=WAITING
    ),
]
RequestTimeout = Annotated[
    float, typer.Option(min=0.001, metavar="S", help="Seconds for one whole request.", rich_help_panel=WAITING)
]
ReadyTimeout = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="S",
        help="Seconds to wait for the server. Default: 600 while it loads, 10 if connections are refused.",
        rich_help_panel=WAITING,
    ),
]
Quiet = Annotated[bool, typer.Option("--disable-tqdm", help="Show no progress.")]

KEPT = "Output"

Save = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.", rich_help_panel=KEPT)]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page with tables and plots.", rich_help_panel=KEPT)
]
Seed = Annotated[
    int | None,
    typer.Option(min=0, help="Seed of the prompts. Default: random, so that no cache has them; saved in the result."),
]


DatasetName = Annotated[
    str, typer.Option(metavar="random|sharegpt|custom|prefix_repetition|redline", help="Dataset of the prompts.")
]
DatasetPath = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File of the dataset; for redline also a folder.")
]

PATIENCE = Patience()


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Flags of one server: its address, its API dialect, and the tokenizer that counts its tokens."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    endpoint: Endpoint = None
    backend: Backend = None
    model: Model = None
    served_model_name: ServedModelName = None
    tokenizer: Tokenizer = None
    header: Header = None
    extra_body: ExtraBody = None
    insecure: Insecure = False

    @property
    def vocabulary(self) -> str | None:
        """The folder of the tokenizer that counts tokens: --tokenizer, or --model if that is a folder; else None."""
        return self.tokenizer or (self.model if self.model and Path(self.model).is_dir() else None)

    def target(
        self,
        base_url: str | None,
        patience: Patience,
        *,
        body: dict[str, Any] | None = None,
        otherwise: str = "openai-chat",
    ) -> Target:
        """`target_of` for these flags."""
        return target_of(
            base_url=base_url,
            host=self.host,
            port=self.port,
            endpoint=self.endpoint,
            backend=self.backend,
            model=self.model,
            served_model_name=self.served_model_name,
            header=self.header,
            extra_body=self.extra_body,
            insecure=self.insecure,
            body=body,
            patience=patience,
            otherwise=otherwise,
        )


@dataclass(frozen=True, kw_only=True)
class WaitingFlags:
    """Timeouts: for a server that starts, and for each phase of a request."""

    ready_check_timeout_sec: ReadyTimeout = None
    connect_timeout_sec: ConnectTimeout = PATIENCE.connect
    first_token_timeout_sec: FirstTokenTimeout = PATIENCE.first
    silence_timeout_sec: SilenceTimeout = PATIENCE.silence
    request_timeout_sec: RequestTimeout = PATIENCE.whole

    @property
    def patience(self) -> Patience:
        """The timeouts of a request."""
        return Patience(
            connect=self.connect_timeout_sec,
            first=self.first_token_timeout_sec,
            silence=self.silence_timeout_sec,
            whole=self.request_timeout_sec,
        )


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """The command with typer's signature: each parameter that is a group of flags is replaced by the group's fields."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, type[Any]] = {}
    flags: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if not is_dataclass(hints[name]):
            flags.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        groups[name] = hints[name]
        kinds = get_type_hints(hints[name], include_extras=True)
        for field in fields(hints[name]):
            kind, default = kinds[field.name], field.default
            flags.append(
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            )

    @functools.wraps(verb)
    def typed(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        verb(**given)

    typed.__signature__ = inspect.Signature(flags)  # pyright: ignore[reportAttributeAccessIssue]
    typed.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return typed


# vLLM options that take several values after one name.
MANY = ("--header", "--metadata", "--goodput")
# Flags of `vllm bench serve` that are not supported, and the alternative.
REFUSED = {
    "--profile": "profile the server with its own tools",
    "--lora-modules": "name one adapter with --model, and run once per adapter",
    "--lora-assignment": "name one adapter with --model, and run once per adapter",
    "--use-beam-search": "set the server's own field with --extra-body",
    "--probe-request-rate": "run a second `redline bench serve` with --request-rate at the same time",
    "--append-result": "give each run a --result-filename; `redline bench report` puts several on one page",
    "--plot-timeline": "--html FILE contains the timeline",
    "--timeline-itl-thresholds": "--html FILE contains the inter-token latencies",
    "--plot-dataset-stats": "the saved result contains the lengths of each request",
    "--self-timed": "set a rate with --request-rate",
    "--no-self-timed": "leave it out; timed traces are not supported",
    "--tokenizer-mode": "leave it out; --tokenizer names a folder with the vocabulary",
    "--trust-remote-code": "leave it out: code from a checkpoint is never run",
    "--no-stream": "leave it out: a dataset is a file",
    "--request-id-prefix": "set a header with --header",
    "--random-batch-size": "leave it out: embeddings are not measured",
    "--no-reranker": "leave it out: rerankers are not measured",
    "--chat-template-kwargs": "send them to the server: --extra-body '{\"chat_template_kwargs\": {...}}'",
    "--skip-chat-template": "leave it out: no chat template is applied by this client",
}
# Prefixes of the flags of datasets that are not supported.
REFUSED_DATASETS = (
    "--hf-", "--random-mm-", "--sonnet-", "--blazedit-", "--spec-bench-", "--speed-bench-", "--timed-trace-", "--asr-",
)  # fmt: skip


class PeerCommand(TyperCommand):
    """A command that accepts command lines of `vllm bench serve`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """typer's parser, after `as_ours`. Raises ConfigError for a vLLM flag that is not supported."""
        known = {name for option in self.params for name in option.opts}
        return super().parse_args(ctx, as_ours(args, known))


def as_ours(words: Sequence[str], known: set[str]) -> list[str]:
    """Converts a vLLM command line to typer's form: dashes for underscores in flags, one flag per value.

    known: flags of the command. Raises ConfigError for a vLLM flag that the command does not have.
    """
    found: list[str] = []
    option, fresh = "", False
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            if name not in known:
                _refuse(name)
            option = name if name in MANY and name in known else ""
            found += [name + equals + value] if not option or equals else [name]
            fresh = not equals
        elif option:
            found += [word] if fresh else [option, word]
            fresh = False
        else:
            found.append(word)
    return found


def _refuse(name: str) -> None:
    if name in REFUSED:
        raise ConfigError(f"{name} of vLLM is not supported here: {REFUSED[name]}")
    if name.startswith(REFUSED_DATASETS):
        raise ConfigError(f"{name} of vLLM is not supported here: write the requests as JSONL, --dataset-name custom")


def target_of(
    *,
    base_url: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    endpoint: str | None = None,
    backend: str | None = None,
    model: str | None = None,
    served_model_name: str | None = None,
    header: Sequence[str] | None = None,
    extra_body: str | None = None,
    insecure: bool = False,
    body: dict[str, Any] | None = None,
    patience: Patience | None = None,
    otherwise: str = "openai-chat",
) -> Target:
    """The server that the flags describe. Its API key comes from OPENAI_API_KEY or REDLINE_API_KEY.

    body: fields set by other flags; those of extra_body override them. otherwise: the backend if neither --backend nor
    --endpoint names one. Raises ConfigError, naming the flag.
    """
    url, basic = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", dict[str, str]()
    if base_url is not None:
        url, basic = address(base_url)
    path = endpoint or ""
    if path.startswith("http"):
        raise ConfigError(f"--endpoint {path!r}: expected a path such as /v1/chat/completions; see --base-url")
    if path and not path.startswith("/"):
        path = f"/{path}"
    spoken = "openai-chat" if path.endswith("/chat/completions") else "openai" if path.endswith("/completions") else ""
    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("REDLINE_API_KEY")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key in the environment may contain printable ASCII characters only")
    return Target(
        base_url=url,
        backend=backend or spoken or otherwise,
        endpoint=path,
        model=served_model_name or model or "",
        key=key,
        headers={**basic, **pairs("--header", header or ())},
        body={**(body or {}), **json_object("--extra-body", extra_body)},
        verify_tls=not insecure,
        patience=patience or Patience(),
    )


def pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE words as a dict. Raises ConfigError for a word of another form."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{flag} {word!r}: expected KEY=VALUE")
        if not (word.isprintable() or flag != "--header"):
            raise ConfigError(f"{flag} {key!r}: a header may not contain control characters")
        found[key.strip()] = value.strip()
    return found


def json_object(flag: str, text: str | None) -> dict[str, Any]:
    """A flag's JSON object; {} if the flag is not given. Raises ConfigError for anything else."""
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{flag}: expected a JSON object such as '{{\"top_k\": 20}}': {error}") from None


def goals(words: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Parses the NAME:MILLISECONDS words of --goodput. Raises ConfigError."""
    found: dict[str, float] = {}
    for word in words:
        name, colon, value = word.partition(":")
        try:
            bound = float(value)
        except ValueError:
            bound = -1.0
        if name not in names or not colon or not bound >= 0:
            raise ConfigError(
                f"--goodput {word!r}: expected NAME:MILLISECONDS such as ttft:500; names: {listed(names)}"
            )
        found[name] = bound
    return found


def choices(flag: str, words: str | None, names: Sequence[str]) -> tuple[str, ...]:
    """Parses comma-separated names; () if the flag is not given. Raises ConfigError."""
    found = tuple(word.strip() for word in (words or "").split(",") if word.strip())
    for name in found:
        if name not in names:
            raise ConfigError(f"{flag} {name!r}: expected one of {listed(names)}")
    return found


def percentiles(words: str) -> tuple[float, ...]:
    """Parses the numbers of --metric-percentiles. Raises ConfigError."""
    try:
        found = tuple(float(word) for word in words.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= number <= 100 for number in found):
        raise ConfigError(f"--metric-percentiles {words!r}: expected numbers of 0 to 100 such as 50,90,99")
    return found


def listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def address(given: str, flag: str = "--base-url") -> tuple[str, dict[str, str]]:
    """Splits an address into scheme, host, port and path, without a trailing slash or /v1, and a Basic auth header.

    The header carries the user and password of the address. They are removed from the address itself, so that they are
    never printed or saved. Raises ConfigError, which names the flag.
    """
    text = given.strip() if "://" in given else f"http://{given.strip()}"
    try:
        parts = urlsplit(text)
        named = parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, named = None, False
    if parts is None or not named or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        shown = given.rpartition("@")[2]
        raise ConfigError(f"{flag} {shown!r}: expected an address such as http://127.0.0.1:8000")
    user, at, place = parts.netloc.rpartition("@")
    plain = parts._replace(netloc=place).geturl().rstrip("/").removesuffix("/v1")
    if not at:
        return plain, {}
    name, _, password = user.partition(":")
    words = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
    return plain, {"Authorization": f"Basic {words}"}
