"""What a chat format tells the API about itself."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from redline.chat.conversation import Conversation
from redline.chat.tokenizer import Piece


class Style(ABC):
    """A model's chat format."""

    __slots__ = ()
    declares_tools = True  # whether prompts can declare tools; if not, requests with tools are refused

    @abstractmethod
    def thinks(self, conversation: Conversation) -> bool:
        """Whether the answer begins with reasoning, or continues it."""

    @abstractmethod
    def pieces(self, conversation: Conversation, most: int) -> Iterator[Piece]:
        """The prompt. Raises ContextTooLong before it makes a single text of more than `most` characters."""
