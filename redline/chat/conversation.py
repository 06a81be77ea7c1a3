"""A conversation independent of the API dialect: every API reads into it, and the template renders it."""

from typing import Any

from redline.messages.base import Record


class ToolCall(Record, frozen=True):
    """A call that the assistant made. The prompt contains `id`; `template.native_ids` makes it `functions.NAME:IDX`."""

    id: str
    name: str
    arguments: str  # JSON text, verbatim


class Tool(Record, frozen=True):
    """A function that the assistant may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None  # a JSON schema; None: it takes no arguments
    strict: bool = False  # True: refuse an unsupported schema; False: leave out its unsupported keywords
    deferred: bool = False  # declared by a later message of the conversation instead of the start of the prompt
    param: str = "tools"  # the request field of its parameters, for errors


class Picture(Record, frozen=True):
    """An image in a message, or a video, which becomes one Picture for each of its chunks when it is decoded. Hash and
    size are known from then on."""

    at: int  # characters of the message's content before it
    data: bytes  # the file
    param: str = "messages"  # the request's field, for errors
    video: bool = False
    hash: bytes = b""  # of its patches
    frames: int = 1
    rows: int = 0  # of patches
    columns: int = 0
    chunk: int = 0  # its number in its video
    time: str = ""  # of the chunk's first frame
    ends: bool = True  # whether it is an image, or its video's last chunk

    @property
    def tokens(self) -> int:
        """Positions of the prompt: one for 2 x 2 patches."""
        return self.rows * self.columns // 4


class Message(Record, frozen=True):
    """One message of a conversation."""

    role: str  # system, user, assistant or tool
    content: str = ""
    pictures: tuple[Picture, ...] = ()  # user and tool only; in the order of their places in `content`
    name: str | None = None  # None: the role is used as the name
    reasoning: str = ""  # assistant only
    tool_calls: tuple[ToolCall, ...] = ()  # assistant only
    tool_call_id: str = ""  # tool only: the call that it answers
    declares: tuple[Tool, ...] = ()  # tool only: deferred tools that this message makes known to the model


class Conversation(Record, frozen=True):
    """A chat prompt: messages, and options for the next answer."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool = True  # open with <think>; False: instant answer
    preserve_thinking: bool = False  # keep the reasoning of every past turn
    add_generation_prompt: bool = True  # end the prompt with the opening of an answer
    continues: bool = False  # the answer continues the last message (an assistant's) instead of opening a new one
