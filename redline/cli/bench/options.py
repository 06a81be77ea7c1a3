"""The flags that the verbs of `redline bench` share where they measure a server over HTTP.

They have the names of `vllm bench serve`, and are written as its users write them, so that a command line of theirs
needs one word changed. What of theirs is not served here is refused by name, with what to use instead.
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

SERVER, WAITING = "The server", "How long is waited"

BaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The server, such as http://127.0.0.1:8000. Wins over --host and --port.",
        rich_help_panel=SERVER,
    ),
]
Host = Annotated[str, typer.Option(help="The server's host.", rich_help_panel=SERVER)]
Port = Annotated[int, typer.Option(min=1, max=65535, help="The server's port.", rich_help_panel=SERVER)]
Endpoint = Annotated[
    str | None, typer.Option(metavar="PATH", help="Absent: the backend's own.", rich_help_panel=SERVER)
]
Backend = Annotated[
    str | None,
    typer.Option(
        metavar="openai|openai-chat|...",
        help="How the server is spoken to: completions, chat, or another dialect.",
        rich_help_panel=SERVER,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="The model's name or folder. Absent: the first that the server lists.", rich_help_panel=SERVER),
]
ServedModelName = Annotated[
    str | None, typer.Option(help="What the server calls the model. Absent: what --model says.", rich_help_panel=SERVER)
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Whose tokens are counted. Absent: --model, where that is a folder.",
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
        metavar="JSON", help="Fields of every request's body; they win over other flags.", rich_help_panel=SERVER
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
    typer.Option(min=0.001, metavar="S", help="Seconds from sending to the first token.", rich_help_panel=WAITING),
]
SilenceTimeout = Annotated[
    float,
    typer.Option(
        min=0.001, metavar="S", help="Seconds without a byte of a stream that has begun.", rich_help_panel=WAITING
    ),
]
RequestTimeout = Annotated[
    float, typer.Option(min=0.001, metavar="S", help="Seconds for one request, whole.", rich_help_panel=WAITING)
]
ReadyTimeout = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="S",
        help="Seconds to wait for the server. Absent: 600 while it loads, 10 where nobody listens.",
        rich_help_panel=WAITING,
    ),
]
Quiet = Annotated[bool, typer.Option("--disable-tqdm", help="Show no progress.")]

KEPT = "What is shown and kept"

Save = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.", rich_help_panel=KEPT)]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page with tables and plots.", rich_help_panel=KEPT)
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Of prompts. Absent: drawn, so that no cache knows them, and kept.")
]


DatasetName = Annotated[
    str, typer.Option(metavar="random|sharegpt|custom|prefix_repetition|redline", help="What is asked.")
]
DatasetPath = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Of a dataset that is a file; of redline also a folder.")
]

PATIENCE = Patience()


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Of one server: where it is, how it is spoken to, and who counts its tokens."""

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
        """The folder whose vocabulary counts tokens: --tokenizer, or --model where that is one; None: nobody's."""
        return self.tokenizer or (self.model if self.model and Path(self.model).is_dir() else None)

    def target(
        self,
        base_url: str | None,
        patience: Patience,
        *,
        body: dict[str, Any] | None = None,
        otherwise: str = "openai-chat",
    ) -> Target:
        """As `target_of`."""
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
    """How long is waited: for a server that starts, and for each step of a request."""

    ready_check_timeout_sec: ReadyTimeout = None
    connect_timeout_sec: ConnectTimeout = PATIENCE.connect
    first_token_timeout_sec: FirstTokenTimeout = PATIENCE.first
    silence_timeout_sec: SilenceTimeout = PATIENCE.silence
    request_timeout_sec: RequestTimeout = PATIENCE.whole

    @property
    def patience(self) -> Patience:
        """Those of a request."""
        return Patience(
            connect=self.connect_timeout_sec,
            first=self.first_token_timeout_sec,
            silence=self.silence_timeout_sec,
            whole=self.request_timeout_sec,
        )


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb as typer reads it: each parameter that is a group of flags stands for all of its fields, in its place."""
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


# Options of vLLM's that take several values behind one name.
MANY = ("--header", "--metadata", "--goodput")
# Flags of `vllm bench serve` that are not served, and what to do instead.
REFUSED = {
    "--profile": "profile the server with its own tools",
    "--lora-modules": "name one of them with --model, a run for each",
    "--lora-assignment": "name one of them with --model, a run for each",
    "--use-beam-search": "give the server's own field with --extra-body",
    "--probe-request-rate": "run a second `redline bench serve` with --request-rate beside this one",
    "--append-result": "give each run a --result-filename; `redline bench report` puts several on one page",
    "--plot-timeline": "--html FILE has the timeline, among other plots",
    "--timeline-itl-thresholds": "--html FILE has the gaps themselves",
    "--plot-dataset-stats": "the saved result has the lengths of each request",
    "--self-timed": "give a rate with --request-rate",
    "--no-self-timed": "leave it out, there are no timed traces here",
    "--tokenizer-mode": "leave it out; --tokenizer names a folder with the vocabulary",
    "--trust-remote-code": "leave it out: no code of a checkpoint is run",
    "--no-stream": "leave it out: a dataset is a file",
    "--request-id-prefix": "give a header with --header",
    "--random-batch-size": "leave it out: embeddings are not measured",
    "--no-reranker": "leave it out: rerankers are not measured",
    "--chat-template-kwargs": "give them to the server: --extra-body '{\"chat_template_kwargs\": {...}}'",
    "--skip-chat-template": "leave it out: no template is put around a prompt here",
}
# Groups of flags of datasets that are not read here, by how they begin.
REFUSED_DATASETS = (
    "--hf-", "--random-mm-", "--sonnet-", "--blazedit-", "--spec-bench-", "--speed-bench-", "--timed-trace-", "--asr-",
)  # fmt: skip


class PeerCommand(TyperCommand):
    """A verb whose command line may be one of `vllm bench serve`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does, after `as_ours`. Raises ConfigError for a flag of vLLM's that is not served."""
        known = {name for option in self.params for name in option.opts}
        return super().parse_args(ctx, as_ours(args, known))


def as_ours(words: Sequence[str], known: set[str]) -> list[str]:
    """A command line of vLLM's, as typer reads it: underscores in flags, and several values behind one flag.

    known: flags that the verb has. Raises ConfigError for a flag of vLLM's that it does not have.
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
        raise ConfigError(f"{name} of vLLM's is not served here: {REFUSED[name]}")
    if name.startswith(REFUSED_DATASETS):
        raise ConfigError(f"{name} of vLLM's is not served here: write the requests as JSONL, --dataset-name custom")


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
    """The server that flags speak of; its key is that of OPENAI_API_KEY or REDLINE_API_KEY.

    body: fields that other flags give; those of extra_body win. otherwise: the backend where neither --backend nor
    --endpoint says one. Raises ConfigError, naming the flag.
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
        raise ConfigError("the key in the environment: a key has letters, digits and signs of ASCII alone")
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
    """KEY=VALUE words as a dict. Raises ConfigError for a word that is none."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{flag} {word!r}: expected KEY=VALUE")
        if not (word.isprintable() or flag != "--header"):
            raise ConfigError(f"{flag} {key!r}: a header holds no control characters")
        found[key.strip()] = value.strip()
    return found


def json_object(flag: str, text: str | None) -> dict[str, Any]:
    """A flag's JSON object; {} where it is not given. Raises ConfigError for anything else."""
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{flag}: expected a JSON object such as '{{\"top_k\": 20}}': {error}") from None


def goals(words: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """NAME:MILLISECONDS words of --goodput. Raises ConfigError."""
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
    """Names with commas between them; none where the flag is not given. Raises ConfigError."""
    found = tuple(word.strip() for word in (words or "").split(",") if word.strip())
    for name in found:
        if name not in names:
            raise ConfigError(f"{flag} {name!r}: expected one of {listed(names)}")
    return found


def percentiles(words: str) -> tuple[float, ...]:
    """The numbers of --metric-percentiles. Raises ConfigError."""
    try:
        found = tuple(float(word) for word in words.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= number <= 100 for number in found):
        raise ConfigError(f"--metric-percentiles {words!r}: expected numbers of 0 to 100 such as 50,90,99")
    return found


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them."""
    return ", ".join(names)


def address(given: str, flag: str = "--base-url") -> tuple[str, dict[str, str]]:
    """Scheme, host, port and path, without a slash or /v1 at its end; and the header of a user and password in it.

    Those stand in no address from here on, so that none that is shown or kept has them. Raises ConfigError, which names
    the flag.
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
