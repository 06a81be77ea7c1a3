"""Text to token ids and back, from a checkpoint's files.

Kimi's are two: `tiktoken.model` contains the byte-pair ranks; the 256 ids after them are reserved for control tokens,
and `tokenizer_config.json` names those in use. Other checkpoints have `tokenizer.json` (`JsonTokenizer`). Control
tokens are made by name only (`special`), never by spelling: `encode` reads `<|im_end|>` in a user's text as ten
ordinary characters.
"""

import base64
import binascii
import codecs
import json
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tiktoken

from redline.chat.conversation import Picture
from redline.chat.known import KnownTexts, parts
from redline.errors import CheckpointError, ConfigError, ContextTooLong, RequestError
from redline.messages.job import MediaSpan

RESERVED = 256  # ids after the ranks, for control tokens
ENDS = "[EOS]", "<|im_end|>"  # control tokens with which Kimi ends an answer
_CALL_MARKS = "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"

# How Kimi splits text before byte-pair encoding: Han runs, words, numbers of up to three digits, punctuation, space.
_WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD}*{_SMALL}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD}+{_SMALL}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# Moonshot's tokenizer splits its input at these lengths before it encodes, so the ids of very long texts depend on
# them. They also keep the cost of a hostile text linear in its length.
_SLICE_CHARS = 400_000
_RUN_CHARS = 25_000
# The look-behinds let a match begin only at the start of a run, which keeps the search linear.
_LONG_RUN = re.compile(rf"(?<!\s)\s{{{_RUN_CHARS + 1},}}|(?<!\S)\S{{{_RUN_CHARS + 1},}}")


@dataclass(frozen=True, slots=True)
class Special:
    """A control token, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Pad(Special):
    """The control token that is repeated for the positions of an image."""

    picture: Picture


Piece = Special | str


def span_of(picture: Picture, start: int) -> MediaSpan:
    """The positions of an image in a prompt of token ids."""
    return MediaSpan(
        start=start,
        tokens=picture.tokens,
        hash=picture.hash,
        frames=picture.frames,
        rows=picture.rows,
        columns=picture.columns,
    )


class Tokenizer:
    """The vocabulary of one checkpoint. Immutable; safe to share between threads.

    `specials` maps the name of every control token to its id, `stop_ids` has the ids with which the model ends an
    answer, `config` is the content of tokenizer_config.json and the chat template, if it was read from a folder.
    """

    def __init__(
        self,
        ranks: dict[bytes, int],
        names: dict[int, str],
        kept: frozenset[int] = frozenset(),
        ends: Sequence[str] = ENDS,
    ) -> None:
        """ranks: the bytes of ordinary token 0, 1, 2 ..., in that order. names: the control tokens in use, by id.

        kept: control tokens that stay in plain text (the config's `special: false`, such as `<think>`). ends: those
        that end an answer. Every reserved id without a name is `<|reserved_token_{id}|>`. Raises ConfigError if a name
        occurs twice, or one of `ends` is missing.
        """
        first = len(ranks)
        self.ordinary: Sequence[int] = range(first)  # ids of all tokens that are text
        reserved = range(first, first + RESERVED)
        self._names = {token: names.get(token, f"<|reserved_token_{token}|>") for token in reserved}
        self.specials = {name: token for token, name in self._names.items()}
        if len(self.specials) < RESERVED:
            raise ConfigError("added_tokens_decoder names one control token twice")
        self._bytes = [*ranks, *(name.encode() for name in self._names.values())]
        self._encoding = tiktoken.Encoding(
            "kimi",
            pat_str=SPLIT,
            mergeable_ranks=ranks,
            special_tokens=self.specials,
            explicit_n_vocab=first + RESERVED,
        )
        self.vocab_size = first + RESERVED
        self.stop_ids = tuple(map(self.special, ends))
        self.skipped = frozenset(reserved) - kept  # left out of text by default
        self.config: dict[str, Any] = {}

    @property
    def encoding(self) -> tiktoken.Encoding:
        """The vocabulary as a tiktoken Encoding, for libraries that need one."""
        return self._encoding

    @classmethod
    def open(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint folder. Raises CheckpointError, which names the file."""
        if not (folder / "tiktoken.model").exists() and (folder / "tokenizer.json").exists():
            return JsonTokenizer(folder)
        ranks = read_ranks(folder / "tiktoken.model")
        path = folder / "tokenizer_config.json"
        config, names, kept = _read_config(path, len(ranks))
        try:
            tokenizer = cls(ranks, names, kept)
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from None
        with suppress(OSError, UnicodeDecodeError):  # kept for clients; this package never renders it
            config["chat_template"] = (folder / "chat_template.jinja").read_text("utf-8")
        tokenizer.config = config
        return tokenizer

    def special(self, name: str) -> int:
        """The id of a control token. Raises ConfigError if the checkpoint has none of that name."""
        token = self.specials.get(name)
        if token is None:
            raise ConfigError(f"the tokenizer has no control token {name}")
        return token

    @property
    def call_marks(self) -> tuple[int, ...]:
        """The control tokens that begin tool calls: of a section of calls, then of one call; () if there are none."""
        return tuple(self.specials[mark] for mark in _CALL_MARKS if mark in self.specials)

    def name(self, token: int) -> str | None:
        """The name of a control token; None for an ordinary one."""
        return self._names.get(token)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; a control token spelled out in it is text too."""
        return self.encode_pieces((text,))

    def encode_pieces(
        self,
        pieces: Iterable[Piece],
        most: int = sys.maxsize,
        between: Callable[[], None] = lambda: None,
        known: KnownTexts | None = None,
        salt: str = "",
        media: list[MediaSpan] | None = None,
    ) -> list[int]:
        """Ids of text with control tokens in between, equal to those of the upstream tokenizer for the joined string.

        The slices of that string (see _cuts) end at the same characters here, so the ids of long prompts agree too.
        Encoding takes up to a second per million characters, so `between` is called before each slice, and may raise.
        `known` caches the ids of a slice's parts, under `salt`, without changing any id. Raises ContextTooLong, without
        encoding the rest, if there are more than `most` ids before the last slice (with `known`: its last part), and
        ConfigError if the checkpoint has no control token of a given name. The spans of images are added to `media`.
        """
        pieces = tuple(pieces)
        joined = "".join(piece.name if isinstance(piece, Special) else piece for piece in pieces)
        cuts = self._cuts(joined)
        ids: list[int] = []
        end = 0
        for piece in pieces:
            if isinstance(piece, Special):
                count = 1
                if isinstance(piece, Pad):
                    count = piece.picture.tokens
                    _check_length(ids, most - count)
                    if media is not None:
                        media.append(span_of(piece.picture, len(ids)))
                ids += [self.special(piece.name)] * count
                end += len(piece.name)
            else:
                start, end = end, end + len(piece)
                inside = cuts[bisect_right(cuts, start) : bisect_left(cuts, end)]
                for text in _slices(piece, [cut - start for cut in inside]):
                    for part in (text,) if known is None else self._parts(text):
                        between()
                        _check_length(ids, most)
                        ids += self._text_ids(part) if known is None else known.ids(salt, part, self._text_ids)
        return ids

    def encode_with_specials(
        self, text: str, most: int = sys.maxsize, between: Callable[[], None] = lambda: None
    ) -> list[int]:
        """Ids of text in which control tokens may be spelled out. Never for text that a user wrote into a chat.

        `most`, `between` and ContextTooLong: as for encode_pieces.
        """
        ids: list[int] = []
        for part in _slices(text, self._cuts(text)):
            between()
            _check_length(ids, most)
            ids += self._marked_ids(part)
        return ids

    def _text_ids(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def _marked_ids(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def _cuts(self, text: str) -> list[int]:
        return _cuts(text)

    def _parts(self, text: str) -> Iterable[str]:
        return parts(text)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; for a control token its name. Raises RequestError for an invalid token id."""
        if not 0 <= token < self.vocab_size:
            raise RequestError(f"token id {token} is not in [0, {self.vocab_size})", "tokens")
        return self._bytes[token]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of several tokens, perhaps incomplete characters. Raises RequestError for an invalid token id."""
        return b"".join(map(self.token_bytes, ids))


class JsonTokenizer(Tokenizer):
    """The vocabulary of a `tokenizer.json` of byte-level BPE, such as DeepSeek-V3's, read by the library tokenizers.

    Ids up to config.json's vocab_size that have no token are `<|reserved_token_{id}|>`, as in Kimi's. `json`: the file
    without its control tokens, which are looked up by name here.
    """

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError, which names the file, if it cannot be used."""
        path = folder / "tokenizer.json"
        try:
            import tokenizers
        except ImportError:
            raise CheckpointError(f"{path}: needs the library tokenizers: pip install tokenizers") from None
        content, beside, config = (_json(folder / name) for name in (path.name, "tokenizer_config.json", "config.json"))
        try:
            vocabulary: dict[str, int] = content["model"]["vocab"]
            added: list[dict[str, Any]] = content["added_tokens"]
            names = {int(entry["id"]): str(entry["content"]) for entry in added}
            kept = frozenset(int(entry["id"]) for entry in added if not entry["special"])
            ordinary = {token: spelled for spelled, token in vocabulary.items() if token not in names}
            text = {token: bytes(map(_BYTES.__getitem__, spelled)) for token, spelled in ordinary.items()}
            last: Any = beside["eos_token"]
            end = last if isinstance(last, str) else str(last["content"])
            self.json = json.dumps({**content, "added_tokens": [], "post_processor": None})
            self._library = tokenizers.Tokenizer.from_str(self.json)
        except Exception as error:  # the library raises Exception itself
            raise CheckpointError(
                f"{path}: expected a byte-level BPE vocabulary, and eos_token in tokenizer_config.json: {error!r}"
            ) from None
        if not set(_BYTES) <= vocabulary.keys():
            raise CheckpointError(f"{path}: single bytes are missing; expected a byte-level vocabulary")
        self.vocab_size = max(*names, *text, int(config.get("vocab_size") or 1) - 1) + 1
        self._names = {
            token: names.get(token, f"<|reserved_token_{token}|>")
            for token in range(self.vocab_size)
            if token not in text
        }
        self.specials = {name: token for token, name in self._names.items()}
        named = {token: name.encode() for token, name in self._names.items()}
        self._bytes = [(text if token in text else named)[token] for token in range(self.vocab_size)]
        self.ordinary = sorted(text)
        self.skipped = frozenset(self._names) - kept
        self.config = beside
        self._spelled = re.compile("|".join(map(re.escape, sorted(names.values(), key=len, reverse=True))))
        try:
            self.stop_ids = (self.special(end),)
        except ConfigError as error:
            raise CheckpointError(f"{folder / 'tokenizer_config.json'}: eos_token: {error}") from None
        with suppress(OSError, UnicodeDecodeError):
            self.config["chat_template"] = (folder / "chat_template.jinja").read_text("utf-8")

    def _text_ids(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def _marked_ids(self, text: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for found in self._spelled.finditer(text):
            ids += [*self._text_ids(text[end : found.start()]), self.specials[found[0]]]
            end = found.end()
        return ids + self._text_ids(text[end:])

    def _cuts(self, text: str) -> list[int]:
        return []

    def _parts(self, text: str) -> Iterable[str]:
        return (text,)  # where tokens cannot span depends on the file's own expressions


# Byte-level BPE spells a byte as one character: printable ones of Latin-1 as themselves, the others from U+0100 on.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [value for value in range(256) if value not in _PRINTABLE]
_BYTES = {chr(value): value for value in _PRINTABLE} | {chr(0x100 + at): value for at, value in enumerate(_OTHERS)}


def _json(path: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); expected a JSON object") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: expected a JSON object") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return cast("dict[str, Any]", content)


class TextStream:
    """Tokens in, text out, one at a time: a character is returned when its last byte has arrived.

    Invalid bytes become U+FFFD, exactly as if all bytes had been decoded at once. The control tokens in `skipped` have
    no text.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._pending = b""

    def push(self, token: int) -> str:
        """The text that this token completes, which may be empty. Raises RequestError for an invalid token id."""
        if token in self._skipped:
            return self.flush()
        data = self._pending + self._tokenizer.token_bytes(token)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    @property
    def whole(self) -> bool:
        """Whether no bytes of an incomplete character are held back."""
        return not self._pending

    def flush(self) -> str:
        """No more bytes follow: the rest of an incomplete character becomes U+FFFD; empty if there is no rest."""
        pending, self._pending = self._pending, b""
        return pending.decode(errors="replace")


def _check_length(ids: Sequence[int], most: int) -> None:
    if len(ids) > most:
        raise ContextTooLong(f"more than {len(ids)} tokens")


def _cuts(text: str) -> list[int]:
    """The positions at which the upstream tokenizer splits a text: every 400,000 characters, and in each such slice
    every 25,000 characters of one run of whitespace or of non-whitespace."""
    if len(text) <= _RUN_CHARS:
        return []
    cuts: list[int] = []
    for start in range(0, len(text), _SLICE_CHARS):
        if start:
            cuts.append(start)
        for run in _long_runs(text[start : start + _SLICE_CHARS]):
            cuts += range(start + run.start() + _RUN_CHARS, start + run.end(), _RUN_CHARS)
    return cuts


def _long_runs(text: str) -> Iterator[re.Match[str]]:
    """The runs of more than _RUN_CHARS. Each covers a complete window of half that length, either without spaces and
    newlines or of whitespace only; the expression, which reads every character, is used only if there is one."""
    window = _RUN_CHARS // 2
    for start in range(0, len(text) - window + 1, window):
        end = start + window
        no_space = text.find(" ", start, end) < 0 and text.find("\n", start, end) < 0
        if no_space or text[start:end].isspace():
            return _LONG_RUN.finditer(text)
    return iter(())


def _slices(text: str, cuts: list[int]) -> Iterator[str]:
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        yield text[start:end]


def read_ranks(path: Path) -> dict[bytes, int]:
    """The bytes of token 0, 1, 2 ..., in that order, from a file of `base64 rank` lines. Raises CheckpointError."""
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); expected byte-pair ranks") from None
    for number, line in enumerate(lines):
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise CheckpointError(f"{path}: line {number + 1} is not `base64 rank`") from None
        if int(rank) != number or len(ranks) != number + 1:
            raise CheckpointError(f"{path}: line {number + 1} is not a new token of rank {number}")
    missing = sum(bytes([value]) not in ranks for value in range(256))
    if missing:
        raise CheckpointError(
            f"{path}: {missing} of the 256 single bytes are missing; expected a byte-level vocabulary"
        )
    return ranks


def _read_config(path: Path, first: int) -> tuple[dict[str, Any], dict[int, str], frozenset[int]]:
    """tokenizer_config.json, its named control tokens by id, and those among them declared `special: false`."""
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
        added: dict[str, dict[str, Any]] = config["added_tokens_decoder"]
        names = {int(token): entry["content"] for token, entry in added.items()}
        kept = frozenset(int(token) for token, entry in added.items() if entry.get("special") is False)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); expected added_tokens_decoder") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: expected added_tokens_decoder, an object of id to {{content}}") from None
    if len(names) < len(added):
        raise CheckpointError(f"{path}: added_tokens_decoder has one id twice, spelled in two ways")
    for token, name in names.items():
        if not _is_name(name):
            raise CheckpointError(f"{path}: the content of id {token} is {ascii(name)[:80]}; expected a token's text")
        if not first <= token < first + RESERVED:
            raise CheckpointError(f"{path}: {name} has id {token}; expected one in [{first}, {first + RESERVED})")
    return config, names, kept


def _is_name(value: Any) -> bool:
    """Whether a value can be a token's text: encodable as UTF-8 and not empty (every prompt would contain that)."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= character <= "\udfff" for character in value)
