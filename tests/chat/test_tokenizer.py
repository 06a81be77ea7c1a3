"""Text to ids and back: exact, safe against text that spells control tokens, with clear errors for broken files."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from redline.chat.tokenizer import Special, TextStream, Tokenizer
from redline.errors import CheckpointError, ConfigError, ContextTooLong, RequestError
from tests.tiny_tokenizer import MERGES, TINY_VOCAB, write_tiny_tokenizer
from tests.work import lines

FIRST = 256 + len(MERGES)


def test_text_survives_the_way_to_ids_and_back(tiny: Tokenizer):
    text = "hello and the functions\n\n  12345 你好 🙂 é\u0301 <|im_end|>"
    assert tiny.decode_bytes(tiny.encode(text)).decode() == text


def test_merges_are_used(tiny: Tokenizer):
    assert [tiny.token_bytes(token) for token in tiny.encode("functions")] == [b"functions"]


def test_control_tokens_in_text_are_text(tiny: Tokenizer):
    ids = tiny.encode("<|im_end|><think>[EOS]")
    assert max(ids) < FIRST


def test_control_tokens_are_read_where_asked_for(tiny: Tokenizer):
    ids = tiny.encode_with_specials("<|im_user|>hello<|im_end|>")
    assert ids == [tiny.special("<|im_user|>"), *tiny.encode("hello"), tiny.special("<|im_end|>")]


def test_special_ids_come_from_the_config_by_name(tmp_path: Path):
    folder = write_tiny_tokenizer(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = config["added_tokens_decoder"]
    config["added_tokens_decoder"] = {str(2 * FIRST + 255 - int(token)): entry for token, entry in added.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.special("[BOS]") == FIRST + 255
    assert tokenizer.stop_ids == (FIRST + 254, FIRST + 253)
    assert tokenizer.encode_with_specials("[EOS]") == [FIRST + 254]


def test_a_checkpoints_config_is_kept_with_its_chat_template(tmp_path: Path):
    folder = write_tiny_tokenizer(tmp_path)
    assert "chat_template" not in Tokenizer.open(folder).config
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    config = Tokenizer.open(folder).config
    assert (config["eos_token"], config["chat_template"]) == ("[EOS]", "{{ messages }}")


def test_ids_without_a_name_are_reserved_tokens(tiny: Tokenizer):
    assert tiny.special(f"<|reserved_token_{FIRST + 5}|>") == FIRST + 5
    assert tiny.token_bytes(FIRST + 5) == b"<|reserved_token_%d|>" % (FIRST + 5)
    assert tiny.vocab_size == TINY_VOCAB == FIRST + 256


def test_chat_marks_are_kept_in_text_and_other_control_tokens_are_not(tiny: Tokenizer):
    assert tiny.special("<think>") not in tiny.skipped
    assert tiny.special("<|tool_call_begin|>") not in tiny.skipped
    assert {tiny.special("<|im_end|>"), FIRST + 5} <= tiny.skipped


def test_an_absent_control_token_is_named(tiny: Tokenizer):
    with pytest.raises(ConfigError, match=r"no control token <\|im_wizard\|>"):
        tiny.special("<|im_wizard|>")


@pytest.mark.parametrize("token", [-1, TINY_VOCAB])
def test_an_id_outside_the_vocabulary_is_the_clients_error(tiny: Tokenizer, token: int):
    with pytest.raises(RequestError, match=str(token)):
        tiny.decode_bytes([token])


def test_text_between_control_tokens_is_encoded_whole(tiny: Tokenizer):
    pieces = (Special("<|im_user|>"), "hello the", Special("<|im_end|>"))
    assert tiny.encode_pieces(pieces) == tiny.encode_with_specials("<|im_user|>hello the<|im_end|>")


def test_long_runs_are_cut_where_moonshot_cuts_them(tiny: Tokenizer):
    assert tiny.encode("th" * 15_000) == tiny.encode("th" * 12_500) + tiny.encode("th" * 2_500)
    odd = "x" + "th" * 15_000  # the cut falls into a "th"
    assert tiny.encode(odd) == tiny.encode(odd[:25_000]) + tiny.encode(odd[25_000:])
    assert tiny.encode(odd) != tiny.encode("x") + tiny.encode("th") * 15_000


def test_long_texts_are_cut_every_400_000_characters(tiny: Tokenizer):
    text = "x" + " the" * 100_000
    assert tiny.encode(text) == tiny.encode(text[:400_000]) + tiny.encode(text[400_000:])
    assert tiny.encode(text) != tiny.encode("x") + tiny.encode(" the") * 100_000


def test_a_run_is_not_cut_at_its_end(tiny: Tokenizer):
    text = " " * 50_000 + "the"
    whole = tiny.encode(text[25_000:])
    assert tiny.encode(text) == tiny.encode(" " * 25_000) + whole
    assert whole != tiny.encode(" " * 25_000) + tiny.encode("the")


def test_a_run_is_cut_as_often_as_it_is_long(tiny: Tokenizer):
    odd = "x" + "th" * 30_000  # both cuts fall into a "th"
    assert tiny.encode(odd) == [
        token for part in (odd[:25_000], odd[25_000:50_000], odd[50_000:]) for token in tiny.encode(part)
    ]


def test_encoding_ends_at_the_first_slice_behind_as_many_ids_as_are_wanted(tiny: Tokenizer):
    text = "x" * 50_001  # three slices
    for encode in (tiny.encode_with_specials, lambda text, most: tiny.encode_pieces((text,), most)):
        assert len(encode(text, 50_000)) == 50_001
        with pytest.raises(ContextTooLong, match="more than 50000 tokens"):
            encode(text, 49_999)


def test_whoever_waits_is_asked_before_each_slice(tiny: Tokenizer):
    for encode in (tiny.encode_with_specials, lambda text, *rest: tiny.encode_pieces((text,), *rest)):
        asked = Mock()
        encode("x" * 50_001, 10**6, asked)
        assert asked.call_count == 3


def test_runs_in_later_slices_are_cut_where_they_lie(tiny: Tokenizer):
    text = "a b " * 100_000 + "ab c" + "th" * 20_000  # the cuts: every 400,000 characters, and 25,000 after the c
    odd = 400_003 + 25_000
    assert tiny.encode(text) == [
        token for part in (text[:400_000], text[400_000:odd], text[odd:]) for token in tiny.encode(part)
    ]
    assert tiny.encode(text) != tiny.encode(text[:400_000]) + tiny.encode("ab ") + tiny.encode("c" + "th" * 20_000)[1:]


def test_half_a_character_ends_at_a_control_token_that_has_no_text(tiny: Tokenizer):
    skipped = tiny.special("<|im_user|>")
    stream = TextStream(tiny, frozenset({skipped}))
    assert [stream.push(token) for token in (0xC3, skipped, 0xA9)] == ["", "\ufffd", "\ufffd"]
    shown = TextStream(tiny, frozenset())
    assert [shown.push(token) for token in (0x61, skipped)] == ["a", "<|im_user|>"]


def test_cuts_count_the_control_tokens_around_a_text_too(tiny: Tokenizer):
    text = "th" * 13_000
    name = "<|im_user|>"
    ids = tiny.encode_pieces((Special(name), text))
    at = 25_000 - len(name)
    assert ids == [tiny.special(name), *tiny.encode(text[:at]), *tiny.encode(text[at:])]


@pytest.mark.parametrize("unit", ["a", " ", "\n", "!", "1", "你", "\u0301", " " * 24_999 + "x"])
def test_a_hostile_text_costs_no_more_than_its_length(tiny: Tokenizer, unit: str, monkeypatch: pytest.MonkeyPatch):
    """Each character is encoded once, in texts with short runs: the cost of a run is quadratic in its length."""
    text, given = unit * (200_000 // len(unit)), list[str]()

    class Watched:
        def encode_ordinary(self, part: str) -> list[int]:
            given.append(part)
            return encoding.encode_ordinary(part)

    encoding = tiny._encoding
    monkeypatch.setattr(tiny, "_encoding", Watched())
    assert lines(lambda: tiny.encode(text)) < 2_000
    assert "".join(given) == text
    assert max(len(run) for part in given for run in re.findall(r"\s+|\S+", part)) <= 25_000


def test_bytes_wait_until_their_character_is_complete(tiny: Tokenizer):
    stream = TextStream(tiny, frozenset())
    assert [stream.push(byte) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert stream.push(0xE2) == ""
    assert stream.flush() == "\ufffd"


def test_impossible_bytes_become_the_replacement_character(tiny: Tokenizer):
    data = b"a\xff\xe2\x82b\xf0\x9f"
    stream = TextStream(tiny, frozenset())
    assert "".join(map(stream.push, data)) + stream.flush() == data.decode(errors="replace")


def broken(folder: Path, file: str, old: bytes, new: bytes) -> Path:
    write_tiny_tokenizer(folder)
    content = (folder / file).read_bytes()
    assert old in content
    (folder / file).write_bytes(content.replace(old, new, 1))
    return folder


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("tiktoken.model", b"AA== 0\n", b"not base64 0\n", "line 1 is not `base64 rank`"),
        ("tiktoken.model", b"AA== 0\n", b"A?A== 0\n", "line 1 is not `base64 rank`"),
        ("tiktoken.model", b"AQ== 1\n", b"AQ==! 1\n", "line 2 is not `base64 rank`"),
        ("tiktoken.model", b"AQ== 1\n", b"AQ== x\n", "line 2 is not `base64 rank`"),
        ("tiktoken.model", b"AQ== 1\n", b"AQ== 7\n", "line 2 is not a new token of rank 1"),
        ("tiktoken.model", b"AQ== 1\n", b"AA== 1\n", "line 2 is not a new token of rank 1"),
        ("tiktoken.model", b"AA== 0\n", b"YWJj 0\n", "1 of the 256 single bytes are missing"),
        ("tokenizer_config.json", b"{", b"", "expected added_tokens_decoder"),
        ("tokenizer_config.json", b"added_tokens_decoder", b"other", "expected added_tokens_decoder"),
        ("tokenizer_config.json", b'"content"', b'"contents"', "expected added_tokens_decoder"),
        ("tokenizer_config.json", b'"%d"' % FIRST, b'"7"', r"\[BOS\] has id 7; expected one in"),
        ("tokenizer_config.json", b"[BOS]", b"[EOS]", "names one control token twice"),
        ("tokenizer_config.json", b"<|im_end|>", b"<|im_stop|>", r"no control token <\|im_end\|>"),
        ("tokenizer_config.json", b'"[PAD]"', b'""', r"content of id \d+ is ''; expected a token's text"),
        ("tokenizer_config.json", b'"[PAD]"', b'"\\ud800"', r"content of id \d+ is '\\ud800'; expected"),
        ("tokenizer_config.json", b'"[PAD]"', b"null", r"content of id \d+ is None; expected"),
        ("tokenizer_config.json", b'"[PAD]"', b'["[PAD]"]', r"content of id \d+ is \['\[PAD\]'\]; expected"),
        ("tokenizer_config.json", b"[PAD]", b"<|reserved_token_%d|>" % (FIRST + 40), "names one control token twice"),
        ("tokenizer_config.json", b'"%d"' % (FIRST + 255), b'" %d"' % FIRST, "has one id twice"),
        ("tokenizer_config.json", b"{", b'{"a": ' + b"[" * 100_000, "expected added_tokens_decoder"),
    ],
)
def test_a_broken_file_is_named_with_what_was_expected(tmp_path: Path, file: str, old: bytes, new: bytes, message: str):
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.open(broken(tmp_path, file, old, new))
    assert str(tmp_path / file) in str(caught.value)


@pytest.mark.parametrize("file", ["tiktoken.model", "tokenizer_config.json"])
def test_a_missing_file_is_named(tmp_path: Path, file: str):
    (write_tiny_tokenizer(tmp_path) / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        Tokenizer.open(tmp_path)


def test_moonshots_vocabulary_gives_the_published_ids(kimi: Tokenizer):
    assert kimi.vocab_size == 163_840
    assert kimi.stop_ids == (163_585, 163_586)
    assert kimi.encode("functions.get_weather:0") == [41937, 1150, 21055, 2800, 25, 15]
    assert kimi.encode("## Return of ") == [798, 6014, 318, 220]
    assert kimi.encode("## Return of functions") == [798, 6014, 318, 8271]
    assert kimi.encode("tool_declare") == [20960, 35556, 677]
    image = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    assert kimi.encode_with_specials(image) == [163602, 4017, 163603, 163605, 163604]
    assert kimi.special("<|reserved_token_163600|>") == 163_600
