"""Reads requests of OpenAI's Responses API into `Ask`.

As in `openai`, validation is by type annotation, unknown fields are ignored, and known fields that are not supported
are rejected by name. Consecutive assistant items of the input (reasoning, a text, calls) become one message, as the
model had generated them.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from redline.api import media
from redline.api.ask import WHAT_IS_LEFT, Ask
from redline.api.config import Defaults, Limits
from redline.api.dialect import ParsedRequest, Streaming
from redline.api.openai.requests import (
    ABSENT,
    CHOICE_BYTES,
    Item,
    Name,
    Objects,
    calls_of,
    check_word,
    decoded,
    is_absent,
    one_line,
    read,
)
from redline.api.responses.sealed import unseal
from redline.api.sampling import sampling_of, with_sampling
from redline.chat.constraint import Calls, Constraint
from redline.chat.conversation import Conversation, Message, Tool, ToolCall
from redline.errors import RequestError
from redline.messages.job import Sampling
from redline.messages.sampling_option import Api

_Count = Annotated[int, Meta(ge=1, lt=WHAT_IS_LEFT)]
_FunctionName = Annotated[str, Meta(min_length=1, max_length=256)]
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
MOST_REFERENCES = 1024  # references to stored items, in one request
REASONING = "rs"  # prefix of the ids of reasoning items

# Items of tools that run only at OpenAI, with fields that hold conversation text in items of other types.
_HOSTED = frozenset({
    "additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call",
    "computer_call_output", "custom_tool_call", "custom_tool_call_output", "file_search_call", "image_generation_call",
    "local_shell_call", "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call",
    "mcp_list_tools", "program", "program_output", "shell_call", "shell_call_output", "tool_search_call",
    "tool_search_output", "web_search_call",
})  # fmt: skip
_WORDS = ("role", "content", "summary", "encrypted_content", "arguments", "output")


class _Part(Item, gc=False):
    type: Name
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None


class _Input(Item, gc=False):
    type: Name | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: msgspec.Raw = ABSENT  # of a message or reasoning: _CONTENT; of ignored items: anything
    summary: msgspec.Raw = ABSENT  # of reasoning: _PARTS
    encrypted_content: str | None = None
    id: str | None = None
    call_id: Name | None = None
    name: _FunctionName | None = None
    namespace: _FunctionName | None = None
    arguments: msgspec.Raw = ABSENT  # of a function_call: _ARGUMENTS
    output: msgspec.Raw = ABSENT  # of a function_call_output: _CONTENT


_ARGUMENTS = msgspec.json.Decoder(str | None)
_CONTENT = msgspec.json.Decoder(str | list[_Part] | None)
_PARTS = msgspec.json.Decoder(list[_Part] | None)


class _Function(Item, gc=False):
    type: Name
    name: _FunctionName | None = None
    description: str | None = None
    parameters: msgspec.Raw = ABSENT  # dict[str, Any] | None
    strict: bool | None = None


class _Tool(_Function, gc=False):
    tools: list[_Function] | None = None  # of a namespace


class _Reasoning(msgspec.Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class _Text(msgspec.Struct):
    format: msgspec.Raw = ABSENT
    verbosity: Literal["low", "medium", "high"] | None = None


class _Prompt(msgspec.Struct, kw_only=True):
    """Fields that determine the prompt: the whole body of /v1/responses/input_tokens."""

    input: str | list[_Input] | None = None
    model: Name | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    tools: msgspec.Raw = ABSENT  # list[_Tool], which responses repeat
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    truncation: Name | None = None
    conversation: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT


if TYPE_CHECKING:
    _Sampled = _Prompt
else:
    _Sampled = with_sampling(_Prompt, Api.RESPONSES)


class _Responses(_Sampled, kw_only=True):
    input: str | Annotated[list[_Input], Meta(min_length=1)]  # type: ignore[assignment]
    max_output_tokens: _Count | None = None
    stream: bool | None = None
    store: bool | None = None
    include: Annotated[list[Name], Meta(max_length=16)] | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    background: bool | None = None
    top_logprobs: int | None = None


class ResponsesRequest(ParsedRequest, frozen=True):
    """A parsed body of /v1/responses, with the fields that the response repeats."""

    said: tuple[Message, ...] = ()  # the conversation without the instructions, which apply to one response only
    previous: str | None = None  # id of the response that is continued
    references: tuple[str, ...] = ()  # ids of stored items
    given: list[_Input] = msgspec.field(default_factory=list[_Input])  # set if there are references
    namespaces: dict[str, tuple[str, str]] = msgspec.field(
        default_factory=dict[str, tuple[str, str]]
    )  # the model's name of a namespace's function -> the names of namespace and function
    stores: bool = False  # the client wants the response stored
    sealed: bool = False  # also return reasoning as encrypted_content
    owner: str = ""  # name of the key, which owns the response
    instructions: str | None = None
    tools: bytes = b"[]"  # JSON on one line, like the next two: they are sent in lines of event streams
    tool_choice: bytes = b'"auto"'
    format: bytes = b'{"type":"text"}'
    parallel: bool = True
    effort: str | None = None
    summary: str | None = None  # as the client sent it
    metadata: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    max_output_tokens: int | None = None

    @property
    def summarised(self) -> bool:
        """Whether reasoning is returned as its summary."""
        return self.summary not in (None, "none")


def read_responses(body: bytes, limits: Limits, defaults: Defaults) -> ResponsesRequest:
    """Read the body of POST /v1/responses. Raises RequestError, naming the field.

    defaults: values of fields that the request does not set.
    """
    request = read(body, _Responses)
    _refuse(request)
    objects = Objects(limits)
    asked, choice, declared = _prompted(request, limits, defaults, objects)
    reasoning, text = request.reasoning or _Reasoning(), request.text or _Text()
    constraint = None if is_absent(text.format) else _constraint(objects.read(text.format, "text.format"))
    parallel = request.parallel_tool_calls is not False
    ask = msgspec.structs.replace(
        asked.ask,
        sampling=sampling_of(request, Api.RESPONSES, defaults, request.max_output_tokens or WHAT_IS_LEFT),
        constraint=constraint,
        calls=_calls(choice, declared, parallel),
    )
    return msgspec.structs.replace(
        asked,
        ask=ask,
        stream=Streaming() if request.stream else None,
        stores=request.store is not False,
        sealed="reasoning.encrypted_content" in (request.include or ()),
        tools=b"[]" if is_absent(request.tools) else one_line(request.tools, "tools"),
        tool_choice=b'"auto"' if is_absent(request.tool_choice) else one_line(request.tool_choice, "tool_choice"),
        format=b'{"type":"text"}' if is_absent(text.format) else one_line(text.format, "text.format"),
        parallel=parallel,
        effort=reasoning.effort,
        summary=reasoning.summary,
        metadata=request.metadata or {},
        max_output_tokens=request.max_output_tokens,
    )


def read_input_tokens(body: bytes, limits: Limits, defaults: Defaults) -> ResponsesRequest:
    """Read the body of POST /v1/responses/input_tokens: the prompt is the same as for /v1/responses. Raises
    RequestError, naming the field."""
    request = read(body, _Prompt)
    if request.input is None and request.instructions is None and request.previous_response_id is None:
        raise RequestError("nothing to count: send input, instructions or previous_response_id", "input")
    _refuse_in_prompt(request)
    return _prompted(request, limits, defaults, Objects(limits))[0]


def _prompted(
    request: _Prompt, limits: Limits, defaults: Defaults, objects: Objects
) -> "tuple[ResponsesRequest, str | _Choice, _Declared]":
    """The parts of a request that determine the prompt, as a request for one token."""
    declared = _tools(request.tools, limits, objects)
    choice = _choice(request.tool_choice)
    given = request.input or []
    items = _Items(given, limits, declared.flat)
    effort = request.reasoning.effort if request.reasoning else None
    conversation = Conversation(
        messages=(*_instructions(request.instructions), *items.messages),
        tools=() if choice == "none" else declared.tools,
        thinking=defaults.thinking if effort is None else effort != "none",
    )
    asked = ResponsesRequest(
        model=request.model,
        ask=Ask(prompts=(conversation,), sampling=Sampling(max_tokens=1), param="input"),
        said=items.messages,
        previous=request.previous_response_id,
        references=tuple(items.references),
        given=given if items.references and not isinstance(given, str) else [],
        namespaces={flat: of for of, flat in declared.flat.items()},
        instructions=request.instructions,
        left_out=tuple(dict.fromkeys((*declared.left_out, *items.left_out))),
    )
    return asked, choice, declared


def resolved(asked: ResponsesRequest, kept: Mapping[str, bytes], limits: Limits) -> ResponsesRequest:
    """The request with references replaced by items. kept: stored items as JSON, by id. Raises RequestError for a
    reference to a missing item other than reasoning, and beyond the limits."""
    if sum(len(kept.get(id, b"")) for id in asked.references) > limits.body_bytes:  # an item counts once per reference
        raise RequestError(f"the referenced items are more than {limits.body_bytes} bytes in total", "input")
    flat = {of: flat for flat, of in asked.namespaces.items()}
    found = {id: read(item, _Input) for id, item in kept.items()}
    whole = _saying(asked, _Items(asked.given, limits, flat, found).messages)
    return msgspec.structs.replace(whole, references=(), given=[])  # `given` holds the whole body


def behind(asked: ResponsesRequest, history: tuple[Message, ...], limits: Limits) -> ResponsesRequest:
    """The request, preceded by an earlier conversation. Raises RequestError beyond the limits."""
    said = (*history, *asked.said)
    _check_bounds(said, limits)
    return _saying(asked, said)


def _saying(asked: ResponsesRequest, said: tuple[Message, ...]) -> ResponsesRequest:
    [conversation] = asked.ask.prompts
    assert isinstance(conversation, Conversation)
    whole = msgspec.structs.replace(conversation, messages=(*_instructions(asked.instructions), *said))
    ask = msgspec.structs.replace(asked.ask, prompts=(whole,))
    return msgspec.structs.replace(asked, said=said, ask=ask)


def _instructions(text: str | None) -> tuple[Message, ...]:
    return (Message(role="system", content=text),) if text else ()


def _refuse(request: _Responses) -> None:
    if request.background:
        raise RequestError("background is not supported: responses are generated while the client waits", "background")
    if request.top_logprobs or "message.output_text.logprobs" in (request.include or ()):
        raise RequestError("logprobs are not supported here: use /v1/chat/completions", "top_logprobs")
    _refuse_in_prompt(request)


def _refuse_in_prompt(request: _Prompt) -> None:
    if request.truncation not in (None, "disabled"):
        raise RequestError("only disabled is supported", "truncation")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise RequestError("only medium is supported", "text.verbosity")
    for field in ("conversation", "prompt"):
        if not is_absent(getattr(request, field)):
            raise RequestError(f"{field} is not supported", field)


class _Items:
    """Converts input items to messages."""

    def __init__(
        self,
        given: str | Sequence[_Input],
        limits: Limits,
        flat: Mapping[tuple[str, str], str],
        kept: Mapping[str, _Input] | None = None,
    ) -> None:
        """flat: see `_Declared`. kept: stored items by id; None: references are only collected. Raises RequestError,
        naming the item."""
        self._flat = flat
        self._kept = kept
        self._turn = _Turn()
        self._images = media.Images(limits)
        self.references: list[str] = []
        self.left_out: dict[str, None] = {}  # types of ignored items
        found: list[Message] = []
        if isinstance(given, str):
            found.append(Message(role="user", content=given))
        else:
            for index, item in enumerate(given):
                self._add(item, f"input[{index}]", found)
                if len(found) > limits.messages:
                    break
        self._turn.end(found)
        _check_bounds(found, limits)
        self.messages = self._images.placed(found)

    def _add(self, item: _Input, place: str, found: list[Message]) -> None:
        turn = self._turn
        match item.type:
            case None if item.id and item.role is None and is_absent(item.content):
                self._refer(item, place, found)
            case "item_reference":
                self._refer(item, place, found)
            case None | "message" if item.role == "assistant":
                turn.say(_content(item.content, f"{place}.content"), found)
            case None | "message":
                if item.role is None or is_absent(item.content):
                    raise RequestError("a message needs role and content", place)
                turn.end(found)
                role = "system" if item.role == "developer" else item.role
                images = self._images if role == "user" else None
                content = _content(item.content, f"{place}.content", images=images)
                found.append(Message(role=role, content=content))
            case "reasoning":
                turn.think(_reasoning(item, place), found)
            case "function_call":
                if not item.call_id or not item.name:
                    raise RequestError("a function_call needs call_id and name", place)
                arguments = None
                if not is_absent(item.arguments):
                    arguments = decoded(_ARGUMENTS, item.arguments, f"{place}.arguments")
                name = _flat_name(item.namespace, item.name, self._flat)
                turn.calls.append(ToolCall(id=item.call_id, name=name, arguments=arguments or ""))
            case "function_call_output":
                if not item.call_id:
                    raise RequestError("a function_call_output needs the call_id of its call", f"{place}.call_id")
                turn.end(found)
                content = _content(item.output, f"{place}.output", of_result=True, images=self._images)
                found.append(Message(role="tool", content=content, tool_call_id=item.call_id))
            case kind if kind in _HOSTED or not any(_says(getattr(item, word)) for word in _WORDS):
                self.left_out[kind] = None
            case kind:
                raise RequestError(f"an item of type {kind} is not supported", f"{place}.type")

    def _refer(self, item: _Input, place: str, found: list[Message]) -> None:
        if not item.id:
            raise RequestError("an item_reference needs the id of its item", f"{place}.id")
        if len(self.references) == MOST_REFERENCES:
            raise RequestError(f"at most {MOST_REFERENCES} references to items in one request", place)
        self.references.append(item.id)
        if self._kept is None:
            return
        if (kept := self._kept.get(item.id)) is not None:
            self._add(kept, place, found)
        elif not item.id.startswith(f"{REASONING}_"):
            raise RequestError(
                f"no item {item.id[:64]!r} is stored for this key: send the item itself instead of a reference",
                f"{place}.id",
            )


def _check_bounds(messages: Sequence[Message], limits: Limits) -> None:
    if len(messages) > limits.messages:
        raise RequestError(f"at most {limits.messages} messages in one request", "input")
    if sum(len(message.tool_calls) for message in messages) > limits.calls:
        raise RequestError(f"at most {limits.calls} tool calls in one request", "input")


class _Turn:
    """Assistant items, collected until an item of another role."""

    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []

    def think(self, text: str, found: list[Message]) -> None:
        """Add reasoning, which starts a turn."""
        if self.texts or self.calls:
            self.end(found)
        self.thoughts.append(text)

    def say(self, text: str, found: list[Message]) -> None:
        """Add text, which precedes calls."""
        if self.calls:
            self.end(found)
        self.texts.append(text)

    def end(self, found: list[Message]) -> None:
        """An item of another role follows: add the message, if there is one."""
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
    """Reasoning in the model's form: the text, else our encrypted_content, else the summary."""
    if _says(item.content):
        return _content(item.content, f"{place}.content")
    return unseal(item.encrypted_content or "") or _content(item.summary, f"{place}.summary", _PARTS)


def _says(member: str | msgspec.Raw | None) -> bool:
    """Whether an item's field is present and not empty."""
    return bool(member) if not isinstance(member, msgspec.Raw) else bytes(member) not in (b"", b"null", b'""', b"[]")


def _content(
    raw: msgspec.Raw,
    place: str,
    kind: msgspec.json.Decoder[Any] = _CONTENT,
    *,
    of_result: bool = False,
    images: media.Images | None = None,
) -> str:
    """of_result: the content is a tool result, where text replaces what the model cannot read. images: collects images;
    None: they are refused here. Raises RequestError."""
    content: str | list[_Part] | None = None if is_absent(raw) else decoded(kind, raw, place)
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type == "input_image" and images is not None and images.read:
            if part.file_id is not None:
                raise RequestError("files are not stored: send the image as a data URL", f"{place}[{index}].file_id")
            text = images.of_url(part.image_url, f"{place}[{index}].image_url")
        elif of_result and (instead := media.in_result(part.type)) is not None:
            text = instead
        elif part.type not in (*_TEXTS, "refusal"):
            otherwise = f"content of type {part.type} is not supported: text only"
            raise media.refused(part.type, f"{place}[{index}].type", otherwise)
        if text is None:
            raise RequestError(f"a part of type {part.type} needs its text", f"{place}[{index}]")
        texts.append(text)
    return "".join(texts)


class _Declared(NamedTuple):
    """A parsed list of tools."""

    tools: tuple[Tool, ...] = ()
    flat: Mapping[tuple[str, str], str] = {}  # names of namespace and function -> the function's name in the prompt
    left_out: tuple[str, ...] = ()  # types of tools other than functions


def _tools(raw: msgspec.Raw, limits: Limits, objects: Objects) -> _Declared:
    if is_absent(raw):
        return _Declared()
    if memoryview(raw).nbytes > 2 * limits.json_bytes:
        raise RequestError(f"more than {2 * limits.json_bytes} bytes of JSON", "tools")
    tools = read(b'{"tools":%b}' % bytes(raw), _Tools).tools
    if sum(len(tool.tools or (tool,)) for tool in tools) > limits.tools:
        raise RequestError(f"at most {limits.tools} tools in one request", "tools")
    found: list[Tool] = []
    flat = _flattened(tools)
    left_out: dict[str, None] = {}
    for index, tool in enumerate(tools):
        if tool.type != "namespace":
            _declare(tool, f"tools[{index}]", objects, found, left_out)
            continue
        if not (namespace := tool.name):
            raise RequestError("a namespace needs a name", f"tools[{index}].name")
        members: list[Tool] = []
        for within, member in enumerate(tool.tools or ()):
            _declare(member, f"tools[{index}].tools[{within}]", objects, members, left_out)
        for place, member in enumerate(members):
            # A namespace's description can only be placed before its first function's.
            about = [tool.description, member.description] if place == 0 else [member.description]
            description = "\n".join(text for text in about if text)
            name = flat[namespace, member.name]
            found.append(msgspec.structs.replace(member, name=name, description=description))
    return _Declared(tuple(found), flat, tuple(left_out))


def namespaces_of(tools: bytes) -> dict[str, tuple[str, str]]:
    """For a list of tools that was parsed before: the model's names of namespace functions -> the names of namespace
    and function."""
    return {flat: of for of, flat in _flattened(msgspec.json.decode(tools, type=list[_Tool])).items()}


def _flattened(tools: Sequence[_Tool]) -> dict[tuple[str, str], str]:
    """For the names of a namespace and its function, the unique name by which the model calls the function."""
    taken = {tool.name for tool in tools if tool.type == "function"}
    flat: dict[tuple[str, str], str] = {}
    for tool in tools:
        for member in (tool.tools or ()) if tool.type == "namespace" else ():
            if tool.name and member.name and member.type == "function" and (tool.name, member.name) not in flat:
                name = next(name for name in _spellings(tool.name, member.name) if name not in taken)
                flat[tool.name, member.name] = name
                taken.add(name)
    return flat


def _declare(tool: _Function, place: str, objects: Objects, found: list[Tool], left_out: dict[str, None]) -> None:
    if tool.type != "function":
        if tool.name and not is_absent(tool.parameters):
            raise RequestError(f"a tool with parameters must have type function, not {tool.type}", f"{place}.type")
        left_out[tool.type] = None
        return
    if not tool.name:
        raise RequestError("a function needs a name", f"{place}.name")
    param = f"{place}.parameters"
    parameters = None if is_absent(tool.parameters) else objects.read(tool.parameters, param)
    description, strict = tool.description or "", bool(tool.strict)
    found.append(Tool(name=tool.name, description=description, parameters=parameters, strict=strict, param=param))


def _spellings(namespace: str, name: str) -> Iterator[str]:
    """Candidate names for a namespace's function, the preferred one first."""
    first = f"{namespace.rstrip('_')}__{name}"
    yield first
    yield from (f"{first}_{number}" for number in itertools.count(2))


def _flat_name(namespace: str | None, name: str, flat: Mapping[tuple[str, str], str]) -> str:
    """The model's name of a function; for a namespace that is not declared any more, its preferred name."""
    return name if not namespace else flat.get((namespace, name)) or next(_spellings(namespace, name))


class _Tools(msgspec.Struct):
    tools: list[_Tool]


class _Named(Item, gc=False):
    type: Name
    name: Name | None = None
    namespace: Name | None = None


class _Choice(msgspec.Struct):
    type: Name
    name: Name | None = None
    namespace: Name | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[_Named] | None = None


_CHOICE = msgspec.json.Decoder(str | _Choice)


def _choice(raw: msgspec.Raw) -> str | _Choice:
    if is_absent(raw):
        return "auto"
    if memoryview(raw).nbytes > CHOICE_BYTES:
        raise RequestError(f"more than {CHOICE_BYTES} bytes of JSON", "tool_choice")
    choice = decoded(_CHOICE, raw, "tool_choice")
    if isinstance(choice, str):
        return check_word(choice)
    if choice.type == "allowed_tools":
        if choice.mode is None or choice.tools is None:
            raise RequestError("a tool_choice of type allowed_tools needs mode and tools", "tool_choice")
    elif choice.type not in ("function", "namespace"):
        raise RequestError(
            f"tool_choice of type {choice.type} is not supported: only function tools can be called", "tool_choice"
        )
    elif not choice.name:
        raise RequestError(f"a tool_choice of type {choice.type} needs a name", "tool_choice.name")
    return choice


def _calls(choice: str | _Choice, declared: _Declared, parallel: bool) -> Calls:
    if isinstance(choice, str):
        return calls_of(choice, None, declared.tools, parallel, "tool_choice")
    mode, listed = choice.mode or "required", choice.tools
    if listed is None or choice.type != "allowed_tools":
        mode, listed = "required", [_Named(type=choice.type, name=choice.name, namespace=choice.namespace)]
    return calls_of(mode, _names(listed, declared), declared.tools, parallel, "tool_choice")


def _names(listed: Sequence[_Named], declared: _Declared) -> list[str]:
    """The model's names of the functions in a tool_choice; undeclared ones keep the client's name."""
    plain = {tool.name for tool in declared.tools}
    alike: dict[str, list[str]] = {}  # functions of namespaces by their own name
    grouped: dict[str, list[str]] = {}  # functions of namespaces by namespace
    for (namespace, name), flat in declared.flat.items():
        alike.setdefault(name, []).append(flat)
        grouped.setdefault(namespace, []).append(flat)
    found: list[str] = []
    for kind, name, namespace in dict.fromkeys((one.type, one.name or "", one.namespace) for one in listed):
        if kind == "namespace":
            found += grouped.get(name, [name])
        elif kind == "function" and namespace:
            found.append(declared.flat.get((namespace, name), name))
        elif kind == "function":
            found += [name] if name in plain else alike.get(name, [name])
    return found


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


# -- For `/openapi.json` --------------------------------------------------------------------------------------------

ResponsesBody, InputTokensBody, ToolList = _Responses, _Prompt, list[_Tool]
