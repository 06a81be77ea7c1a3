"""The vocabulary's trainer, and the committed vocabulary."""

import json
from pathlib import Path

import pytest

from nano.tokenizer import SPECIALS, TOKENIZER_FILES, pieces, train, write
from redline.chat.tokenizer import RESERVED, Tokenizer

TEXTS = [
    "the cat sat on the mat with 12345 other cats, and 12 12 12 12 more; " * 3,
    "def add(left, right):\n    return left + right\n" * 5,
    "Größe, 大きい, большой, ²³ and ½.",
]
COMMITTED = Path(__file__).parents[2] / "models/kimi-nano"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("vocabulary")
    write(folder, train(TEXTS, 300))
    return Tokenizer.open(folder)


def test_digits_never_merge_and_text_comes_back(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("12345")) == 5
    for text in TEXTS:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text


def test_the_most_frequent_pair_merges_first() -> None:
    ranks = train(["abab abab abab xy"], 258)
    assert ranks[256:] == [b"ab", b"abab"]


def test_training_stops_where_no_pair_occurs_twice() -> None:
    assert len(train(["abc"], 1_000)) == 256


def test_training_gives_the_same_ranks_whatever_the_order_of_texts() -> None:
    assert train(TEXTS, 300) == train(TEXTS[::-1], 300)


def test_encoding_agrees_with_the_merges_that_were_trained(tokenizer: Tokenizer) -> None:
    """Every rank is the encoding of its own bytes; otherwise no text could produce it."""
    for rank in range(256, tokenizer.vocab_size - 256):
        text = tokenizer.token_bytes(rank).decode(errors="ignore")
        if text.encode() == tokenizer.token_bytes(rank):
            assert tokenizer.encode(text) == [rank], text


def test_specials_lie_at_kimis_offsets(tokenizer: Tokenizer) -> None:
    first = tokenizer.vocab_size - 256
    for offset, (name, _) in SPECIALS.items():
        assert tokenizer.special(name) == first + offset
    assert tokenizer.name(first + 5) == f"<|reserved_token_{first + 5}|>"


def test_pieces_join_to_the_text_and_hold_at_most_one_digit() -> None:
    for text in TEXTS:
        cut = list(pieces(text))
        assert "".join(cut) == text
        assert all(sum(char.isdigit() for char in piece) <= 1 for piece in cut)


def test_the_committed_vocabulary_has_the_size_of_the_model() -> None:
    tokenizer = Tokenizer.open(COMMITTED)
    assert tokenizer.vocab_size == 4_096
    assert tokenizer.special("<|im_end|>") == 3_842
    assert not any(sum(48 <= byte < 58 for byte in tokenizer.token_bytes(rank)) > 1 for rank in range(3_840))
    config = json.loads((COMMITTED / "tokenizer_config.json").read_text())
    assert config["added_tokens_decoder"]["3862"]["content"] == "<think>"


def test_the_committed_files_are_what_is_written_of_the_vocabulary_today(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(COMMITTED)
    write(tmp_path, list(map(tokenizer.token_bytes, range(tokenizer.vocab_size - RESERVED))))
    for name in TOKENIZER_FILES:
        assert (tmp_path / name).read_bytes() == (COMMITTED / name).read_bytes(), name
