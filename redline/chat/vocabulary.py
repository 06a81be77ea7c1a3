"""A checkpoint's vocabulary in llguidance's format, for computing grammar masks.

llguidance is imported only when needed: an engine without grammar-constrained jobs runs without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redline.chat.tokenizer import JsonTokenizer, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def grammar_tokens(tokenizer: Tokenizer, size: int | None = None) -> LLTokenizer:
    """The vocabulary for compiling grammars; takes half a second with Kimi's 163,840 tokens.

    size: of the model's logits; None: the vocabulary size. Raises ImportError if llguidance is missing.
    """
    if isinstance(tokenizer, JsonTokenizer):
        from llguidance import LLTokenizer

        return LLTokenizer(tokenizer.json, n_vocab=size or tokenizer.vocab_size, eos_token=list(tokenizer.stop_ids))
    from llguidance.tiktoken import lltokenizer_from_encoding

    return lltokenizer_from_encoding(
        tokenizer.encoding, n_vocab=size or tokenizer.vocab_size, eos_token=list(tokenizer.stop_ids)
    )
