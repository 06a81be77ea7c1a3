"""Texts of an exact number of tokens: random ones, which no prefix cache contains, and natural ones.

Counts are exact because texts are split at word boundaries. A byte-pair vocabulary splits text into words before
merging, and a space between a letter or digit and a letter is always such a boundary: the tokens of both sides add up.
"""

import functools
import random
import re
from bisect import bisect_right
from itertools import accumulate

from redline.bench.serving.vocabulary import TextTokenizer, TextVocabulary
from redline.errors import ConfigError

_MOST_WORDS = 4096  # words used of a vocabulary: enough that a sequence of eight is unique
_CUT = re.compile(r"(?<=[A-Za-z0-9]) (?=[A-Za-z])")
CALIBRATED = 128  # words that are counted by a tokenizer without a vocabulary
_FILLERS = 12  # filler words added at most, to make a natural text's count exact
_TOKENS_PER_WORD = 1.16  # of `natural` with Python 3.11 in Kimi K2's vocabulary; used without a tokenizer


class RandomTexts:
    """Creates texts that a server has not seen, each with an exact number of tokens in one vocabulary.

    All ordinary tokens, except those with partial characters, are concatenated in the order of their ids into a ring; a
    text is a part of the ring from a random position, as in `vllm bench serve`. Adjacent tokens that merge are counted
    as merged. The constructor takes some tenths of a second; a text takes microseconds.
    """

    def __init__(self, vocabulary: TextVocabulary) -> None:
        """Raises ConfigError if the vocabulary has no words of one token."""
        ordinary = {
            token: vocabulary.decode([token]) for token in range(vocabulary.size) if token not in vocabulary.specials
        }
        whole = {token: text for token, text in ordinary.items() if text and "\ufffd" not in text}
        words = dict.fromkeys(text.strip() for text in whole.values() if re.fullmatch(r" ?[a-z]{2,}", text))
        before = len(vocabulary.encode("of"))
        taken = (word for word in words if len(vocabulary.encode(f"of {word}")) == before + 1)
        self.words = tuple(word for word, _ in zip(taken, range(_MOST_WORDS), strict=False))
        if not self.words:
            raise ConfigError(f"--tokenizer {vocabulary.name}: it has no word of one token; use the served model's")
        self._firsts = [word for word in self.words if len(vocabulary.encode(word)) == 1]
        ring = vocabulary.decode(list(whole))
        places = [match.start() for match in _CUT.finditer(ring)]
        if places:
            ring = ring[places[0] :] + ring[: places[0]]
            places = [place - places[0] for place in places]
        if not (places and _CUT.match(ring[-1] + ring, 1)):  # else the tokens of whole turns would not add up
            ring, places = "".join(f" {word}" for word in self.words), [0]
        self._ring, self._places = ring, [*places, len(ring)]
        pieces = zip(self._places, self._places[1:], strict=False)
        self._sums = [0, *accumulate(len(vocabulary.encode(ring[start:end])) for start, end in pieces)]

    def opening(self, tokens: int, draw: random.Random) -> str:
        """Random words for the start of a text, without a leading space; one token each."""
        if not tokens:
            return ""
        if not self._firsts:
            return self.more(tokens, draw)
        return draw.choice(self._firsts) + self.more(tokens - 1, draw)

    def more(self, tokens: int, draw: random.Random) -> str:
        """Random words of one token each, with leading spaces, to follow a word."""
        return "".join(f" {word}" for word in draw.choices(self.words, k=tokens))

    def stretch(self, tokens: int, draw: random.Random) -> str:
        """Text of the ring from a random boundary, filled up with random words; to follow a word."""
        start = draw.randrange(len(self._places) - 1)
        turns, rest = divmod(tokens, self._sums[-1])
        turned = self._ring[self._places[start] :] + self._ring[: self._places[start]] if turns else ""
        end = self._sums[start] + rest
        over = end >= self._sums[-1]
        stop = bisect_right(self._sums, end - self._sums[-1] if over else end) - 1
        first, last = self._places[start], self._places[stop]
        text = self._ring[first:] + self._ring[:last] if over else self._ring[first:last]
        missing = end - self._sums[stop] - (self._sums[-1] if over else 0)
        return turned * turns + text + self.more(missing, draw)


class RandomWords:
    """Texts as `RandomTexts` makes them, without a vocabulary: random words of English prose.

    With a tokenizer, the tokens of CALIBRATED of the words are counted, and texts consist of these; without one, a word
    counts as one token.
    """

    def __init__(self, tokenizer: TextTokenizer | None = None) -> None:
        """Raises the errors of the tokenizer."""
        words: list[str] = sorted(set(re.findall(r"\b[a-z]{3,8}\b", natural(20_000, None, 0))))
        self._first: dict[str, int] = dict.fromkeys(words, 1)
        self._after: dict[str, int] = self._first
        self._counted = tokenizer is not None
        if tokenizer is not None:
            before = len(tokenizer.encode("of"))
            some: set[str] = {*_FILLING, *random.Random(0).sample(words, min(CALIBRATED, len(words)))}
            self._first = {word: len(tokenizer.encode(word)) for word in sorted(some)}
            self._after = {word: len(tokenizer.encode(f"of {word}")) - before for word in sorted(some)}

    def opening(self, tokens: int, draw: random.Random) -> str:
        """Random words for the start of a text, without a leading space."""
        if not self._counted:
            return self.more(tokens, draw).lstrip()
        fitting = [word for word, count in self._first.items() if count <= tokens]
        if not fitting:
            return ""
        word = draw.choice(fitting)
        return word + self.more(tokens - self._first[word], draw)

    def more(self, tokens: int, draw: random.Random) -> str:
        """Random words, each with a leading space; the last ones are short enough for the number of tokens."""
        found: list[str] = []
        words: list[str] = list(self._after)
        if not self._counted:
            return "".join(f" {word}" for word in draw.choices(words, k=tokens))
        while tokens > 0 and words:
            word = draw.choice(words)
            if self._after[word] <= tokens:
                found.append(f" {word}")
                tokens -= max(1, self._after[word])
            else:
                words = [word for word in words if self._after[word] <= tokens]
        return "".join(found)

    stretch = more


def natural(tokens: int, vocabulary: TextTokenizer | None, seed: int) -> str:
    """English prose of exactly `tokens` tokens, different for each seed: sentences of Python's documentation.

    The text starts with a random number, so that no prefix cache contains it, followed by sentences in random order.
    Other versions of Python have other sentences. Without a vocabulary the count is approximate. Raises ConfigError if
    the exact number cannot be reached, or if Python was installed without its documentation.
    """
    draw = random.Random(f"natural {seed}")
    words = f"Entry {draw.randrange(10**9)}.".split()
    most = max(tokens, 1) if vocabulary else max(1, round(tokens / _TOKENS_PER_WORD))  # a word has at least one token
    while len(words) < most:
        sentences = list(_sentences())
        draw.shuffle(sentences)
        for sentence in sentences:
            words += sentence.split()
            if len(words) >= most:
                break
    if vocabulary is None:
        return " ".join(words[:most])
    few, many = 0, most
    while few < many:  # the largest number of words within the token count
        middle = (few + many + 1) // 2
        if len(vocabulary.encode(" ".join(words[:middle]))) <= tokens:
            few = middle
        else:
            many = middle - 1
    for kept in range(few, max(few - _FILLERS, -1), -1):
        said = " ".join(words[:kept])
        for fillers in range(_FILLERS):
            count = len(vocabulary.encode(said))
            if count == tokens:
                return said
            if count > tokens:
                break
            said = f"{said} {_FILLING[fillers % len(_FILLING)]}".strip()
    raise ConfigError(f"{vocabulary.name}: found no text of exactly {tokens} tokens; use another length")


_FILLING = ("and", "so", "on", "or", "as", "is", "in", "it")


@functools.cache
def _sentences() -> tuple[str, ...]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            "this Python was installed without its documentation (pydoc_data); install the full standard library"
        ) from None
    found: dict[str, None] = {}
    for text in topics.values():
        for paragraph in text.split("\n\n"):
            line = " ".join(paragraph.split())
            for sentence in re.split(r"(?<=[a-z)]\.) (?=[A-Z])", line):
                plain = re.sub(r"[*\"`]", "", sentence)
                if re.fullmatch(r"[A-Z][A-Za-z0-9 ,;:'()-]{40,400}\.", plain):
                    found[plain] = None
    return tuple(found)
