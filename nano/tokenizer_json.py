"""A vocabulary for readers that know no tiktoken: tokenizer.json, of the tokenizers library, with the same ids.

`tiktoken.model` gives every token a rank and joins whichever two neighbours make the token of the lowest. The library
joins listed pairs, in the order of their list. A token comes of the same two parts wherever it stands, the last two
that its own bytes alone go through, so the list has that pair of each token, by rank. A token that its own bytes do not
lead to is found as a whole piece or not at all, in either library.
"""

from itertools import pairwise
from typing import Any

from redline.chat.tokenizer import RESERVED, SPLIT, Tokenizer


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of tokenizer.json, with the ids of `tokenizer`.

    Control tokens spelled in a text become themselves, as `Tokenizer.encode_with_specials` reads them.
    """
    first = tokenizer.vocab_size - RESERVED
    ranks = {tokenizer.token_bytes(rank): rank for rank in range(first)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token,
                "content": tokenizer.name(token),
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in tokenizer.skipped,
            }
            for token in range(first, tokenizer.vocab_size)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a piece that is a token is taken whole, as tiktoken does
            "vocab": {spelled(token): rank for token, rank in ranks.items()},
            "merges": [[spelled(left), spelled(right)] for left, right in merges(ranks)],
        },
    }


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The two parts of each token that merging makes, in the order of the tokens' ranks.

    ranks: token -> rank, in the order of ranks. Single bytes, and tokens that merging never reaches, have no parts.
    """
    found: list[tuple[bytes, bytes]] = []
    for token in ranks:
        parts = [bytes([value]) for value in token]
        while len(parts) > 2:
            pairs = [(ranks.get(left + right, len(ranks)), at) for at, (left, right) in enumerate(pairwise(parts))]
            rank, at = min(pairs)
            if rank == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


def spelled(token: bytes) -> str:
    """Bytes as the library writes them, one character for each.

    Latin-1's printable characters are themselves, the other bytes follow from U+0100 on.
    """
    return "".join(map(_CHARACTERS.__getitem__, token))


_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_CHARACTERS = {value: chr(value) for value in _PRINTABLE} | {
    value: chr(0x100 + number) for number, value in enumerate(sorted(set(range(256)) - _PRINTABLE))
}
