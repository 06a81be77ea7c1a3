"""What clients say in Anthropic's Messages dialect, read into our own words.

As in `openai`, a type annotation is the check, fields that we do not know are ignored, and those that we know and
cannot honour are refused by name. What may hold any JSON is `Raw` at first.

Two things are so because coding agents need them: a model whose name begins with `claude` is the served one, and the
line that Claude Code's system prompt opens with for accounting is left out, since it differs from request to request
and no prompt would be found in the cache.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from redline.api.ask import WHAT_IS_LEFT, Ask
from redline.api.config import Defaults, Limits
from redline.api.dialect import Asked, Streaming
from redline.api.openai import ABSENT, Item, Name, Objects, StopText, check_stops, is_absent, read
from redline.api.sealed import unseal
from redline.chat.constraint import Calls, Constraint
from redline.chat.conversation import Conversation, Message, Tool, ToolCall
from redline.chat.generation import Temperature, TopK, TopP
from redline.errors import RequestError
from redline.wire.base import Record
from redline.wire.job import Sampling

FOREIGN = "claude"  # names of models that begin so are the served one's
_ACCOUNTING = "x-anthropic-billing-header:"

_Count = Annotated[int, Meta(ge=1, lt=WHAT_IS_LEFT)]
_FunctionName = Annotated[str, Meta(min_length=1, max_length=256)]


class _Text(Item, gc=False):
    type: Name
    text: str | None = None


class _Block(Item, gc=False):
    type: Name
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: Name | None = None
    name: _FunctionName | None = None
    input: msgspec.Raw = ABSENT  # dict[str, Any]
    tool_use_id: Name | None = None
    content: str | list[_Text] | None = None


class _Message(Item, gc=False):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(Item, gc=False):
    name: _FunctionName
    type: Name | None = None
    description: str | None = None
    input_schema: msgspec.Raw = ABSENT  # dict[str, Any]
    strict: bool | None = None


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: _Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class _OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: msgspec.Raw = ABSENT


class _Edit(msgspec.Struct):
    type: Name
    keep: msgspec.Raw = ABSENT


class _ContextManagement(msgspec.Struct):
    edits: Annotated[list[_Edit], Meta(max_length=16)] = msgspec.field(default_factory=list[_Edit])


class _Prompt(msgspec.Struct, kw_only=True):
    """What decides the prompt: all of a body of /v1/messages/count_tokens."""

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


class _Messages(_Prompt, kw_only=True):
    max_tokens: _Count
    output_format: msgspec.Raw = ABSENT  # an earlier name of output_config.format
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stream: bool | None = None


class MessagesRequest(Asked, frozen=True):
    """What a body of /v1/messages asks for."""

    name: str | None = None  # of the model, as the client calls it
    omits: bool = False  # thinking travels in its signature only


class CountRequest(Record, frozen=True):
    """What a body of /v1/messages/count_tokens asks for."""

    model: str | None  # None: the served one
    conversation: Conversation


def read_messages(body: bytes, limits: Limits, defaults: Defaults) -> MessagesRequest:
    """Read the body of POST /v1/messages. Raises RequestError, naming the field.

    defaults: what holds where the request is silent; but thinking is off unless it is asked for, as clients of this
    dialect expect.
    """
    request = read(body, _Messages)
    objects = Objects(limits)
    conversation = _conversation(request, limits, objects)
    constraint = _constraint(request, objects)
    if conversation.continues and constraint is not None:
        raise RequestError("an answer that goes on with a message cannot have a form of its own", constraint.param)
    ask = Ask(
        prompts=(conversation,),
        sampling=Sampling(
            max_tokens=request.max_tokens,
            temperature=defaults.temperature if request.temperature is None else request.temperature,
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            top_k=max(defaults.top_k if request.top_k is None else request.top_k, 0),
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        ),
        stop=check_stops(tuple(request.stop_sequences or ()), "stop_sequences"),
        constraint=constraint,
        thinking_budget=request.thinking.budget_tokens if request.thinking else None,
        calls=_calls(request, conversation.tools),
        reasoning=conversation.thinking,
        cut=True,
    )
    omits = request.thinking is not None and request.thinking.display == "omitted"
    return MessagesRequest(
        model=_model(request.model),
        ask=ask,
        stream=Streaming() if request.stream else None,
        name=request.model,
        omits=omits,
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
    messages = _messages(request, limits)
    last = request.messages[-1]
    continues = last.role == "assistant"
    if continues and messages[-1].tool_calls:
        place = f"messages[{len(request.messages) - 1}]"
        raise RequestError("calls have to be answered, by tool_result blocks in a message of the user", place)
    thinking = request.thinking is not None and request.thinking.type != "disabled"
    if continues and thinking:
        raise RequestError("an answer that goes on with the assistant's message cannot think first", "thinking")
    return Conversation(
        messages=messages,
        tools=_tools(request, limits, objects),
        thinking=thinking,
        preserve_thinking=_keeps_thinking(request.context_management),
        add_generation_prompt=not continues,
        continues=continues,
    )


def _keeps_thinking(management: _ContextManagement | None) -> bool:
    """Whether the thinking of every past turn stays. Raises RequestError for edits that we cannot make."""
    keeps = False
    for index, edit in enumerate(management.edits if management else ()):
        if not edit.type.startswith("clear_thinking"):
            raise RequestError(f"{edit.type} is not supported", f"context_management.edits[{index}].type")
        keeps = keeps or bytes(edit.keep) == b'"all"'
    return keeps


def _messages(request: _Prompt, limits: Limits) -> tuple[Message, ...]:
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
            found += _user(message.role, blocks, place)
        if len(found) > limits.messages:
            raise RequestError(f"at most {limits.messages} messages in one request", "messages")
        if calls > limits.calls:
            raise RequestError(f"at most {limits.calls} tool calls in one request", "messages")
    return tuple(found)


def _user(role: str, blocks: Sequence[_Block], place: str) -> list[Message]:
    """Results of tools are messages of their own; texts that stand side by side are one."""
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
                    raise RequestError("a result needs the id of its call", f"{place}[{index}].tool_use_id")
                content = block.content or ""
                if not isinstance(content, str):
                    content = "\n".join(_texts(content, f"{place}[{index}].content"))
                found.append(Message(role="tool", content=content, tool_call_id=block.tool_use_id))
            case kind:
                raise RequestError(_unread(kind), f"{place}[{index}].type")
    show()
    return found or [Message(role=role)]


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
                pass  # nobody but who made it can read it
            case "tool_use":
                calls.append(_call(block, f"{place}[{index}]"))
            case kind:
                raise RequestError(_unread(kind), f"{place}[{index}].type")
    return Message(role="assistant", content="".join(texts), reasoning="\n".join(thoughts), tool_calls=tuple(calls))


def _call(block: _Block, place: str) -> ToolCall:
    if not block.id or not block.name:
        raise RequestError("a call needs its id and the name of its tool", place)
    data = bytes(block.input)
    if not data.startswith(b"{"):
        raise RequestError("Expected an object", f"{place}.input")
    try:
        return ToolCall(id=block.id, name=block.name, arguments=data.decode())
    except UnicodeDecodeError:
        raise RequestError("the input is not valid UTF-8", f"{place}.input") from None


def _texts(blocks: Sequence[_Text], place: str) -> list[str]:
    for index, block in enumerate(blocks):
        if block.type != "text":
            raise RequestError(_unread(block.type), f"{place}[{index}].type")
    return [_text(block.text, f"{place}[{index}]") for index, block in enumerate(blocks)]


def _text(text: str | None, place: str) -> str:
    if text is None:
        raise RequestError("a block of type text needs text", f"{place}.text")
    return text


def _unread(kind: str) -> str:
    return f"a block of type {kind} is not supported here: this server reads text, calls of tools and their results"


def _tools(request: _Prompt, limits: Limits, objects: Objects) -> tuple[Tool, ...]:
    tools = request.tools or ()
    if len(tools) > limits.tools:
        raise RequestError(f"at most {limits.tools} tools in one request", "tools")
    found: list[Tool] = []
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise RequestError(f"a tool of type {tool.type} is not supported: custom only", f"tools[{index}].type")
        place = f"tools[{index}].input_schema"
        schema = None if is_absent(tool.input_schema) else objects.read(tool.input_schema, place)
        found.append(
            Tool(name=tool.name, description=tool.description or "", parameters=schema, strict=bool(tool.strict))
        )
    wanted = request.tool_choice is None or request.tool_choice.type != "none"
    return tuple(found) if wanted else ()


def _calls(request: _Prompt, tools: Sequence[Tool]) -> Calls:
    choice = request.tool_choice
    if choice is None:
        return Calls()
    parallel = not choice.disable_parallel_tool_use
    if choice.type in ("auto", "none"):
        return Calls(parallel=parallel)
    if not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice.type == "any":
        return Calls(mode="required", parallel=parallel)
    if all(tool.name != choice.name for tool in tools):
        raise RequestError(f"{choice.name!r} is not among the tools", "tool_choice.name")
    return Calls(mode="required", named=choice.name, parallel=parallel)


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
