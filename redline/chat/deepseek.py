"""DeepSeek-V3's and -R1's chat format, as in the published tokenizer_config.json.

All system messages come first, as text. Then each message is its role's control token and its content; an answer ends
with <｜end▁of▁sentence｜>, and there is no end of a user's message. The published templates declare no tools, but
write the calls and results of a history.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from redline.chat.conversation import Conversation, Message
from redline.chat.style import Style
from redline.chat.tokenizer import Piece, Special

ASSISTANT = "<｜Assistant｜>"
_END = Special("<｜end▁of▁sentence｜>")


@dataclass(frozen=True, slots=True)
class DeepseekStyle(Style):
    """What differs between V3 and R1."""

    thoughts: bool  # answers begin with <think>, in the prompt; reasoning of earlier answers is left out
    separator: str = "\n"  # between the results of two tools; later templates of R1 have none

    declares_tools = False

    def thinks(self, conversation: Conversation) -> bool:
        if conversation.continues and conversation.messages[-1].content:
            return False
        spoken = conversation.messages[:-1] if conversation.continues else conversation.messages
        return self.thoughts and not (spoken and spoken[-1].role == "tool")

    def pieces(self, conversation: Conversation, most: int) -> Iterator[Piece]:
        messages = conversation.messages
        yield Special("<｜begin▁of▁sentence｜>")
        yield "\n\n".join(message.content for message in messages if message.role == "system")
        spoken = [message for message in messages if message.role != "system"]
        after_tool = False
        for message in spoken[:-1] if conversation.continues else spoken:
            yield from self._message(message, after_tool)
            after_tool = message.role == "tool"
        if after_tool:
            yield Special("<｜tool▁outputs▁end｜>")
        if conversation.continues:
            yield from self._opened(after_tool)
            yield from self._continued(spoken[-1])
        elif conversation.add_generation_prompt:
            yield from self._opened(after_tool)

    def _opened(self, after_tool: bool) -> Iterator[Piece]:
        """The opening of an answer; after results of tools there is none, since the turn goes on."""
        if not after_tool:
            yield Special(ASSISTANT)
            if self.thoughts:
                yield from (Special("<think>"), "\n")

    def _continued(self, message: Message) -> Iterator[Piece]:
        if self.thoughts:
            yield message.reasoning
            if message.content:
                yield from ("\n", Special("</think>"), "\n\n")
        yield message.content

    def _message(self, message: Message, after_tool: bool) -> Iterator[Piece]:
        """after_tool: whether the message before it is a tool's result."""
        if message.role == "tool":
            yield self.separator if after_tool else Special("<｜tool▁outputs▁begin｜>")
            yield from (Special("<｜tool▁output▁begin｜>"), message.content, Special("<｜tool▁output▁end｜>"))
            return
        if message.role == "user":
            yield from (Special("<｜User｜>"), message.content)
            return
        yield Special("<｜tool▁outputs▁end｜>" if after_tool else ASSISTANT)
        yield message.content.rpartition("</think>")[2]
        for place, call in enumerate(message.tool_calls):
            yield "\n" if place else Special("<｜tool▁calls▁begin｜>")
            yield from (Special("<｜tool▁call▁begin｜>"), "function", Special("<｜tool▁sep｜>"))
            yield from (f"{call.name}\n```json\n{call.arguments}\n```", Special("<｜tool▁call▁end｜>"))
        if message.tool_calls:
            yield Special("<｜tool▁calls▁end｜>")
        yield _END


DEEPSEEK_V3 = DeepseekStyle(thoughts=False)
DEEPSEEK_R1 = DeepseekStyle(thoughts=True)
