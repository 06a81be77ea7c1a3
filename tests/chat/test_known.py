"""Cached encodings of texts: the ids equal those of the whole text, memory is bounded, and tenants are separate."""

from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.chat.known import KnownTexts, parts
from redline.chat.tokenizer import Tokenizer

NASTY = st.sampled_from(
    [
        "\n",
        "\r\n",
        " ",
        "  ",
        "\t",
        "the",
        "functions",
        "hello",
        "a",
        "I'll",
        "12",
        "5",
        "!",
        "--",
        "你好",
        "é",
        "\u0301",
    ]
)
TEXTS = st.lists(NASTY | st.text(max_size=3), min_size=1, max_size=40).map("".join)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few characters, so that a short text has many."""
    monkeypatch.setattr("redline.chat.known.PART_CHARS", 5)
    monkeypatch.setattr("redline.chat.known.LEAST_CHARS", 3)


@given(text=TEXTS)
def test_the_ids_of_the_parts_are_those_of_the_whole(tiny: Tokenizer, text: str):
    known = KnownTexts(1 << 20)
    cut = list(parts(text))
    assert "".join(cut) == text
    for _ in range(2):
        assert tiny.encode_pieces((text,), known=known) == tiny.encode(text)


def test_texts_are_cut_behind_lines_and_words():
    assert list(parts("hello the\nhello the hello")) == ["hello the\n", "hello the", " hello"]
    assert list(parts("hello  the\n\n hello\t")) == ["hello  the\n\n hello\t"]


def test_a_known_text_is_not_encoded_again():
    known, encode = KnownTexts(1 << 20), Mock(return_value=[1, 70_000])
    assert [list(known.ids("a", "hello", encode)) for _ in range(3)] == [[1, 70_000]] * 3
    assert encode.call_count == 1


def test_a_text_of_another_salt_is_encoded_again():
    known, encode = KnownTexts(1 << 20), Mock(return_value=[1])
    known.ids("a", "hello", encode)
    known.ids("b", "hello", encode)
    assert encode.call_count == 2


def test_a_short_text_is_not_kept():
    known = KnownTexts(1 << 20)
    known.ids("", "ab", lambda _: [1])
    assert known.bytes == 0


def test_the_text_that_was_asked_for_longest_ago_makes_room():
    known, encode = KnownTexts(1000), Mock(return_value=[1] * 10)
    for text in ("text0", "text1", "text0", "text2"):
        known.ids("", text, encode)
        assert 0 < known.bytes <= 1000
    assert encode.call_count == 3
    known.ids("", "text0", encode)
    assert encode.call_count == 3
    known.ids("", "text1", encode)
    assert encode.call_count == 4


def test_a_text_beyond_the_bound_is_not_kept():
    known = KnownTexts(1000)
    known.ids("", "x" * 2000, lambda _: [1])
    assert known.bytes == 0
