"""Vocabularies that encode and decode text, without the model and without torch. Nothing is downloaded.

A vocabulary is that of the served model (`--tokenizer`), so that client and server count the same tokens of a prompt,
or o200k, in which Artificial Analysis counts the tokens of all models.
"""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import tiktoken

from redline.chat.tokenizer import Tokenizer, read_ranks
from redline.errors import ConfigError

# From tiktoken's registry (tiktoken_ext.openai_public): the split pattern of o200k_base, its control tokens, and the
# address of its file; tiktoken's cache stores the file under the SHA-1 of the address.
_WORD, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_SPLIT = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD}*{_SMALL}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD}+{_SMALL}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
O200K_SPECIALS = {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}
_O200K_ADDRESS = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"


class TextTokenizer(Protocol):
    """Splits text into tokens. Text that spells a control token is encoded as text.

    name: the folder, file or server that it comes from. added: control tokens that a server adds to plain text, such as
    a token at its start; `encode` leaves them out.
    """

    @property
    def name(self) -> str: ...

    @property
    def added(self) -> int: ...

    def encode(self, text: str) -> Sequence[int]: ...


@runtime_checkable
class TextVocabulary(TextTokenizer, Protocol):
    """All tokens of a model, with their texts; invalid UTF-8 becomes U+FFFD.

    size: ids are in [0, size). specials: the control tokens, which prompts never contain.
    """

    @property
    def size(self) -> int: ...

    @property
    def specials(self) -> frozenset[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def open_vocabulary(path: Path) -> TextVocabulary:
    """The vocabulary of --tokenizer: a folder with tiktoken.model or tokenizer.json, or a file.

    A file is one of those two or o200k_base.tiktoken. In a folder with both, tiktoken.model is used, as in serving.
    Raises ConfigError with the fix.
    """
    if path.is_dir():
        for name in ("tiktoken.model", "tokenizer.json"):
            if (path / name).exists():
                return open_vocabulary(path / name)
        raise ConfigError(
            f"--tokenizer {path}: contains neither tiktoken.model nor tokenizer.json; name a model folder"
        )
    if not path.exists():
        raise ConfigError(
            f"--tokenizer {path}: does not exist; name a model folder (names of the Hugging Face Hub are not resolved)"
        )
    if path.name == "tiktoken.model":
        return _Kimi(path.parent)
    if path.suffix == ".json":
        return _HuggingFace(path)
    if path.name.startswith("o200k_base"):
        return _o200k(path)
    raise ConfigError(f"--tokenizer {path}: expected tiktoken.model, tokenizer.json or o200k_base.tiktoken")


def o200k(path: Path | None = None) -> TextVocabulary | None:
    """o200k_base from a file, or by default from tiktoken's cache (TIKTOKEN_CACHE_DIR); None if not found.

    Raises ConfigError if the given path cannot be read.
    """
    if path is not None:
        return _o200k(path)
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))
    cached = Path(folder, hashlib.sha1(_O200K_ADDRESS.encode()).hexdigest())
    return _o200k(cached) if folder and cached.is_file() else None


def _o200k(path: Path) -> TextVocabulary:
    ranks = read_ranks(path)
    first = min(O200K_SPECIALS.values())
    if len(ranks) >= first:
        raise ConfigError(f"{path}: {len(ranks)} ranks are too many for o200k_base, which has fewer than {first}")
    return _Tiktoken(
        tiktoken.Encoding("o200k_base", pat_str=O200K_SPLIT, mergeable_ranks=ranks, special_tokens=O200K_SPECIALS),
        frozenset(range(len(ranks), max(O200K_SPECIALS.values()) + 1)),  # the ids in between are unused
    )


class _Tiktoken:
    added = 0

    def __init__(self, encoding: tiktoken.Encoding, specials: frozenset[int]) -> None:
        self._encoding = encoding
        self.name, self.size, self.specials = encoding.name, encoding.n_vocab, specials

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(ids)


class _Kimi:
    added = 0

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.open(folder)
        self.name, self.size = str(folder), self._tokenizer.vocab_size
        self.specials = frozenset(self._tokenizer.specials.values())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode_bytes(ids).decode(errors="replace")


class _HuggingFace:
    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(
                f"--tokenizer {path}: reading it needs the package `tokenizers`: pip install tokenizers, or "
                "use a folder with tiktoken.model"
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--tokenizer {path}: cannot be read ({error.strerror})") from None
        except Exception as error:  # the package raises plain Exception, for its own errors and for Unicode
            raise ConfigError(f"--tokenizer {path}: not a tokenizer.json ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # encode text that spells a control token as text
        self.name = str(path.parent if path.name == "tokenizer.json" else path)
        self.size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.added: int = self._tokenizer.num_special_tokens_to_add(False)
        self.specials: frozenset[int] = frozenset(self._tokenizer.get_added_tokens_decoder())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
