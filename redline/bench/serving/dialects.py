"""Requests and stream events of server APIs: OpenAI's chat completions and legacy completions.

Events are decoded into typed structs that skip unknown fields, since decoding runs once per token. The events that
count as a chunk, and so for TTFT and ITL, are those of `vllm bench serve`. In a chat these are events whose first
choice has content, reasoning (`reasoning` or `reasoning_content`; some servers send both with the same text, which is
used once), part of a tool call, or empty content without a role. The last is a token of which the server holds back the
text, such as part of a character; empty content with a role only starts the answer. In completions every event with a
choice counts: a special token has no text.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgspec

from redline.bench.serving.records import Kind, LoadRequest, Usage
from redline.bench.serving.target import ServerTarget
from redline.errors import ConfigError

MOST_TOKENS = 1 << 32  # of one request: a larger count is invalid


class CallDelta(NamedTuple):
    """Part of one tool call. place: index of the call in the answer. arguments: the next part of their text."""

    place: int
    id: str
    name: str
    arguments: str


class Said(msgspec.Struct, gc=False):
    """The content of one event. kind: None if it does not count as a chunk. tokens: of the chunk, if reported.

    error: one line, if the event is an error of the server.
    """

    kind: Kind | None = None
    text: str = ""
    thinking: str = ""
    calls: tuple[CallDelta, ...] = ()
    tokens: int | None = None
    finish: str | None = None
    usage: Usage | None = None
    error: str | None = None


class ServerDialect(NamedTuple):
    """One kind of server API. path: the default endpoint.

    body(ask, target): the request's fields; raises ConfigError if the dialect cannot express the request. read(event):
    decodes the data of one event, or a whole answer that was not streamed; raises msgspec.DecodeError for other data,
    RecursionError if it is nested too deeply.
    """

    path: str
    body: Callable[[LoadRequest, ServerTarget], dict[str, Any]]
    read: Callable[[bytes], Said]


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None


class _LogProbs(msgspec.Struct, gc=False):
    content: list[msgspec.Raw] | None = None  # of a chat
    tokens: list[msgspec.Raw] | None = None  # of completions


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def error_line(data: bytes) -> str:
    """One line of at most 300 characters from an error's body: its message, if it is JSON with one."""
    found: Any
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = data.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(found, dict):
            fields = cast("dict[str, Any]", found)
            found = fields.get(key) or fields
    line = found if isinstance(found, str) else msgspec.json.encode(found).decode()
    return " ".join(line.split())[:300]


def _count(said: int | None) -> int | None:
    """A server's count; None if it is negative or implausibly large."""
    return said if said is not None and 0 <= said < MOST_TOKENS else None


def _counted(usage: _Usage) -> Usage:
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        prompt_tokens=_count(usage.prompt_tokens),
        completion_tokens=_count(usage.completion_tokens),
        cached_tokens=_count(prompt.cached_tokens) if prompt else None,
        reasoning_tokens=_count(completion.reasoning_tokens) if completion else None,
        accepted_tokens=_count(completion.accepted_prediction_tokens) if completion else None,
    )


def _tokens(choice: _Choice) -> int | None:
    if choice.token_ids is not None:
        return len(choice.token_ids)
    if choice.logprobs is not None:
        listed = choice.logprobs.content if choice.logprobs.content is not None else choice.logprobs.tokens
        return None if listed is None else len(listed)
    return None


def _event(data: bytes) -> tuple[Said, _Choice | None]:
    """The fields common to both dialects' events, and the first choice."""
    event = _decode(data)
    said = Said()
    if event.error or (event.object == "error" and event.message):
        said.error = error_line(data)
        return said, None
    if event.usage is not None:
        said.usage = _counted(event.usage)
    if not event.choices:
        return said, None
    choice = event.choices[0]
    said.finish = choice.finish_reason
    if choice.token_ids is not None or choice.logprobs is not None:
        said.tokens = _tokens(choice)
    return said, choice


def _calls(delta: _Delta) -> tuple[CallDelta, ...]:
    found = [
        CallDelta(
            place if call.index is None else call.index,
            call.id or "",
            (call.function and call.function.name) or "",
            (call.function and call.function.arguments) or "",
        )
        for place, call in enumerate(delta.tool_calls or ())
    ]
    if delta.function_call is not None:
        found.append(CallDelta(0, "", delta.function_call.name or "", delta.function_call.arguments or ""))
    return tuple(found)


def _read_chat(data: bytes) -> Said:
    said, choice = _event(data)
    delta = choice and (choice.delta or choice.message)
    if not delta:
        return said
    content = delta.content
    if content:
        said.text = content
        said.kind = "answer"
    if thinking := delta.reasoning or delta.reasoning_content:
        said.thinking = thinking
        said.kind = said.kind or "thinking"
    if delta.tool_calls or delta.function_call is not None:
        said.calls = _calls(delta)
        said.kind = said.kind or "tool"
    if content == "" and not delta.role and said.kind is None:
        said.kind = "answer"
    return said


def _read_completion(data: bytes) -> Said:
    said, choice = _event(data)
    if choice is not None:
        said.text = choice.text or ""
        said.kind = "answer"
    return said


def _common(ask: LoadRequest, target: ServerTarget) -> dict[str, Any]:
    body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if ask.tools is not None:
        body["tools"] = list(ask.tools)
    body |= {**target.body, **ask.extra}
    for field in ("n", "best_of"):
        if body.get(field) not in (None, 1):
            raise ConfigError(
                f"--extra-body has {field} {body[field]!r}: usage counts the tokens of all choices together, so "
                "single ones cannot be measured; use one choice and more requests (--num-prompts)"
            )
    return body


def _chat_body(ask: LoadRequest, target: ServerTarget) -> dict[str, Any]:
    if ask.messages is not None:
        messages: list[dict[str, Any]] = list(ask.messages)
    elif ask.text is not None:
        messages = [{"role": "user", "content": ask.text}]
    else:
        raise ConfigError("--backend openai-chat cannot send token ids as a prompt; use --backend openai, or text")
    return {
        "model": target.model,
        "messages": messages,
        "max_completion_tokens": ask.max_tokens,
        **_common(ask, target),
    }


def _completion_body(ask: LoadRequest, target: ServerTarget) -> dict[str, Any]:
    if ask.text is not None:
        prompt: str | list[int] = ask.text
    elif ask.ids is not None:
        prompt = list(ask.ids)
    else:
        raise ConfigError("--backend openai sends a prompt, not messages; use --backend openai-chat")
    return {"model": target.model, "prompt": prompt, "max_tokens": ask.max_tokens, **_common(ask, target)}


_CHAT = ServerDialect("/v1/chat/completions", _chat_body, _read_chat)
_COMPLETIONS = ServerDialect("/v1/completions", _completion_body, _read_completion)

BACKENDS: dict[str, ServerDialect] = {
    "openai-chat": _CHAT,
    "openai": _COMPLETIONS,
    "vllm": _COMPLETIONS,
    "openai-completions": _COMPLETIONS,
}
