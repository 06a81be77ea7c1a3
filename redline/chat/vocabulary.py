"""A checkpoint's vocabulary as llguidance reads it, which makes masks of it.

llguidance is imported where it is needed: an engine whose jobs have no grammar runs without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redline.chat.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def grammar_tokens(tokenizer: Tokenizer, size: int | None = None) -> LLTokenizer:
    """The tokens with which grammars are compiled; takes half a second with Kimi's 163,840.

    size: of the model's logits; None: as many as there are tokens. Raises ImportError where llguidance is missing.
    """
    from llguidance.tiktoken import lltokenizer_from_encoding

    return lltokenizer_from_encoding(
        tokenizer.encoding, n_vocab=size or tokenizer.vocab_size, eos_token=list(tokenizer.stop_ids)
    )
