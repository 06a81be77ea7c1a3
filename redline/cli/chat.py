"""`redline chat`: a conversation with a server in the terminal. Plain HTTP, so any OpenAI server will do."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import httpx
import msgspec
from rich.console import Console
from rich.text import Text

from redline import clock
from redline.cli.flow import Flow
from redline.cli.prompt import Prompt, is_interactive, piped
from redline.cli.terminal import one_line
from redline.errors import ConfigError
from redline.progress import Working

SHOWN_AFTER_S = 3.0  # without a word of an answer
CONNECT_S, MODELS_S, ANSWER_S = 5, 30, 600  # to connect; for the list of models; between two pieces of an answer
LOADING_S = 1800  # to wait for a server that is still loading its model
MOST_LINE_BYTES = 4 << 20  # of one line of a stream of events

T = TypeVar("T")


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    completion_tokens_details: _Details | None = None


class Chunk(msgspec.Struct):
    """The part of a stream's event that is read here. A server may send more members, or fewer."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Error(msgspec.Struct):
    message: str


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass
class Client:
    """One conversation with a server. `messages` holds what has been said, without the thinking.

    url: with or without a scheme and /v1. key: None sends none. model: None: the first that the server names. system: a
    system prompt, if any. Raises ConfigError for a temperature beyond 0 to 2, and for a URL, a key or a proxy that
    cannot be used.
    """

    url: str
    key: str | None
    model: str | None
    thinking: bool
    temperature: float
    system: str | None
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def __post_init__(self) -> None:
        url = _base(self.url)
        self.url = str(url.copy_with(userinfo=b""))  # which is shown; httpx sends a user and password of the address
        if not 0 <= self.temperature <= 2:  # NaN neither
            raise ConfigError(f"--temperature is {self.temperature}; expected 0 to 2")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise ConfigError("--key: a key has letters, digits and signs of ASCII alone")
        self.instruct(self.system)
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        here = url.host == "localhost" or url.host.startswith("127.") or url.host == "::1"
        try:
            self._http = httpx.Client(
                base_url=url,
                headers=headers,
                timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
                trust_env=not here,  # no proxy leads to this machine itself
            )
        except (ValueError, ImportError, OSError) as error:
            raise ConfigError(f"the proxy or certificates of the environment cannot be used: {error}") from None

    def instruct(self, system: str | None) -> None:
        """A system prompt in the place of the one there is; None: none."""
        if self.messages and self.messages[0]["role"] == "system":
            del self.messages[0]
        if system:
            self.messages.insert(0, {"role": "system", "content": _encodable(system)})

    def forget(self) -> None:
        """What has been said, but for the system prompt."""
        del self.messages[bool(self.messages) and self.messages[0]["role"] == "system" :]

    def connect(self, tell: Callable[[str], object], wait: Callable[[float], object] = clock.sleep) -> str:
        """The model's name, once the server has loaded it. It is waited for, for LOADING_S seconds at most.

        tell: called with a line before it waits. wait: sleeps for so many seconds (tests). Raises ConfigError where
        nobody answers, or not as an OpenAI server does.
        """
        place = f"{self.url}/v1/models"
        answer, waited = self._models(), 0
        while answer.status_code == 503 and waited < LOADING_S:
            if not waited:
                tell(f"{self.url} is not ready ({_message(answer.content)}); waiting, Ctrl-C leaves")
            wait(1)
            waited += 1
            answer = self._models()
        if answer.status_code != 200:
            raise ConfigError(f"{place} answers {_refusal(answer, answer.content)}")
        try:
            models = _decode(answer.content, _Models).data
        except ValueError as error:
            raise ConfigError(f"{place} answers, but not as an OpenAI server does: {error}; see --url") from None
        if self.model is None and not models:
            raise ConfigError(f"{place} names no model; name one with --model")
        self.model = self.model or models[0].id
        return self.model

    def _models(self) -> httpx.Response:
        try:
            return self._http.get("/v1/models", timeout=httpx.Timeout(MODELS_S, connect=CONNECT_S))
        except httpx.ReadTimeout:
            raise ConfigError(
                f"{self.url} does not answer within {MODELS_S} s; is that the address of a server, and has it loaded?"
            ) from None
        except httpx.HTTPError as error:
            raise ConfigError(f"no server at {self.url} ({error}); start one with `redline serve FOLDER`") from None

    def ask(self, text: str) -> Iterator[Chunk]:
        """Add a question to the conversation: the chunks of its answer, as the server streams them.

        Raises ConfigError with the server's words if it refuses, and where the answer breaks off or cannot be read.
        """
        self.messages.append({"role": "user", "content": _encodable(text)})
        body = {
            "model": self.model,
            "messages": self.messages,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"thinking": self.thinking},
        }
        ended, other = False, b""
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise ConfigError(_refusal(answer, answer.read()))
                for line in _lines(answer):
                    if not line.startswith(b"data:"):
                        other += line[: 200 - len(other)]
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    try:
                        chunk = _decode(data, Chunk)
                    except ValueError as error:
                        raise ConfigError(f"the server's stream cannot be read: {error}") from None
                    if chunk.error is not None:
                        raise ConfigError(_said(chunk.error))
                    ended = ended or any(choice.finish_reason for choice in chunk.choices or ())
                    other = b""
                    yield chunk
        except httpx.HTTPError as error:
            raise ConfigError(f"the connection to {self.url} broke: {error}") from None
        if other:
            raise ConfigError(f"the server answers, but not with a stream of events: {_head(other)}")
        if not ended:
            raise ConfigError("the server ended the connection before the answer's end")

    def keep(self, content: str, whole: bool) -> bool:
        """Add what was shown of the answer, after `ask`, to the conversation; False where the question is forgotten.

        content: the answer without the thinking. whole: it came to its end.

        What has been shown stays in the conversation, since the next question may speak of it. A question without a
        word of an answer goes, so that the conversation never has two of them in a row.
        """
        if content or whole:
            self.messages.append({"role": "assistant", "content": _encodable(content)})
            return True
        self.messages.pop()
        return False


def talk(
    client: Client,
    prompt: str | None,
    console: Console,
    beside: Console | None = None,
    history: Path | None = None,
) -> int:
    """Ask `prompt`, or converse until Ctrl-D; returns the exit code 0.

    Without a prompt, where nobody sits at a terminal, and for the prompt "-", standard input is the question. beside:
    standard error, which gets all but the answer where there is one question and `console` is no terminal. history: a
    file that keeps the questions of conversations. Raises ConfigError.
    """
    once = prompt is not None or not is_interactive()
    notes = beside if beside is not None and once and not console.is_terminal else console

    def tell(text: str) -> None:
        notes.print(text, style="dim", highlight=False, soft_wrap=True)

    if once:
        question = piped() if prompt is None or prompt == "-" else prompt
        client.connect(tell)
        _answer(client, question, console, notes)
        return 0
    with Prompt(history) as typed:
        model = client.connect(tell)
        greeting = Text.assemble((model, "bold"), f" at {client.url}   (Ctrl-C stops an answer, Ctrl-D leaves, /help)")
        console.print(greeting, style="dim", soft_wrap=True)
        converse(client, typed.read, console)
    return 0


def converse(client: Client, read: Callable[[], str], console: Console) -> None:
    """Ask what `read` gives and print the answers until it raises EOFError. An error or Ctrl-C ends one answer only."""
    from redline.cli.commands import obey

    def tell(text: str) -> None:
        console.print(text, style="dim", highlight=False, soft_wrap=True, markup=False)

    while True:
        try:
            console.print()
            try:
                text = read()
            except EOFError:
                return
            except KeyboardInterrupt:
                console.print("(Ctrl-D leaves)", style="dim")
                continue
            if text.strip() and not (text.startswith("/") and obey(text, client, tell)):
                _answer(client, text, console, console)
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):
                console.print("(stopped)", style="dim")
        except (ConfigError, OSError) as error:
            console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)


class _Waiting:
    """Says how long the first word has been waited for, once that is SHOWN_AFTER_S: a long prompt is computed first."""

    def __init__(self, notes: Console) -> None:
        self._working = Working("the prompt is computed", stream=cast(TextIO, notes.file))
        self._lock, self._shown, self._ended = threading.Lock(), False, False
        self._timer = threading.Timer(SHOWN_AFTER_S, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                self._working.__enter__()
                self._shown = True

    def end(self) -> None:
        """The first word is here, or will not come."""
        self._timer.cancel()
        with self._lock:
            if self._shown and not self._ended:
                self._working.__exit__(None, None, None)
            self._ended = True


def _answer(client: Client, text: str, console: Console, notes: Console) -> None:
    """Asks, prints the answer, and all else to `notes`. Keeps the conversation sound however the answer ends."""
    start, first, usage = clock.monotonic(), None, None
    content, thinking, whole = "", False, False
    said = Flow(console)
    beside = said if notes is console else Flow(notes)
    waiting = _Waiting(notes)
    try:
        for chunk in client.ask(text):
            usage = chunk.usage or usage
            delta = chunk.choices[0].delta if chunk.choices else None
            if delta is None:
                continue
            if first is None and (delta.reasoning or delta.reasoning_content or delta.content or delta.tool_calls):
                waiting.end()
            first = first or clock.monotonic()
            if thought := delta.reasoning or delta.reasoning_content:
                thinking = True
                beside.add(thought, "dim")
            if piece := delta.content:
                if thinking:
                    beside.add("\n\n" if not content else "", None)
                    thinking = False
                content += piece
                said.add(piece, None)
            for call in delta.tool_calls or ():
                function = call.function or _Function()
                name = f"\n{function.name} " if function.name else ""
                said.add(name + (function.arguments or ""), "cyan", whole=True)
        whole = True
    finally:
        waiting.end()
        beside.end()
        said.end()
        if not client.keep(content, whole) and notes is console:  # else nobody asks on
            notes.print("(the question is forgotten)", style="dim")
    if first is not None and usage is not None:
        tokens, seconds = usage.completion_tokens, clock.monotonic() - first
        rate = f"{(tokens - 1) / seconds:.0f} tokens/s" if tokens > 1 and seconds > 0 else "one token"
        told = f"{tokens} tokens, {rate}, first after {(first - start) * 1000:.0f} ms{_drafts(usage)}"
        notes.print(told, style="dim", highlight=False)


def _drafts(usage: _Usage) -> str:
    """How the server's drafter did, where the server has one and says so."""
    details = usage.completion_tokens_details or _Details()
    accepted = details.accepted_prediction_tokens or 0
    drafts = accepted + (details.rejected_prediction_tokens or 0)
    return f", {accepted} of {drafts} drafts accepted ({accepted / drafts:.0%})" if drafts else ""


# What servers say, and how they are reached.


def _base(given: str) -> httpx.URL:
    """A server's address, which people write with or without a scheme and /v1. Raises ConfigError for none."""
    text = given.strip()
    try:
        url = httpx.URL(text if "://" in text else f"http://{text}")
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"--url {given!r}: {error}; expected an address such as http://127.0.0.1:8000") from None
    if url.scheme not in ("http", "https") or not url.host or not (url.port is None or 0 < url.port < 65536):
        raise ConfigError(f"--url {given!r}: expected an address such as http://127.0.0.1:8000")
    path = url.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/models").removesuffix("/v1")
    return url.copy_with(path=path, query=None, fragment=None)


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    """The lines of a stream of events. LF alone ends one; httpx's reader takes U+2028 too, which JSON may hold."""
    rest = b""
    for data in answer.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
        if len(rest) > MOST_LINE_BYTES:
            raise ConfigError(f"the server's stream cannot be read: a line of more than {MOST_LINE_BYTES:,} bytes")
    yield rest


def _decode(data: bytes, kind: type[T]) -> T:
    """JSON as `kind`. Raises ValueError, which says what was wrong and how the data begins."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{error}, in: {_head(data)}") from None


def _refusal(answer: httpx.Response, body: bytes) -> str:
    """What to know of an answer that is not 200."""
    hints = {
        301: f"it has moved to {answer.headers.get('location')}; see --url",
        401: "give the server's key with --key or in REDLINE_API_KEY",
        403: "is the key of --key one of this server's?",
        404: "is that the address of an OpenAI server? see --url",
        429: "it is busy; ask again",
        503: "it is busy or loading; ask again",
    }
    hints |= dict.fromkeys((302, 307, 308), hints[301])
    hint = hints.get(answer.status_code)
    return f"{answer.status_code}: {_message(body)}" + (f" ({hint})" if hint else "")


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's shape, or the body's beginning."""
    try:
        return _said(msgspec.json.decode(body, type=dict[str, Any])["error"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return _head(body)


def _said(error: Any) -> str:
    """The message in the `error` of a body: that of OpenAI's object, or whatever stands there instead."""
    try:
        message = msgspec.convert(error, _Error).message
    except msgspec.ValidationError:
        message = error if isinstance(error, str) else repr(error)
    return one_line(message) or "no message"


def _head(data: bytes) -> str:
    return one_line(data[:800].decode(errors="replace"), most=200) or "nothing"


def _encodable(text: str) -> str:
    """Without halves of characters, which a shell or a server may hand us and JSON cannot carry."""
    return text.encode(errors="replace").decode()
