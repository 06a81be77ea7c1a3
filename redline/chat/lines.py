"""Chats as files hold them: OpenAI-shaped messages and tools, one chat in a line of JSON.

Evaluation sets and prompts for drafters are such lines with fields of their own (`class Line(Chat)`).
"""

from typing import Any, Literal

import msgspec

from redline.chat.conversation import Conversation, Message, Tool, ToolCall
from redline.wire.base import Record

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what a line that is no record of ours raises


class CalledFunction(Record, frozen=True):
    name: str
    arguments: str  # JSON text


class CallMade(Record, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Turn(Record, frozen=True):
    """One message in OpenAI's shape."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[CallMade, ...] = ()
    tool_call_id: str | None = None


class DeclaredFunction(Record, frozen=True):
    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class DeclaredTool(Record, frozen=True):
    function: DeclaredFunction
    type: Literal["function"] = "function"


class Chat(Record, frozen=True):
    """The model answers after the last message."""

    messages: tuple[Turn, ...]
    tools: tuple[DeclaredTool, ...] = ()
    thinking: bool = True


def conversation(chat: Chat) -> Conversation:
    """The chat as the template reads it."""
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
