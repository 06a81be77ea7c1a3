"""What clients say in OpenAI's Responses dialect, read into our own words.

As in `openai`, a type annotation is the check, fields that we do not know are ignored, and those that we know and
cannot honour are refused by name. The items of an input that the assistant said one after another (reasoning, a text,
calls) become one message, as the model had said them.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from redline.api.ask import WHAT_IS_LEFT, Ask
from redline.api.config import Defaults, Limits
from redline.api.dialect import Asked, Streaming
from redline.api.openai import ABSENT, Item, Name, Objects, is_absent, one_line, read
from redline.api.sealed import unseal
from redline.chat.constraint import Calls, Constraint
from redline.chat.conversation import Conversation, Message, Tool, ToolCall
from redline.chat.generation import Temperature, TopP
from redline.errors import RequestError
from redline.wire.job import Sampling

_Count = Annotated[int, Meta(ge=1, lt=WHAT_IS_LEFT)]
_FunctionName = Annotated[str, Meta(min_length=1, max_length=256)]
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
CHOICE_BYTES = 1 << 10


class _Part(Item, gc=False):
    type: Name
    text: str | None = None
    refusal: str | None = None


class _Input(Item, gc=False):
    type: Name | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None
    call_id: Name | None = None
    name: _FunctionName | None = None
    arguments: str | None = None
    output: str | list[_Part] | None = None


class _Tool(Item, gc=False):
    type: Name
    name: _FunctionName | None = None
    description: str | None = None
    parameters: msgspec.Raw = ABSENT  # dict[str, Any] | None
    strict: bool | None = None


class _Reasoning(msgspec.Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class _Text(msgspec.Struct):
    format: msgspec.Raw = ABSENT
    verbosity: Literal["low", "medium", "high"] | None = None


class _Responses(msgspec.Struct, kw_only=True):
    input: str | Annotated[list[_Input], Meta(min_length=1)]
    model: Name | None = None
    instructions: str | None = None
    max_output_tokens: _Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: Name | None = None
    tools: msgspec.Raw = ABSENT  # list[_Tool], which answers repeat
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    include: Annotated[list[Name], Meta(max_length=16)] | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    background: bool | None = None
    top_logprobs: int | None = None
    truncation: Name | None = None
    conversation: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT


class ResponsesRequest(Asked, frozen=True):
    """What a body of /v1/responses asks for, and what its answer repeats of it."""

    said: tuple[Message, ...] = ()  # the conversation but for the instructions, which hold for one answer
    previous: str | None = None  # the response that it goes on with
    stores: bool = False  # the client would have the response kept
    sealed: bool = False  # reasoning comes in encrypted_content too
    owner: str = ""  # whose response it is: the name of the key
    instructions: str | None = None
    tools: bytes = b"[]"  # JSON in one line, as are the next two: they go into lines of event streams
    tool_choice: bytes = b'"auto"'
    format: bytes = b'{"type":"text"}'
    parallel: bool = True
    effort: str | None = None
    summary: str | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    max_output_tokens: int | None = None


def read_responses(body: bytes, limits: Limits, defaults: Defaults) -> ResponsesRequest:
    """Read the body of POST /v1/responses. Raises RequestError, naming the field.

    defaults: what holds where the request is silent.
    """
    request = read(body, _Responses)
    _refuse(request)
    objects = Objects(limits)
    tools = _tools(request.tools, limits, objects)
    choice = _choice(request.tool_choice)
    said = _messages(request.input, limits)
    reasoning, text = request.reasoning or _Reasoning(), request.text or _Text()
    constraint = None if is_absent(text.format) else _constraint(objects.read(text.format, "text.format"))
    parallel = request.parallel_tool_calls is not False
    conversation = Conversation(
        messages=(*_instructions(request.instructions), *said),
        tools=() if choice == "none" else tools,
        thinking=defaults.thinking if reasoning.effort is None else reasoning.effort != "none",
    )
    ask = Ask(
        prompts=(conversation,),
        sampling=Sampling(
            max_tokens=request.max_output_tokens or WHAT_IS_LEFT,
            temperature=defaults.temperature if request.temperature is None else request.temperature,
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            top_k=max(defaults.top_k, 0),
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        ),
        constraint=constraint,
        calls=_calls(choice, tools, parallel),
        cut=True,
        param="input",
    )
    return ResponsesRequest(
        model=request.model,
        ask=ask,
        stream=Streaming() if request.stream else None,
        said=said,
        previous=request.previous_response_id,
        stores=request.store is not False,
        sealed="reasoning.encrypted_content" in (request.include or ()),
        instructions=request.instructions,
        tools=b"[]" if is_absent(request.tools) else one_line(request.tools, "tools"),
        tool_choice=b'"auto"' if is_absent(request.tool_choice) else one_line(request.tool_choice, "tool_choice"),
        format=b'{"type":"text"}' if is_absent(text.format) else one_line(text.format, "text.format"),
        parallel=parallel,
        effort=reasoning.effort,
        summary=reasoning.summary,
        metadata=request.metadata or {},
        max_output_tokens=request.max_output_tokens,
    )


def behind(asked: ResponsesRequest, history: tuple[Message, ...], limits: Limits) -> ResponsesRequest:
    """The same request, behind a conversation that went before. Raises RequestError beyond the bounds."""
    said = (*history, *asked.said)
    _check_bounds(said, limits)
    [conversation] = asked.ask.prompts
    assert isinstance(conversation, Conversation)
    whole = msgspec.structs.replace(conversation, messages=(*_instructions(asked.instructions), *said))
    ask = msgspec.structs.replace(asked.ask, prompts=(whole,))
    return msgspec.structs.replace(asked, said=said, ask=ask)


def _instructions(text: str | None) -> tuple[Message, ...]:
    return (Message(role="system", content=text),) if text else ()


def _refuse(request: _Responses) -> None:
    if request.background:
        raise RequestError("background is not supported: responses are answered while their client waits", "background")
    if request.top_logprobs or "message.output_text.logprobs" in (request.include or ()):
        raise RequestError("log probabilities are not supported here: ask /v1/chat/completions", "top_logprobs")
    if request.truncation not in (None, "disabled"):
        raise RequestError("truncation is not supported: disabled only", "truncation")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise RequestError("verbosity is not supported: medium only", "text.verbosity")
    for field in ("conversation", "prompt"):
        if not is_absent(getattr(request, field)):
            raise RequestError(f"{field} is not supported", field)


def _messages(given: str | list[_Input], limits: Limits) -> tuple[Message, ...]:
    if isinstance(given, str):
        return (Message(role="user", content=given),)
    found: list[Message] = []
    turn = _Turn()
    for index, item in enumerate(given):
        place = f"input[{index}]"
        match item.type:
            case None | "message" if item.role == "assistant":
                turn.say(_content(item.content, f"{place}.content"), found)
            case None | "message":
                if item.role is None or item.content is None:
                    raise RequestError("a message needs its role and content", place)
                turn.end(found)
                role = "system" if item.role == "developer" else item.role
                found.append(Message(role=role, content=_content(item.content, f"{place}.content")))
            case "reasoning":
                turn.think(_reasoning(item, place), found)
            case "function_call":
                if not item.call_id or not item.name:
                    raise RequestError("a call needs its call_id and name", place)
                turn.calls.append(ToolCall(id=item.call_id, name=item.name, arguments=item.arguments or ""))
            case "function_call_output":
                if not item.call_id:
                    raise RequestError("an output needs the call_id of its call", f"{place}.call_id")
                turn.end(found)
                content = _content(item.output, f"{place}.output")
                found.append(Message(role="tool", content=content, tool_call_id=item.call_id))
            case kind:
                raise RequestError(f"an item of type {kind} is not supported", f"{place}.type")
        if len(found) > limits.messages:
            break
    turn.end(found)
    _check_bounds(found, limits)
    return tuple(found)


def _check_bounds(messages: Sequence[Message], limits: Limits) -> None:
    if len(messages) > limits.messages:
        raise RequestError(f"at most {limits.messages} messages in one request", "input")
    if sum(len(message.tool_calls) for message in messages) > limits.calls:
        raise RequestError(f"at most {limits.calls} tool calls in one request", "input")


class _Turn:
    """What the assistant said, item by item, until somebody else speaks."""

    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []

    def think(self, text: str, found: list[Message]) -> None:
        """Reasoning opens a turn."""
        if self.texts or self.calls:
            self.end(found)
        self.thoughts.append(text)

    def say(self, text: str, found: list[Message]) -> None:
        """A text comes before calls."""
        if self.calls:
            self.end(found)
        self.texts.append(text)

    def end(self, found: list[Message]) -> None:
        """Somebody else speaks: add the message, if there is one."""
        if self.thoughts or self.texts or self.calls:
            found.append(
                Message(
                    role="assistant",
                    content="".join(self.texts),
                    reasoning="\n".join(self.thoughts),
                    tool_calls=tuple(self.calls),
                )
            )
        self.thoughts, self.texts, self.calls = [], [], []


def _reasoning(item: _Input, place: str) -> str:
    """As the model had it: the text, or what we sealed, or else the summary."""
    if item.content:
        return _content(item.content, f"{place}.content")
    return unseal(item.encrypted_content or "") or _content(item.summary, f"{place}.summary")


def _content(content: str | list[_Part] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXTS, "refusal"):
            raise RequestError(f"content of type {part.type} is not supported: text only", f"{place}[{index}].type")
        if text is None:
            raise RequestError(f"a part of type {part.type} needs its text", f"{place}[{index}]")
        texts.append(text)
    return "".join(texts)


def _tools(raw: msgspec.Raw, limits: Limits, objects: Objects) -> tuple[Tool, ...]:
    if is_absent(raw):
        return ()
    if memoryview(raw).nbytes > 2 * limits.json_bytes:
        raise RequestError(f"more than {2 * limits.json_bytes} bytes of JSON", "tools")
    tools = read(b'{"tools":%b}' % bytes(raw), _Tools).tools
    if len(tools) > limits.tools:
        raise RequestError(f"at most {limits.tools} tools in one request", "tools")
    found: list[Tool] = []
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise RequestError(f"a tool of type {tool.type} is not supported: function only", f"tools[{index}].type")
        if not tool.name:
            raise RequestError("a function needs its name", f"tools[{index}].name")
        parameters: dict[str, Any] | None = None
        if not is_absent(tool.parameters):
            parameters = objects.read(tool.parameters, f"tools[{index}].parameters")
        description, strict = tool.description or "", bool(tool.strict)
        found.append(Tool(name=tool.name, description=description, parameters=parameters, strict=strict))
    return tuple(found)


class _Tools(msgspec.Struct):
    tools: list[_Tool]


class _Named(msgspec.Struct):
    type: Name
    name: Name | None = None


class _Choice(msgspec.Struct):
    tool_choice: str | _Named


def _choice(raw: msgspec.Raw) -> str | _Named:
    if is_absent(raw):
        return "auto"
    if memoryview(raw).nbytes > CHOICE_BYTES:
        raise RequestError(f"more than {CHOICE_BYTES} bytes of JSON", "tool_choice")
    choice = read(b'{"tool_choice":%b}' % bytes(raw), _Choice).tool_choice
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        raise RequestError("tool_choice has to be auto, none, required or name a function", "tool_choice")
    if isinstance(choice, _Named) and (choice.type != "function" or not choice.name):
        raise RequestError(f"tool_choice of type {choice.type} is not supported", "tool_choice")
    return choice


def _calls(choice: str | _Named, tools: Sequence[Tool], parallel: bool) -> Calls:
    if choice in ("auto", "none"):
        return Calls(parallel=parallel)
    if not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    if isinstance(choice, str):
        return Calls(mode="required", parallel=parallel)
    if all(tool.name != choice.name for tool in tools):
        raise RequestError(f"tool_choice names {choice.name!r}, which is not among the tools", "tool_choice")
    return Calls(mode="required", named=choice.name, parallel=parallel)


def _constraint(format: dict[str, Any]) -> Constraint | None:
    match format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Constraint(kind="json_schema", text='{"type": "object"}', param="text.format")
        case {"type": "json_schema", "schema": dict()}:
            return Constraint(kind="json_schema", text=json.dumps(format["schema"]), param="text.format.schema")
        case _:
            raise RequestError("Expected the type text, json_object, or json_schema with a schema", "text.format")


# -- What `/openapi.json` is made from -----------------------------------------------------------------------------

ResponsesBody, ToolList = _Responses, list[_Tool]
