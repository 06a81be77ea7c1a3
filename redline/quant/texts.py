"""Texts for calibration and evaluation: token ids by domain, split into two disjoint halves."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from redline.errors import ConfigError

LONGEST = 4096  # maximum tokens of a text; longer texts are cut into pieces


@dataclass(frozen=True)
class CalibrationText:
    """Token ids of one domain. From position `judged` on, the next token is predicted and compared."""

    domain: str
    tokens: tuple[int, ...]
    judged: int = 0


def halves(texts: Iterable[CalibrationText]) -> tuple[list[CalibrationText], list[CalibrationText]]:
    """(for calibration, held out): split by a hash of the tokens, so the same text is always in the same half."""
    parts: tuple[list[CalibrationText], list[CalibrationText]] = [], []
    for text in texts:
        digest = blake2b(repr(text.tokens).encode(), digest_size=8).digest()
        parts[digest[0] & 1].append(text)
    return parts


def chosen(texts: Sequence[CalibrationText], tokens: int, vocabulary: int) -> list[CalibrationText]:
    """Texts of at most `tokens` tokens in total, taken from the domains in turn; each in pieces of at most LONGEST.

    Raises ConfigError if no text has two tokens, or if a text has an id that is not in the vocabulary.
    """
    by_domain: dict[str, list[CalibrationText]] = {}
    for text in texts:
        if not all(0 <= token < vocabulary for token in text.tokens):
            raise ConfigError(f"a text of {text.domain} has token ids outside [0, {vocabulary}): another tokenizer's")
        by_domain.setdefault(text.domain, []).extend(_pieces(text))
    found: list[CalibrationText] = []
    turns = [iter(domain) for domain in by_domain.values()]
    while turns:
        for turn in list(turns):
            piece = next(turn, None)
            if piece is None:
                turns.remove(turn)
            elif len(piece.tokens) <= tokens:
                found.append(piece)
                tokens -= len(piece.tokens)
            else:
                turns.remove(turn)
    if not found:
        raise ConfigError("texts: none that fits; give texts of at least two tokens, or a larger --tokens")
    return found


def _pieces(text: CalibrationText) -> Iterator[CalibrationText]:
    for start in range(0, len(text.tokens), LONGEST):
        piece = text.tokens[start : start + LONGEST]
        if len(piece) > 1:
            yield CalibrationText(text.domain, piece, max(0, text.judged - start))
