"""A tiny tokenizer in Kimi's own file format, for tests that need text but no real vocabulary.

256 single bytes, a few merges, and 256 reserved ids in Kimi's order: the named ones by offset, the rest
`<|reserved_token_{id}|>`. Every text can be encoded; a character beyond ASCII takes several ids.
"""

import base64
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from nano.tokenizer_json import merges, spelled
from redline.chat.tokenizer import Tokenizer

# In rank order: each is the concatenation of two earlier tokens, so that byte-pair encoding can reach it.
MERGES = (
    b"th", b"he", b"in", b"er", b"an", b"re", b"on", b"ll", b"lo", b" t", b" a", b" w", b"  ", b"    ",
    b"the", b" the", b"and", b" and", b"ing", b"llo", b"hello", b"un", b"ct", b"ion", b"ions", b"ctions", b"fun",
    b"functions", b"et", b"get",
)  # fmt: skip

# Offset within the reserved ids -> (name, declared special), as in Kimi K2's tokenizer_config.json.
SPECIALS = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    6: ("<|start_header_id|>", True),
    7: ("<|end_header_id|>", True),
    9: ("[EOT]", True),
    10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    12: ("<|tool_calls_section_end|>", False),
    13: ("<|tool_call_begin|>", False),
    14: ("<|tool_call_argument_begin|>", False),
    15: ("<|tool_call_end|>", False),
    17: ("<|im_middle|>", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    22: ("<think>", False),
    23: ("</think>", False),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
RESERVED = 256
TINY_VOCAB = 256 + len(MERGES) + RESERVED


def words(count: int) -> Iterator[bytes]:
    """`count` merges that make tokens of whole words: a space and up to four small letters.

    Raises ValueError if there are fewer such words.
    """
    letters = [bytes([value]) for value in range(ord("a"), ord("z") + 1)]
    found: list[bytes] = []
    level = [b" "]
    while len(found) < count:
        if len(level[0]) == 5:
            raise ValueError(f"{count} merges were asked for; there are {len(found)}")
        level = [shorter + letter for shorter in level for letter in letters]
        found += level
    return iter(found[:count])


def write_tiny_tokenizer(folder: Path, merges: Iterable[bytes] = MERGES) -> Path:
    """Writes `tiktoken.model` and `tokenizer_config.json` into `folder` (created if absent), and returns it.

    merges: as MERGES; the vocabulary is 256 bytes, these and RESERVED ids.
    """
    ranks = [bytes([value]) for value in range(256)] + list(merges)
    first = len(ranks)
    added = {str(first + offset): {"content": name, "special": special} for offset, (name, special) in SPECIALS.items()}
    config = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    folder.mkdir(parents=True, exist_ok=True)
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return folder


@cache
def tokenizer() -> Tokenizer:
    """The tiny tokenizer."""
    with TemporaryDirectory() as folder:
        return Tokenizer.open(write_tiny_tokenizer(Path(folder)))


# DeepSeek-V3's control tokens: three before the vocabulary, the others after it; declared special or not, as published.
DEEPSEEK_FIRST = {"<｜begin▁of▁sentence｜>": True, "<｜end▁of▁sentence｜>": True, "<｜▁pad▁｜>": True}
DEEPSEEK_LAST = {
    "<think>": False,
    "</think>": False,
    "<｜User｜>": False,
    "<｜Assistant｜>": False,
    "<|EOT|>": True,
    "<｜tool▁calls▁begin｜>": False,
    "<｜tool▁calls▁end｜>": False,
    "<｜tool▁call▁begin｜>": False,
    "<｜tool▁call▁end｜>": False,
    "<｜tool▁outputs▁begin｜>": False,
    "<｜tool▁outputs▁end｜>": False,
    "<｜tool▁output▁begin｜>": False,
    "<｜tool▁output▁end｜>": False,
    "<｜tool▁sep｜>": False,
}
DEEPSEEK_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
DEEPSEEK_VOCAB = 320  # of the tiny model: more than the tokenizer's tokens, as in the published files


def write_tiny_deepseek_tokenizer(folder: Path, template: str = "") -> Path:
    """Writes `tokenizer.json` and `tokenizer_config.json` in DeepSeek-V3's form into `folder`, and returns it.

    template: the chat template.
    """
    first = len(DEEPSEEK_FIRST)
    ranks = {token: first + rank for rank, token in enumerate([bytes([value]) for value in range(256)] + list(MERGES))}
    names = [*enumerate(DEEPSEEK_FIRST), *enumerate(DEEPSEEK_LAST, first + len(ranks))]
    splits = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in DEEPSEEK_SPLITS
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = DEEPSEEK_FIRST | DEEPSEEK_LAST
    content = {
        "version": "1.0",
        "added_tokens": [{"id": id, "content": name, "special": special[name], **how} for id, name in names],
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "post_processor": {**level, "add_prefix_space": True},
        "decoder": {**level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": dict(zip(DEEPSEEK_FIRST, range(first), strict=True))
            | {spelled(token): id for token, id in ranks.items()},
            "merges": [[spelled(left), spelled(right)] for left, right in merges(ranks)],
        },
    }
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<｜begin▁of▁sentence｜>"},
        "eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>"},
        "tokenizer_class": "LlamaTokenizerFast",
        "chat_template": template,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
