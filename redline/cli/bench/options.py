"""The flags shared by the `redline bench` commands that measure a server over HTTP.

They have the names and the syntax of `vllm bench serve`, so that one of its command lines works with one word changed.
A vLLM flag that is not supported here is refused by name, and the error names the alternative.
"""

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta
from typer.core import TyperCommand

from redline.bench.serving.target import Patience, ServerTarget
from redline.cli.flags import Flag
from redline.errors import ConfigError
from redline.messages.base import Record

SERVER, WAITING, OUTPUT = Flag(panel="Server"), Flag(metavar="S", panel="Timeouts"), "Output"
Positive = Annotated[float, Meta(ge=0.001)]
NotNegative = Annotated[float, Meta(ge=0)]

BaseUrl = Annotated[
    str | None,
    Meta(description="The server, such as http://127.0.0.1:8000. Overrides --host and --port."),
    Flag(metavar="URL", panel="Server"),
]
Tokenizer = Annotated[
    str | None,
    Meta(description="Tokenizer that counts tokens. Default: --model, if that is a folder."),
    Flag(metavar="FOLDER", panel="Server"),
]
Header = Annotated[
    tuple[str, ...],
    Meta(description="Headers of every request (repeatable)."),
    Flag(metavar="KEY=VALUE", panel="Server"),
]
ExtraBody = Annotated[
    str | None,
    Meta(description="Fields for the body of every request; they override other flags."),
    Flag(metavar="JSON", panel="Server"),
]
Insecure = Annotated[bool, Meta(description="Do not verify the server's certificate."), SERVER]
Quiet = Annotated[bool, Meta(description="Show no progress."), Flag("--disable-tqdm")]
Save = Annotated[Path | None, Meta(description="Write the result as JSON."), Flag(metavar="FILE", panel=OUTPUT)]
Html = Annotated[
    Path | None, Meta(description="Write a page with tables and plots."), Flag(metavar="FILE", panel=OUTPUT)
]
RandomSeed = Annotated[
    Annotated[int, Meta(ge=0)] | None,
    Meta(description="Seed of the prompts. Default: random, so that no cache has them; saved in the result."),
]
DatasetName = Annotated[
    str, Meta(description="Dataset of the prompts."), Flag(metavar="random|sharegpt|custom|prefix_repetition|redline")
]
DatasetPath = Annotated[
    Path | None, Meta(description="File of the dataset; for redline also a folder."), Flag(metavar="FILE")
]
Rising = Annotated[NotNegative, Meta(description="Lengths are uniform in L (1 - R) to L (1 + R).")]
IgnoreEos = Annotated[bool, Meta(description="Generate every answer to its full length. Random prompts always do.")]
IgnoreEosIfServed = Annotated[
    bool, Meta(description="Generate every answer to its full length, if the server supports the field.")
]
Temperature = Annotated[NotNegative | None, Meta(description="Default: the server's own.")]
Goodput = Annotated[
    tuple[str, ...],
    Meta(description="SLO targets that a good request meets: ttft:500 tpot:20 e2el:10000."),
    Flag(metavar="NAME:MS", panel=OUTPUT),
]


class ServerFlags(Record, frozen=True):
    """One server: its address, its API dialect, and the tokenizer that counts its tokens."""

    host: Annotated[str, Meta(description="The server's host."), SERVER] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535, description="The server's port."), SERVER] = 8000
    endpoint: Annotated[
        str | None, Meta(description="Default: the backend's path."), Flag(metavar="PATH", panel="Server")
    ] = None
    backend: Annotated[
        str | None,
        Meta(description="API of the server: completions, chat, or another dialect."),
        Flag(metavar="openai|openai-chat|...", panel="Server"),
    ] = None
    model: Annotated[
        str | None, Meta(description="The model's name or folder. Default: the first that the server lists."), SERVER
    ] = None
    served_model_name: Annotated[
        str | None, Meta(description="The model's name on the server. Default: --model."), SERVER
    ] = None
    tokenizer: Tokenizer = None
    header: Header = ()
    extra_body: ExtraBody = None
    insecure: Insecure = False

    @property
    def vocabulary(self) -> str | None:
        """The folder of the tokenizer that counts tokens: --tokenizer, or --model if that is a folder; else None."""
        return self.tokenizer or (self.model if self.model and Path(self.model).is_dir() else None)

    def target(
        self,
        base_url: str | None = None,
        patience: Patience | None = None,
        *,
        body: dict[str, Any] | None = None,
        otherwise: str = "openai-chat",
    ) -> ServerTarget:
        """The server that the flags describe. Its API key comes from OPENAI_API_KEY or REDLINE_API_KEY.

        body: fields set by other flags; those of extra_body override them. otherwise: the backend if neither --backend
        nor --endpoint names one. Raises ConfigError, naming the flag.
        """
        host, path = self.host, self.endpoint or ""
        url, basic = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}", dict[str, str]()
        if base_url is not None:
            url, basic = address(base_url)
        if path.startswith("http"):
            raise ConfigError(f"--endpoint {path!r}: expected a path such as /v1/chat/completions; see --base-url")
        if path and not path.startswith("/"):
            path = f"/{path}"
        spoken = {"/chat/completions": "openai-chat", "/completions": "openai"}
        backend = self.backend or next((name for end, name in spoken.items() if path.endswith(end)), otherwise)
        return ServerTarget(
            base_url=url,
            backend=backend,
            endpoint=path,
            model=self.served_model_name or self.model or "",
            key=key_of("OPENAI_API_KEY") or key_of("REDLINE_API_KEY"),
            headers={**basic, **pairs("--header", self.header)},
            body={**(body or {}), **json_object("--extra-body", self.extra_body)},
            verify_tls=not self.insecure,
            patience=patience or Patience(),
        )


PATIENCE = Patience()


class WaitingFlags(Record, frozen=True):
    """Timeouts: for a server that starts, and for each phase of a request."""

    ready_check_timeout_sec: Annotated[
        NotNegative | None,
        Meta(description="Seconds to wait for the server. Default: 600 while it loads, 10 if connections are refused."),
        WAITING,
    ] = None
    connect_timeout_sec: Annotated[Positive, Meta(description="Seconds to connect."), WAITING] = PATIENCE.connect
    first_token_timeout_sec: Annotated[
        Positive, Meta(description="Seconds from sending a request to its first token."), WAITING
    ] = PATIENCE.first
    silence_timeout_sec: Annotated[
        Positive, Meta(description="Seconds without a byte on a stream that has started."), WAITING
    ] = PATIENCE.silence
    request_timeout_sec: Annotated[Positive, Meta(description="Seconds for one whole request."), WAITING] = (
        PATIENCE.whole
    )

    @property
    def patience(self) -> Patience:
        """The timeouts of a request."""
        return Patience(
            connect=self.connect_timeout_sec,
            first=self.first_token_timeout_sec,
            silence=self.silence_timeout_sec,
            whole=self.request_timeout_sec,
        )


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


def key_of(variable: str) -> str | None:
    """The API key in an environment variable; None if it is not set. Raises ConfigError for an invalid one."""
    key = os.environ.get(variable) or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(f"environment variable {variable}: an API key has printable ASCII characters only")
    return key


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
