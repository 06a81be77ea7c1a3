"""Plain-text tokens, and the single event that each of them makes while a reader holds no text back.

Nearly every token of an answer is a few complete characters that no rule of the format applies to. Its output does not
depend on earlier tokens, so it is computed once per token of the vocabulary instead of each time it is generated.
"""

from collections.abc import Mapping
from functools import lru_cache

from redline.chat.events import Text, Thought
from redline.chat.tokenizer import Tokenizer

Shown = Mapping[int, tuple[Text] | tuple[Thought] | tuple[()]]
"""Events by token, computed at the first access with `[]`; empty for a token that is not plain text."""


def plain_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of an ordinary token of complete characters without `<` (which could begin a spelled-out mark); empty
    for any other token. Raises RequestError for an invalid token id."""
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
        # Trailing whitespace is not part of the reasoning, so hold it back until more text follows.
        shown = self[token] = (Thought(text=text),) if text and not text[-1].isspace() else ()
        return shown


@lru_cache(maxsize=2)
def shown(tokenizer: Tokenizer) -> tuple[Shown, Shown]:
    """The events of each token in an answer, and in reasoning. All decoders of one vocabulary share them."""
    return _Texts(tokenizer), _Thoughts(tokenizer)
