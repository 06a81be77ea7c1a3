"""A conversation with no dialect left in it: what every API reads into, and what the template renders."""

from typing import Any

from redline.wire.base import Record


class ToolCall(Record, frozen=True):
    """A call that the assistant made. The prompt prints `id`; `template.native_ids` makes it `functions.NAME:IDX`."""

    id: str
    name: str
    arguments: str  # JSON text, verbatim


class Tool(Record, frozen=True):
    """A function that the assistant may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None  # a JSON schema; None: it takes no arguments
    strict: bool = False  # a schema that cannot be followed is refused; else what cannot be followed of it is left out
    deferred: bool = False  # it may be called, and a message of the conversation declares it, not the prompt's opening
    param: str = "tools"  # the field that its parameters came from, for errors


class Message(Record, frozen=True):
    """One message of a conversation."""

    role: str  # system, user, assistant or tool
    content: str = ""
    name: str | None = None  # None: the role stands in its place
    reasoning: str = ""  # assistant only
    tool_calls: tuple[ToolCall, ...] = ()  # assistant only
    tool_call_id: str = ""  # tool only: the call that it answers
    declares: tuple[Tool, ...] = ()  # tool only: deferred tools, which the model knows from here on


class Conversation(Record, frozen=True):
    """A prompt for a chat: messages, and how to answer the last."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool = True  # open with <think>; false: instant answer
    preserve_thinking: bool = False  # keep the reasoning of every past turn
    add_generation_prompt: bool = True  # the prompt ends with the opening of an answer
    continues: bool = False  # the answer goes on with the last message, an assistant's, instead of opening its own
