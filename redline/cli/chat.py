"""`redline chat`: a conversation with a server in the terminal, over plain HTTP: works with any OpenAI server."""

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

SHOWN_AFTER_S = 3.0  # seconds without a token after which the waiting time is shown
CONNECT_S, MODELS_S, ANSWER_S = 5, 30, 600  # timeouts: connecting; the list of models; between two pieces of an answer
LOADING_S = 1800  # maximum wait for a server that is still loading its model
MOST_LINE_BYTES = 4 << 20  # maximum length of a line of an event stream

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


class AnswerChunk(msgspec.Struct):
    """The fields of a stream event that are read here. A server may send more fields, or fewer."""

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
    """One conversation with a server. `messages` contains the conversation so far, without the thinking; `pictures` the
    images of the next question, as data URLs.

    url: with or without a scheme and /v1. key: None sends no key. model: None selects the first that the server lists.
    system: a system prompt, or None. Raises ConfigError for a temperature outside 0 to 2, and for an invalid URL, key
    or proxy.
    """

    url: str
    key: str | None
    model: str | None
    thinking: bool
    temperature: float
    system: str | None
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    pictures: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        url = _base(self.url)
        self.url = str(url.copy_with(userinfo=b""))  # for display; httpx sends the address's user and password
        if not 0 <= self.temperature <= 2:  # false for NaN too
            raise ConfigError(f"--temperature is {self.temperature}; expected 0 to 2")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise ConfigError("--key: an API key consists of printable ASCII characters only")
        self.instruct(self.system)
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        here = url.host == "localhost" or url.host.startswith("127.") or url.host == "::1"
        try:
            self._http = httpx.Client(
                base_url=url,
                headers=headers,
                timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
                trust_env=not here,  # no proxy for connections to this machine
            )
        except (ValueError, ImportError, OSError) as error:
            raise ConfigError(f"the proxy or certificates of the environment cannot be used: {error}") from None

    def instruct(self, system: str | None) -> None:
        """Replace the system prompt; None removes it."""
        if self.messages and self.messages[0]["role"] == "system":
            del self.messages[0]
        if system:
            self.messages.insert(0, {"role": "system", "content": _encodable(system)})

    def forget(self) -> None:
        """Clear the conversation, except for the system prompt."""
        del self.messages[bool(self.messages) and self.messages[0]["role"] == "system" :]

    def connect(self, tell: Callable[[str], object], wait: Callable[[float], object] = clock.sleep) -> str:
        """Wait until the server has loaded the model, at most LOADING_S seconds, and return the model's name.

        tell: called with one line before the wait. wait: sleep function (tests). Raises ConfigError if there is no
        server, or if it does not respond like an OpenAI server.
        """
        place = f"{self.url}/v1/models"
        answer, waited = self._models(), 0
        while answer.status_code == 503 and waited < LOADING_S:
            if not waited:
                tell(f"{self.url} is not ready ({_message(answer.content)}); waiting, Ctrl-C quits")
            wait(1)
            waited += 1
            answer = self._models()
        if answer.status_code != 200:
            raise ConfigError(f"{place} returned {_refusal(answer, answer.content)}")
        try:
            models = _decode(answer.content, _Models).data
        except ValueError as error:
            raise ConfigError(f"{place}: not the response of an OpenAI server: {error}; see --url") from None
        if self.model is None and not models:
            raise ConfigError(f"{place} lists no model; name one with --model")
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

    def ask(self, text: str) -> Iterator[AnswerChunk]:
        """Add a question to the conversation and yield the chunks of its answer as the server streams them.

        Raises ConfigError with the server's message if it refuses, and if the answer breaks off or is malformed.
        """
        content: str | list[dict[str, Any]] = _encodable(text)
        if self.pictures:
            kinds = ["video_url" if url.startswith("data:video/") else "image_url" for url in self.pictures]
            parts = [{"type": kind, kind: {"url": url}} for kind, url in zip(kinds, self.pictures, strict=True)]
            content = [*parts, {"type": "text", "text": content}]
            self.pictures = []
        self.messages.append({"role": "user", "content": content})
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
                        chunk = _decode(data, AnswerChunk)
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
            raise ConfigError(f"the server did not respond with a stream of events: {_head(other)}")
        if not ended:
            raise ConfigError("the server closed the connection before the end of the answer")

    def keep(self, content: str, whole: bool) -> bool:
        """Add the visible answer, after `ask`, to the conversation; returns False if the question was removed instead.

        content: the answer without the thinking. whole: whether it is complete.

        Text that was shown stays in the conversation, since the next question may refer to it. A question without any
        answer text is removed, so that the conversation never has two questions in a row.
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

    Standard input is the question if there is no prompt and no terminal, or if the prompt is "-". beside: standard
    error, which receives everything but the answer if there is a single question and `console` is not a terminal.
    history: a file for the questions of conversations. Raises ConfigError.
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
        greeting = Text.assemble((model, "bold"), f" at {client.url}   (Ctrl-C stops an answer, Ctrl-D quits, /help)")
        console.print(greeting, style="dim", soft_wrap=True)
        converse(client, typed.read, console)
    return 0


def converse(client: Client, read: Callable[[], str], console: Console) -> None:
    """Ask the questions from `read` and print the answers, until EOFError. Errors and Ctrl-C end a single answer."""
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
                console.print("(Ctrl-D quits)", style="dim")
                continue
            if text.strip() and not (text.startswith("/") and obey(text, client, tell)):
                _answer(client, text, console, console)
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):
                console.print("(stopped)", style="dim")
        except (ConfigError, OSError) as error:
            console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)


class _Waiting:
    """Shows the time until the first token once it exceeds SHOWN_AFTER_S: prefill of a long prompt takes a while."""

    def __init__(self, notes: Console) -> None:
        self._working = Working("waiting for prefill", stream=cast(TextIO, notes.file))
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
        """Stop: the first token has arrived, or will not."""
        self._timer.cancel()
        with self._lock:
            if self._shown and not self._ended:
                self._working.__exit__(None, None, None)
            self._ended = True


def _answer(client: Client, text: str, console: Console, notes: Console) -> None:
    """Ask, print the answer, and everything else to `notes`. Keeps the conversation valid however the answer ends."""
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
        if not client.keep(content, whole) and notes is console:  # otherwise there is no further question
            notes.print("(the question is forgotten)", style="dim")
    if first is not None and usage is not None:
        tokens, seconds = usage.completion_tokens, clock.monotonic() - first
        rate = f"{(tokens - 1) / seconds:.0f} tokens/s" if tokens > 1 and seconds > 0 else "one token"
        told = f"{tokens} tokens, {rate}, first after {(first - start) * 1000:.0f} ms{_drafts(usage)}"
        notes.print(told, style="dim", highlight=False)


def _drafts(usage: _Usage) -> str:
    """The acceptance of draft tokens, if the server reports it; else empty."""
    details = usage.completion_tokens_details or _Details()
    accepted = details.accepted_prediction_tokens or 0
    drafts = accepted + (details.rejected_prediction_tokens or 0)
    return f", {accepted} of {drafts} drafts accepted ({accepted / drafts:.0%})" if drafts else ""


# Server responses and addresses.


def _base(given: str) -> httpx.URL:
    """Parse a server's address, with or without a scheme and /v1. Raises ConfigError for an invalid one."""
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
    """The lines of an event stream, split at LF only; httpx's reader also splits at U+2028, which JSON may contain."""
    rest = b""
    for data in answer.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
        if len(rest) > MOST_LINE_BYTES:
            raise ConfigError(f"the server's stream cannot be read: a line of more than {MOST_LINE_BYTES:,} bytes")
    yield rest


def _decode(data: bytes, kind: type[T]) -> T:
    """Decode JSON as `kind`. Raises ValueError with the reason and the beginning of the data."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{error}, in: {_head(data)}") from None


def _refusal(answer: httpx.Response, body: bytes) -> str:
    """Describes a response other than 200, with a hint if there is one."""
    hints = {
        301: f"it has moved to {answer.headers.get('location')}; see --url",
        401: "give the server's key with --key or in REDLINE_API_KEY",
        403: "check that the key of --key belongs to this server",
        404: "check that --url is the address of an OpenAI server",
        429: "the server is busy; try again",
        503: "the server is busy or loading; try again",
    }
    hints |= dict.fromkeys((302, 307, 308), hints[301])
    hint = hints.get(answer.status_code)
    return f"{answer.status_code}: {_message(body)}" + (f" ({hint})" if hint else "")


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's format, or the beginning of the body."""
    try:
        return _said(msgspec.json.decode(body, type=dict[str, Any])["error"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return _head(body)


def _said(error: Any) -> str:
    """The message in a body's `error`: from OpenAI's object, or the value itself if it has another form."""
    try:
        message = msgspec.convert(error, _Error).message
    except msgspec.ValidationError:
        message = error if isinstance(error, str) else repr(error)
    return one_line(message) or "no message"


def _head(data: bytes) -> str:
    return one_line(data[:800].decode(errors="replace"), most=200) or "nothing"


def _encodable(text: str) -> str:
    """Replace lone surrogates, which a shell or a server may pass and JSON cannot encode."""
    return text.encode(errors="replace").decode()
