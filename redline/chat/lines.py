"""The file format of chats: OpenAI-shaped messages and tools, one chat per line of JSON.

Evaluation sets and prompts for drafters use such lines with additional fields (`class Line(Chat)`).
"""

from typing import Any, Literal, cast

import msgspec

from redline.chat.conversation import Conversation, Message, Tool, ToolCall
from redline.messages.base import Record

DEPTH = 64  # nesting of a tool's parameters: the template walks through them
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # raised by decoding a line that is not a Chat


class CalledFunction(Record, frozen=True):
    """The function of a call in OpenAI's message format."""

    name: str
    arguments: str  # JSON text


class CallMade(Record, frozen=True):
    """A tool call in an assistant's message."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Turn(Record, frozen=True):
    """One message in OpenAI's shape."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None  # None: empty
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[CallMade, ...] = ()
    tool_call_id: str | None = None


class DeclaredFunction(Record, frozen=True):
    """A function that the model may call. Raises ValueError if `parameters`, a JSON schema, nests deeper than DEPTH."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        depth, level = 0, cast(list[Any], [self.parameters])
        while level:  # without recursion
            depth += 1
            level = [inner for value in level for inner in _parts(value)]
        if depth > DEPTH:
            raise ValueError(f"parameters are nested {depth} deep; expected at most {DEPTH}")


def _parts(value: Any) -> list[Any]:
    """The objects and arrays directly inside an object or array."""
    inner: Any = value.values() if isinstance(value, dict) else value  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return [part for part in inner if isinstance(part, dict | list)]


class DeclaredTool(Record, frozen=True):
    """An entry of OpenAI's tools array."""

    function: DeclaredFunction
    type: Literal["function"] = "function"


class Chat(Record, frozen=True):
    """A conversation that the model is to continue after its last message."""

    messages: tuple[Turn, ...]
    tools: tuple[DeclaredTool, ...] = ()
    thinking: bool = True


def conversation(chat: Chat) -> Conversation:
    """Converts a chat from a file into the template's Conversation."""
    messages = tuple(
        Message(
            role=turn.role,
            content=turn.content or "",
            name=turn.name,
            reasoning=turn.reasoning_content or "",
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in turn.tool_calls
            ),
            tool_call_id=turn.tool_call_id or "",
        )
        for turn in chat.messages
    )
    declared = [tool.function for tool in chat.tools]
    tools = tuple(Tool(name=tool.name, description=tool.description, parameters=tool.parameters) for tool in declared)
    return Conversation(messages=messages, tools=tools, thinking=chat.thinking)
