import base64
import hashlib
import sys
from pathlib import Path

import pytest
import tiktoken
from tiktoken_ext import openai_public

from redline.bench.serving.vocabulary import O200K_SPECIALS, O200K_SPLIT, TextVocabulary, o200k, open_vocabulary
from redline.errors import ConfigError

NANO = Path("models/kimi-nano")
TEXTS = ("", "Hello, world!", "naïve 12345 の 漢字\n\n  x", "<|im_end|> is text, it's what I'VE said", "\u200d👩‍💻")


@pytest.fixture
def small_o200k(tmp_path: Path) -> Path:
    """A file in the format of o200k_base.tiktoken, with few merges."""
    tokens = [bytes([value]) for value in range(256)] + [b"th", b"the", b" the", b" a", b" of"]
    path = tmp_path / "o200k_base.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_a_checkpoint_counts_the_same_in_both_of_its_files(text: str) -> None:
    kimi, face = open_vocabulary(NANO), open_vocabulary(NANO / "tokenizer.json")
    assert kimi.encode(text) == face.encode(text)
    assert kimi.decode(kimi.encode(text)) == face.decode(face.encode(text)) == text


def test_both_readers_agree_on_sizes_and_control_tokens() -> None:
    kimi, face = open_vocabulary(NANO), open_vocabulary(NANO / "tokenizer.json")
    assert kimi.size == face.size == 4096
    assert face.specials <= kimi.specials
    assert kimi.added == face.added == 0
    assert kimi.name == face.name == str(NANO)


def test_o200k_cuts_as_tiktokens_own_registry_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    theirs = openai_public.o200k_base()
    assert theirs["pat_str"] == O200K_SPLIT
    assert theirs["special_tokens"] == O200K_SPECIALS


def test_o200k_of_a_file(small_o200k: Path) -> None:
    vocabulary = o200k(small_o200k)
    assert vocabulary is not None
    assert vocabulary.encode("the the") == [257, 258]
    assert vocabulary.decode([257, 258]) == "the the"
    assert {261, 199999, 200018} <= vocabulary.specials
    assert 260 not in vocabulary.specials
    assert vocabulary.size == 200019
    assert open_vocabulary(small_o200k).encode("of the") == vocabulary.encode("of the")


def test_o200k_of_tiktokens_cache_and_never_of_the_network(
    small_o200k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tiktoken.load, "read_file", asked.append)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    assert o200k() is None
    (tmp_path / "cache").mkdir()
    address = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
    small_o200k.rename(tmp_path / "cache" / hashlib.sha1(address.encode()).hexdigest())
    cached = o200k()
    assert cached is not None
    assert cached.name == "o200k_base"
    assert asked == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder, "neither tiktoken.model nor tokenizer.json"),
        (lambda folder: folder / "gone", "does not exist"),
        (lambda folder: _written(folder / "cl100k_base.tiktoken", ""), "expected tiktoken.model, tokenizer.json or"),
        (lambda folder: _written(folder / "tokenizer.json", "{"), "not a tokenizer.json"),
        (lambda folder: _written(folder / "o200k_base.tiktoken", "AA== 0\nx\n"), "line 2"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(tmp_path: Path, make, said: str) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=said) as caught:
        open_vocabulary(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_package_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        open_vocabulary(NANO / "tokenizer.json")


def test_a_vocabulary_is_one_by_its_protocol(small_o200k: Path) -> None:
    for path in (NANO, NANO / "tokenizer.json", small_o200k):
        vocabulary: TextVocabulary = open_vocabulary(path)
        assert all(token < vocabulary.size for token in vocabulary.specials)


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
