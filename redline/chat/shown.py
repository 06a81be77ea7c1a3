"""Tokens of plain text, and the event that each makes by itself where a reader holds nothing back.

Nearly every token of an answer is a few whole characters that no rule of the format looks at. What it shows never
depends on what came before, so it is worked out once for each token of a vocabulary, and not each time it is said.
"""

from collections.abc import Mapping
from functools import lru_cache

from redline.chat.events import Text, Thought
from redline.chat.tokenizer import Tokenizer

Shown = Mapping[int, tuple[Text] | tuple[Thought] | tuple[()]]
"""Events by token, worked out when they are first asked for with `[]`; empty for a token that is not plain."""


def plain_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of an ordinary token that is whole characters, none of them `<`, with which a spelled mark could begin;
    empty for any other. Raises RequestError for an id that is no token."""
    data = tokenizer.token_bytes(token)
    if tokenizer.name(token) is not None or b"<" in data:
        return ""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return ""


class _Texts(dict[int, tuple[Text] | tuple[()]]):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> tuple[Text] | tuple[()]:
        text = plain_text(self._tokenizer, token)
        shown = self[token] = (Text(text=text),) if text else ()
        return shown


class _Thoughts(dict[int, tuple[Thought] | tuple[()]]):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> tuple[Thought] | tuple[()]:
        text = plain_text(self._tokenizer, token)
        # Whitespace that ends the reasoning is no part of it, so it waits for what follows.
        shown = self[token] = (Thought(text=text),) if text and not text[-1].isspace() else ()
        return shown


@lru_cache(maxsize=2)
def shown(tokenizer: Tokenizer) -> tuple[Shown, Shown]:
    """What each token shows in an answer, and in reasoning. Every decoder of one vocabulary shares them."""
    return _Texts(tokenizer), _Thoughts(tokenizer)
