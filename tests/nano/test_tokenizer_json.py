"""tokenizer.json, as transformers opens the folder without its code: our ids of any text, and our text of any ids."""

import json
import os
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from nano.tokenizer import RANKS, write
from nano.tokenizer_json import merges, tokenizer_json
from redline.chat.tokenizer import RESERVED, Tokenizer
from tests.nano.conversations import TEXTS

NANO = Path(__file__).parents[2] / "models" / "kimi-nano"
SAMPLE = (
    "'", "'s", "'LL", "'rE", "'ſ", "’t", "d", "Zz", "ß", "ĳ", "ŉ", "ﬅ", "İ", "K", "的", "〇", "々", "ก็", "९",
    "한국어", "ﷺ",
    "²", "½", "1", "42", "0000", " ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000",
    "\u200b", "\u2028", "\x85", "\x00",
    "\x1c", ".", "!?", "_", "€", "🙂", "👩‍🚀", "e\u0301", "\u0301", "\ufeff", "\U000323af", "\U0001cc00", "<", "|", ">",
    "<|im_en", "[BO", "]", "Ġ", "Ċ", "Â",
)  # fmt: skip


def texts(seed: int) -> Iterator[str]:
    """Texts without control tokens: words of pieces that matter to split expressions, and characters of any kind."""
    random_ = random.Random(seed)
    yield from TEXTS
    yield from (f"{word}'{ending}{after}" for word, ending, after in product(
        ("I", "HE", "you", "они", "他", "1", " ", ""), CONTRACTIONS, ("", " x", "x", "X", "1", "'", "\n", "的")
    ))  # fmt: skip
    for _ in range(4000):
        yield "".join(random_.choices(SAMPLE, k=random_.randrange(1, 12)))
    for _ in range(2000):
        yield "".join(_character(random_) for _ in range(random_.randrange(1, 20)))


CONTRACTIONS = [
    "".join(letters)
    for word in ("s", "t", "re", "ve", "m", "ll", "d", "x")
    for letters in product(*({letter, letter.upper()} for letter in word))
]


def _character(random_: random.Random) -> str:
    while True:
        code = random_.randrange(random_.choice((0x80, 0x800, 0x3100, 0xA000, 0x10000, 0x32400, 0x110000)))
        if not 0xD800 <= code < 0xE000:
            return chr(code)


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.open(NANO)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Loaded by `AutoTokenizer.from_pretrained(folder)`, without trust_remote_code: the folder contains no code."""
    return AutoTokenizer.from_pretrained(NANO)


def test_any_text_has_our_ids(ours: Tokenizer, theirs: Any):
    for text in texts(1):
        assert theirs.encode(text) == ours.encode(text), repr(text)
        assert theirs(text)["input_ids"] == ours.encode(text), repr(text)


def test_control_tokens_that_are_spelled_are_read_as_in_raw_prompts(ours: Tokenizer, theirs: Any):
    random_ = random.Random(2)
    names = [ours.name(token) or "" for token in range(RANKS, RANKS + RESERVED)]
    for name in names:
        assert theirs.encode(f"a {name} b") == ours.encode_with_specials(f"a {name} b")
        assert theirs.convert_tokens_to_ids(name) == ours.special(name)
    for _ in range(1000):
        text = "".join(random_.choices([*SAMPLE, *names], k=random_.randrange(1, 12)))
        assert theirs.encode(text) == ours.encode_with_specials(text), repr(text)


def test_ids_are_the_same_text_with_and_without_control_tokens(ours: Tokenizer, theirs: Any):
    random_ = random.Random(3)
    for _ in range(2000):
        ids = random_.choices(range(ours.vocab_size), k=random_.randrange(1, 12))
        assert theirs.decode(ids) == ours.decode_bytes(ids).decode(errors="replace")
        kept = [token for token in ids if token not in ours.skipped]
        assert theirs.decode(ids, skip_special_tokens=True) == theirs.decode(kept)


def test_the_folder_says_what_its_special_tokens_are(ours: Tokenizer, theirs: Any):
    assert len(theirs) == ours.vocab_size == 4096
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.special("[BOS]"), ours.special("[EOS]"))
    assert (theirs.pad_token_id, theirs.unk_token_id) == (ours.special("[PAD]"), ours.special("[UNK]"))
    assert theirs.model_max_length == 65_536
    assert ours.special("<think>") not in theirs.all_special_ids, "it stays in the text, for reasoning parsers"


# Any vocabulary, besides that of nano.


def both(ranks: list[bytes], tmp_path: Path) -> tuple[Tokenizer, Callable[[str], list[int]]]:
    write(tmp_path, ranks)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    return Tokenizer.open(tmp_path), lambda text: library.encode(text).ids


@pytest.mark.parametrize("seed", range(8))
def test_vocabularies_whose_merges_compete_give_the_same_ids(tmp_path: Path, seed: int):
    """Random joins over a few letters, in random order: tokens that overlap, and some that merging never reaches."""
    random_ = random.Random(seed)
    tokens = [bytes([value]) for value in range(256)]
    letters = [b"a", b"b", b" ", "é".encode()]
    found = list(letters)
    while len(tokens) < 256 + 60:
        token = random_.choice(found) + random_.choice(found)
        if token not in tokens and len(token) < 12:
            tokens.append(token)
            found.append(token)
    added = tokens[256:]
    random_.shuffle(added)
    ranks = tokens[:256] + added
    ours, encode = both(ranks, tmp_path)
    assert len(merges({token: rank for rank, token in enumerate(ranks)})) < 60, "some are never reached by merging"
    for _ in range(1500):
        text = "".join(random_.choices("ab é", k=random_.randrange(1, 25)))
        assert encode(text) == ours.encode(text), repr(text)


def test_text_is_cut_at_the_same_places_whatever_its_characters(tmp_path: Path):
    """If every two bytes are a token, ids show each cut."""
    ours, encode = both(
        [bytes([value]) for value in range(256)] + [bytes(two) for two in product(range(256), repeat=2)], tmp_path
    )
    for code in [*range(0x3400), *range(0x3400, 0x32400, 131), *range(0x32400, 0x110000, 4099)]:
        if not 0xD800 <= code < 0xE000:
            one = chr(code)
            text = f"a{one}b {one}1{one}{one}'s.{one}A\n{one}\n {one} x'{one}B 的{one}的 1{one}23{one}!{one}"
            assert encode(text) == ours.encode(text), hex(code)


def test_moonshots_vocabulary_gives_the_same_ids():
    folder = os.environ.get("REDLINE_KIMI_TOKENIZER")
    if not folder:
        pytest.skip("REDLINE_KIMI_TOKENIZER names no folder with Moonshot's tiktoken.model")
    ours = Tokenizer.open(Path(folder))
    library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(ours)))
    for text in texts(4):
        assert library.encode(text).ids == ours.encode(text), repr(text)
    for rank in range(0, ours.vocab_size - RESERVED, 7):
        text = ours.token_bytes(rank).decode(errors="replace")
        assert library.encode(text).ids == ours.encode(text), repr(text)
    assert library.encode("<|im_user|>a<think>b").ids == ours.encode_with_specials("<|im_user|>a<think>b")
