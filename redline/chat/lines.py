"""The file format of chats: OpenAI-shaped messages and tools, one chat per line of JSON.

Evaluation sets and prompts for drafters use such lines with additional fields (`class Line(Chat)`).
"""

import base64
from collections.abc import Iterator
from typing import Any, Literal, cast

import msgspec

from redline.chat.conversation import Conversation, Message, Picture, Tool, ToolCall
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


class ImageUrl(Record, frozen=True):
    """The address of an image: a data URL."""

    url: str


class ContentPart(Record, frozen=True):
    """A text or an image in a message. Raises ValueError if it has not what its type says, or for another address."""

    type: Literal["text", "image_url"]
    text: str = ""
    image_url: ImageUrl | None = None

    def __post_init__(self) -> None:
        if self.type == "text":
            return
        url = "" if self.image_url is None else self.image_url.url
        if not url.startswith("data:image/") or ";base64," not in url[:80]:
            raise ValueError("a part of type image_url needs a data URL: data:image/png;base64,...")
        try:
            _ = self.file
        except ValueError:
            raise ValueError("the base64 of an image_url is not valid") from None

    @property
    def file(self) -> bytes:
        """The image file."""
        assert self.image_url is not None, "a text has no file"
        return base64.b64decode(self.image_url.url.partition(";base64,")[2], validate=True)


class Turn(Record, frozen=True):
    """One message in OpenAI's shape."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | tuple[ContentPart, ...] | None = None  # None: empty
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[CallMade, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content without its images."""
        if isinstance(self.content, tuple):
            return "".join(part.text for part in self.content)
        return self.content or ""


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


def _pictures(turn: Turn) -> Iterator[Picture]:
    before = 0
    for part in turn.content if isinstance(turn.content, tuple) else ():
        if part.type == "image_url":
            yield Picture(at=before, data=part.file)
        before += len(part.text)


def conversation(chat: Chat) -> Conversation:
    """Converts a chat from a file into the template's Conversation."""
    messages = tuple(
        Message(
            role=turn.role,
            content=turn.text,
            pictures=tuple(_pictures(turn)),
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
