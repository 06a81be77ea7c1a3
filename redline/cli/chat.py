"""`redline chat`: a conversation with a server in the terminal. Plain HTTP, so any OpenAI server will do."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from redline.errors import ConfigError


@dataclass
class Client:
    """One conversation. `messages` holds what has been said, without the thinking."""

    url: str
    key: str
    model: str | None
    thinking: bool
    temperature: float
    system: str | None
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        headers = {"Authorization": f"Bearer {self.key}"}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=httpx.Timeout(600, connect=5))

    def connect(self) -> str:
        """The model's name. ConfigError where nobody answers."""
        try:
            answer = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise ConfigError(f"no server at {self.url} ({error}); start one with `redline serve FOLDER`") from None
        if answer.status_code != 200:
            raise ConfigError(f"{self.url}/v1/models answers {answer.status_code}: {_message(answer.text)}")
        self.model = self.model or str(answer.json()["data"][0]["id"])
        return self.model

    def ask(self, text: str) -> Iterator[dict[str, Any]]:
        """Chunks of the answer, as the server streams them. ConfigError with the server's words if it refuses."""
        self.messages.append({"role": "user", "content": text})
        body = {
            "model": self.model,
            "messages": self.messages,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"thinking": self.thinking},
        }
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    self.messages.pop()
                    raise ConfigError(_message(answer.read().decode(errors="replace")))
                for line in answer.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            raise ConfigError(str(chunk["error"]["message"]))
                        yield chunk
        except httpx.HTTPError as error:
            raise ConfigError(f"the connection to {self.url} broke: {error}") from None


def talk(client: Client, prompt: str | None, console: Console) -> int:
    """One question, or a conversation until an empty line, Ctrl-D or Ctrl-C at the prompt."""
    model = client.connect()
    if prompt is not None:
        _answer(client, prompt, console)
        return 0
    console.print(f"[bold]{model}[/bold] at {client.url}   (an empty line leaves, Ctrl-C stops an answer)", style="dim")
    while True:
        try:
            text = console.input("\n[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        if not text:
            return 0
        try:
            _answer(client, text, console)
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="dim")
        except ConfigError as error:
            console.print(f"error: {error}", style="red", markup=False)


def _answer(client: Client, text: str, console: Console) -> None:
    start, first, usage = time.monotonic(), None, None
    content, thinking = "", False

    def say(piece: str, style: str | None) -> None:
        console.print(piece, end="", style=style, markup=False, highlight=False, soft_wrap=True)

    for chunk in client.ask(text):
        usage = chunk.get("usage") or usage
        if not chunk["choices"]:
            continue
        first = first or time.monotonic()
        delta = chunk["choices"][0]["delta"]
        if thought := delta.get("reasoning") or delta.get("reasoning_content"):
            thinking = True
            say(thought, "dim")
        if piece := delta.get("content"):
            if thinking:
                say("\n\n" if not content else "", None)
                thinking = False
            content += piece
            say(piece, None)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            say(f"\n{function['name']} " if function.get("name") else function.get("arguments") or "", "cyan")
    client.messages.append({"role": "assistant", "content": content})
    console.print()
    if first is not None and usage is not None:
        tokens, seconds = usage["completion_tokens"], time.monotonic() - first
        rate = f"{(tokens - 1) / seconds:.0f} tokens/s" if tokens > 1 and seconds > 0 else "one token"
        told = f"{tokens} tokens, {rate}, first after {(first - start) * 1000:.0f} ms{_drafts(usage)}"
        console.print(told, style="dim", highlight=False)


def _drafts(usage: dict[str, Any]) -> str:
    """How the server's drafter did, where the server has one and says so."""
    details: dict[str, int | None] = usage.get("completion_tokens_details") or {}
    accepted = details.get("accepted_prediction_tokens") or 0
    drafts = accepted + (details.get("rejected_prediction_tokens") or 0)
    return f", {accepted} of {drafts} drafts accepted ({accepted / drafts:.0%})" if drafts else ""


def _message(body: str) -> str:
    """The message of an error in OpenAI's shape, or the body's beginning."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200] or "no message"
