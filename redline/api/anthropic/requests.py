"""Reads requests of Anthropic's Messages API into `Ask`.

As in `openai`, validation is by type annotation, unknown fields are ignored, and known fields that are not supported
are rejected by name. Fields that may hold any JSON are `Raw` at first.

Two rules exist for coding agents: a model name that begins with `claude` selects the served model, and the first line
of Claude Code's system prompt, which is for accounting, is dropped, since it differs in every request and would prevent
every prefix cache hit.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from redline.api import media
from redline.api.ask import WHAT_IS_LEFT, Ask
from redline.api.config import Defaults, Limits
from redline.api.dialect import ParsedRequest, Streaming
from redline.api.openai.requests import (
    ABSENT,
    Item,
    Name,
    Objects,
    StopText,
    calls_of,
    check_stops,
    decoded,
    is_absent,
    read,
)
from redline.api.responses.sealed import unseal
from redline.api.sampling import sampling_of, with_sampling
from redline.chat.constraint import Calls, Constraint
from redline.chat.conversation import Conversation, Message, Tool, ToolCall
from redline.errors import RequestError
from redline.messages.base import Record
from redline.messages.sampling_option import Api

FOREIGN = "claude"  # model names with this prefix select the served model
_ACCOUNTING = "x-anthropic-billing-header:"

_Count = Annotated[int, Meta(ge=1, lt=WHAT_IS_LEFT)]
_FunctionName = Annotated[str, Meta(min_length=1, max_length=256)]


class _Plain(Item, gc=False):
    type: Name
    text: str | None = None


class _Source(Item, gc=False):
    type: Name
    data: str | None = None
    url: str | None = None
    content: str | list[_Plain] | None = None


class _Text(Item, gc=False):
    """A block that may only contain text. source: a document's source, or the URL of a search result."""

    type: Name
    text: str | None = None
    title: str | None = None
    context: str | None = None
    source: str | _Source | None = None
    content: str | list[_Plain] | None = None
    tool_name: _FunctionName | None = None


class _Block(Item, gc=False):
    type: Name
    text: str | None = None
    title: str | None = None
    context: str | None = None
    source: str | _Source | None = None
    thinking: str | None = None
    signature: str | None = None
    id: Name | None = None
    name: _FunctionName | None = None
    input: msgspec.Raw = ABSENT  # dict[str, Any]
    tool_use_id: Name | None = None
    content: msgspec.Raw = ABSENT  # of tool_result and search_result: see _RESULT; of ignored blocks: anything


_RESULT = msgspec.json.Decoder(str | list[_Text] | None)


class _Message(Item, gc=False):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(Item, gc=False):
    name: _FunctionName | None = None
    type: Name | None = None
    description: str | None = None
    input_schema: msgspec.Raw = ABSENT  # dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: _Count | None = None
    display: Name | None = None  # every value but "omitted" returns the thinking


class _OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: msgspec.Raw = ABSENT


class _Edit(msgspec.Struct):
    type: Name
    keep: msgspec.Raw = ABSENT


class _ContextManagement(msgspec.Struct):
    edits: Annotated[list[_Edit], Meta(max_length=16)] = msgspec.field(default_factory=list[_Edit])


class _Prompt(msgspec.Struct, kw_only=True):
    """Fields that determine the prompt: the whole body of /v1/messages/count_tokens."""

    model: Name | None = None
    messages: Annotated[list[_Message], Meta(min_length=1)]
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    context_management: _ContextManagement | None = None
    mcp_servers: msgspec.Raw = ABSENT
    container: msgspec.Raw = ABSENT


if TYPE_CHECKING:
    _Sampled = _Prompt
else:
    _Sampled = with_sampling(_Prompt, Api.ANTHROPIC)


class _Messages(_Sampled, kw_only=True):
    max_tokens: _Count
    output_format: msgspec.Raw = ABSENT  # the former name of output_config.format
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    stream: bool | None = None


class MessagesRequest(ParsedRequest, frozen=True):
    """A parsed body of /v1/messages."""

    name: str | None = None  # the client's model name
    omits: bool = False  # thinking is returned only inside its signature


class CountRequest(Record, frozen=True):
    """A parsed body of /v1/messages/count_tokens."""

    model: str | None  # None: the served model
    conversation: Conversation


def read_messages(body: bytes, limits: Limits, defaults: Defaults) -> MessagesRequest:
    """Read the body of POST /v1/messages. Raises RequestError, naming the field.

    defaults: values of fields that the request does not set; but thinking is off by default, as clients of this API
    expect.
    """
    request = read(body, _Messages)
    objects = Objects(limits)
    conversation = _conversation(request, limits, objects)
    constraint = _constraint(request, objects)
    if conversation.continues and constraint is not None:
        raise RequestError("a constrained answer cannot continue an assistant message", constraint.param)
    ask = Ask(
        prompts=(conversation,),
        sampling=sampling_of(request, Api.ANTHROPIC, defaults, request.max_tokens),
        stop=check_stops(tuple(request.stop_sequences or ()), "stop_sequences"),
        constraint=constraint,
        thinking_budget=request.thinking.budget_tokens if request.thinking else None,
        calls=_calls(request, conversation.tools),
        reasoning=conversation.thinking,
    )
    omits = request.thinking is not None and request.thinking.display == "omitted"
    tools = [tool.type for tool in request.tools or () if tool.type and not _is_function(tool)]
    blocks = [
        block.type for message in request.messages if not isinstance(message.content, str)
        for block in message.content if _is_foreign(block)
    ]  # fmt: skip
    return MessagesRequest(
        model=_model(request.model),
        ask=ask,
        stream=Streaming() if request.stream else None,
        name=request.model,
        omits=omits,
        left_out=tuple(dict.fromkeys(tools + blocks)),
    )


def read_count(body: bytes, limits: Limits, defaults: Defaults) -> CountRequest:
    """Read the body of POST /v1/messages/count_tokens. Raises RequestError, naming the field."""
    request = read(body, _Prompt)
    return CountRequest(model=_model(request.model), conversation=_conversation(request, limits, Objects(limits)))


def _model(asked: str | None) -> str | None:
    return None if asked is None or asked.startswith(FOREIGN) else asked


def _conversation(request: _Prompt, limits: Limits, objects: Objects) -> Conversation:
    for field in ("mcp_servers", "container"):
        raw: msgspec.Raw = getattr(request, field)
        if not is_absent(raw) and bytes(raw) != b"[]":
            raise RequestError(f"{field} is not supported", field)
    tools = _tools(request, limits, objects)
    images = media.Images(limits)
    messages = images.placed(_messages(request, limits, {tool.name: tool for tool in tools if tool.deferred}, images))
    last = request.messages[-1]
    continues = last.role == "assistant"
    if continues and messages[-1].tool_calls:
        place = f"messages[{len(request.messages) - 1}]"
        raise RequestError("tool calls must be followed by a user message with tool_result blocks", place)
    thinking = request.thinking is not None and request.thinking.type != "disabled"
    if continues and thinking:
        raise RequestError("thinking is not supported when continuing an assistant message", "thinking")
    return Conversation(
        messages=messages,
        tools=tools,
        thinking=thinking,
        preserve_thinking=_keeps_thinking(request.context_management),
        add_generation_prompt=not continues,
        continues=continues,
    )


def _keeps_thinking(management: _ContextManagement | None) -> bool:
    """Whether the thinking of all past turns is kept. Raises RequestError for unsupported edits."""
    keeps = False
    for index, edit in enumerate(management.edits if management else ()):
        if not edit.type.startswith("clear_thinking"):
            raise RequestError(f"{edit.type} is not supported", f"context_management.edits[{index}].type")
        keeps = keeps or bytes(edit.keep) == b'"all"'
    return keeps


def _messages(request: _Prompt, limits: Limits, deferred: dict[str, Tool], images: media.Images) -> tuple[Message, ...]:
    """deferred: tools by name; the message with the first result that refers to a tool declares it."""
    found: list[Message] = []
    match request.system:
        case None | "":
            pass
        case str() as text:
            found.append(Message(role="system", content=text))
        case blocks:
            texts = _texts(blocks, "system")
            if shown := [text for text in texts if not text.startswith(_ACCOUNTING)]:
                found.append(Message(role="system", content="\n\n".join(shown)))
    calls = 0
    for index, message in enumerate(request.messages):
        place = f"messages[{index}].content"
        blocks = message.content
        if isinstance(blocks, str):
            found.append(Message(role=message.role, content=blocks))
        elif message.role == "assistant":
            found.append(_assistant(blocks, place))
            calls += len(found[-1].tool_calls)
        else:
            found += _user(message.role, blocks, place, deferred, images)
        if len(found) > limits.messages:
            raise RequestError(f"at most {limits.messages} messages in one request", "messages")
        if calls > limits.calls:
            raise RequestError(f"at most {limits.calls} tool calls in one request", "messages")
    return tuple(found)


def _user(
    role: str, blocks: Sequence[_Block], place: str, deferred: dict[str, Tool], images: media.Images
) -> list[Message]:
    """Messages of a user turn: each tool result is a separate message; adjacent texts are joined."""
    found: list[Message] = []
    texts: list[str] = []

    def show() -> None:
        if texts:
            found.append(Message(role=role, content="\n".join(texts)))
            texts.clear()

    for index, block in enumerate(blocks):
        match block.type:
            case "text":
                texts.append(_text(block.text, f"{place}[{index}]"))
            case "tool_result" if role == "user":
                show()
                if not block.tool_use_id:
                    raise RequestError("a tool_result needs its tool_use_id", f"{place}[{index}].tool_use_id")
                found.append(_result(block, block.tool_use_id, f"{place}[{index}].content", deferred, images))
            case "image" if images.read:
                texts.append(_image(block, f"{place}[{index}]", images))
            case _ if _is_foreign(block):
                pass
            case kind:
                if (text := _document(block, f"{place}[{index}]")) is None:
                    raise media.refused(kind, f"{place}[{index}].type", _unread(kind))
                texts.append(text)
    show()
    return found or [Message(role=role)]


def _image(block: _Text | _Block, place: str, images: media.Images) -> str:
    """The mark of an image block."""
    match block.source:
        case _Source(type="base64", data=data):
            return images.of_base64(data, f"{place}.source.data")
        case _Source(type="url", url=url):
            return images.of_url(url, f"{place}.source.url")
        case _:
            raise RequestError("expected a source of type base64 or url", f"{place}.source")


def _result(block: _Block, call: str, place: str, deferred: dict[str, Tool], images: media.Images) -> Message:
    content = None if is_absent(block.content) else decoded(_RESULT, block.content, place)
    if content is None or isinstance(content, str):
        return Message(role="tool", content=content or "", tool_call_id=call)
    texts: list[str] = []
    declares: list[Tool] = []
    for index, part in enumerate(content):
        if part.type == "image" and images.read:
            texts.append(_image(part, f"{place}[{index}]", images))
            continue
        if part.type != "tool_reference":
            texts.append(_text_of(part, f"{place}[{index}]", of_result=True))
            continue
        if part.tool_name is None:
            raise RequestError("a tool_reference needs the tool's name", f"{place}[{index}].tool_name")
        texts.append(part.tool_name)
        if (tool := deferred.pop(part.tool_name, None)) is not None:
            declares.append(tool)
    return Message(role="tool", content="\n".join(texts), tool_call_id=call, declares=tuple(declares))


def _is_foreign(block: _Block) -> bool:
    """Whether a block belongs to a tool that ran at Anthropic: its input or its result."""
    return block.type in ("server_tool_use", "mcp_tool_use") or block.type.endswith("_tool_result")


def _assistant(blocks: Sequence[_Block], place: str) -> Message:
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        match block.type:
            case "text":
                texts.append(_text(block.text, f"{place}[{index}]"))
            case "thinking":
                thoughts.append(block.thinking or unseal(block.signature or ""))
            case "redacted_thinking":
                pass  # encrypted by the server that produced it
            case "tool_use":
                calls.append(_call(block, f"{place}[{index}]"))
            case _ if _is_foreign(block):
                pass
            case kind:
                raise RequestError(_unread(kind), f"{place}[{index}].type")
    return Message(role="assistant", content="".join(texts), reasoning="\n".join(thoughts), tool_calls=tuple(calls))


def _call(block: _Block, place: str) -> ToolCall:
    if not block.id or not block.name:
        raise RequestError("a tool_use block needs its id and the tool's name", place)
    data = bytes(block.input)
    if not data.startswith(b"{"):
        raise RequestError("Expected an object", f"{place}.input")
    try:
        return ToolCall(id=block.id, name=block.name, arguments=data.decode())
    except UnicodeDecodeError:
        raise RequestError("the input is not valid UTF-8", f"{place}.input") from None


def _texts(blocks: Sequence[_Text], place: str) -> list[str]:
    return [_text_of(block, f"{place}[{index}]") for index, block in enumerate(blocks)]


def _text_of(block: _Text, place: str, *, of_result: bool = False) -> str:
    """of_result: the block is in a tool result, where text replaces an image."""
    text = _text(block.text, place) if block.type == "text" else _document(block, place, of_result=of_result)
    if text is None and of_result:
        text = media.in_result(block.type)
    if text is None:
        raise media.refused(block.type, f"{place}.type", _unread(block.type))
    return text


def _document(block: _Text | _Block, place: str, *, of_result: bool = False) -> str | None:
    """The text of a document or search result, with its title; None for other blocks."""
    match block.type, block.source:
        case "document", _Source(type="text", data=str() as text):
            pass
        case "document", _Source(type="content", content=(str() | list()) as content):
            text = _joined(content, f"{place}.source.content", of_result=of_result)
        case "search_result", str() as address:
            content = block.content
            if isinstance(content, msgspec.Raw):
                content = None if is_absent(content) else decoded(_RESULT, content, f"{place}.content")
            text = f"{address}\n{_joined(content, f'{place}.content', of_result=of_result)}"
        case _:
            return None
    return "\n".join(filter(None, (block.title, block.context, text)))


def _joined(content: str | Sequence[_Plain | _Text] | None, place: str, *, of_result: bool) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, block in enumerate(content):
        instead = media.in_result(block.type) if of_result else None
        if block.type != "text" and instead is None:
            raise media.refused(block.type, f"{place}[{index}].type", _unread(block.type))
        texts.append(instead or _text(block.text, f"{place}[{index}]"))
    return "\n".join(texts)


def _text(text: str | None, place: str) -> str:
    if text is None:
        raise RequestError("a block of type text needs text", f"{place}.text")
    return text


def _unread(kind: str) -> str:
    return f"a block of type {kind} is not supported here: this server supports text, tool calls and tool results"


def _tools(request: _Prompt, limits: Limits, objects: Objects) -> tuple[Tool, ...]:
    tools = request.tools or ()
    if len(tools) > limits.tools:
        raise RequestError(f"at most {limits.tools} tools in one request", "tools")
    # Tools deferred for Anthropic's own tool search, which does not run here, are declared at once.
    searched = any((tool.type or "").startswith("tool_search_tool") for tool in tools)
    found: list[Tool] = []
    for index, tool in enumerate(tools):
        place = f"tools[{index}].input_schema"
        if not _is_function(tool):
            if not is_absent(tool.input_schema):
                raise RequestError(f"a tool with a schema needs type custom, not {tool.type}", f"tools[{index}].type")
            continue  # ignored: see ParsedRequest.left_out
        if tool.name is None:
            raise RequestError("a tool needs its name", f"tools[{index}].name")
        schema = None if is_absent(tool.input_schema) else objects.read(tool.input_schema, place)
        found.append(
            Tool(
                name=tool.name,
                description=tool.description or "",
                parameters=schema,
                strict=bool(tool.strict),
                deferred=bool(tool.defer_loading) and not searched,
                param=place,
            )
        )
    wanted = request.tool_choice is None or request.tool_choice.type != "none"
    return tuple(found) if wanted else ()


def _is_function(tool: _Tool) -> bool:
    return tool.type in (None, "custom")


def _calls(request: _Prompt, tools: Sequence[Tool]) -> Calls:
    choice = request.tool_choice or _ToolChoice(type="auto")
    parallel = not choice.disable_parallel_tool_use
    match choice.type:
        case "tool":
            if choice.name is None:
                raise RequestError("a tool_choice of type tool needs a name", "tool_choice.name")
            return calls_of("required", [choice.name], tools, parallel, "tool_choice.name")
        case "any":
            return calls_of("required", None, tools, parallel, "tool_choice")
        case "auto" | "none":
            return Calls(parallel=parallel)


def _constraint(request: _Messages, objects: Objects) -> Constraint | None:
    config = request.output_config
    places = {
        "output_config.format": config.format if config else msgspec.Raw(),
        "output_format": request.output_format,
    }
    for place, raw in places.items():
        if is_absent(raw):
            continue
        match objects.read(raw, place):
            case {"type": "json_schema", "schema": dict()} as value:
                return Constraint(kind="json_schema", text=json.dumps(value["schema"]), param=f"{place}.schema")
            case _:
                raise RequestError("Expected the type json_schema and a schema", place)
    return None


MessagesBody, CountBody = _Messages, _Prompt  # for `/openapi.json`
