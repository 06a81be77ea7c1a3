"""How the generators keep some ways of saying things out of training.

A list of wordings is cut in two when it is written down: four fifths are for training, one fifth only for the split
"families". Values are cut by a hash of what they say, one eighth only for the split "values". Both cuts depend on
nothing but the text, so every process agrees on them.
"""

import math
import random
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from nano.sample import Sample, Split

INSTANT = 0.15  # share of training samples answered without thinking; evaluation always thinks


class Wordings(NamedTuple):
    """The ways of saying one thing, cut in two: those for training, and those held out for the split "families"."""

    train: tuple[str, ...]
    held: tuple[str, ...]

    def pick(self, rng: random.Random, split: Split) -> str:
        """A random one of those that the split may use."""
        return rng.choice(self.held if split == "families" else self.train)


def wordings(text: str) -> Wordings:
    """One wording per line of `text`; a fifth of them, rounded up and evenly spread, are held out.

    Asserts at least three lines, no two of them equal but for case and the signs at their ends.
    """
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    plain = [line.lower().strip("?!. :)") for line in lines]
    assert len(plain) == len(set(plain)), [line for line in plain if plain.count(line) > 1]
    assert len(lines) >= 3, lines
    count = math.ceil(len(lines) / 5)
    held = {int((i + 0.5) * len(lines) / count) for i in range(count)}
    return Wordings(
        tuple(line for i, line in enumerate(lines) if i not in held),
        tuple(line for i, line in enumerate(lines) if i in held),
    )


def reserved(*key: object) -> bool:
    """Whether the value `key` is kept for the split "values" (one in eight)."""
    return zlib.crc32(repr(key).encode()) % 8 == 0


def casual(rng: random.Random, text: str) -> str:
    """`text` as people type it: now and then without the capital or the full stop."""
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.15 and text[-1] in ".?!":
        text = text[:-1]
    return text


def typo(rng: random.Random, text: str) -> str:
    """`text` with two letters of one longer word swapped, or one lost. Words with braces or digits are left alone."""
    words = text.split(" ")
    places = [i for i, word in enumerate(words) if len(word) > 4 and word.isalpha() and word.islower()]
    if not places:
        return text
    i = rng.choice(places)
    at = rng.randrange(1, len(words[i]) - 1)
    swapped = words[i][at + 1] + words[i][at] if rng.random() < 0.5 else words[i][at]
    words[i] = words[i][:at] + swapped + words[i][at + 2 :]
    return " ".join(words)


def dialogue(
    rng: random.Random,
    split: Split,
    kind: str,
    user: str,
    thought: str,
    content: str,
    check: dict[str, Any] | None,
    before: Sequence[dict[str, Any]] = (),
) -> Sample:
    """A sample whose last turns are `user` and an answer; `before` holds a system prompt or earlier turns.

    thought  the reasoning; left out of some training samples (INSTANT), which then are answered without thinking
    content  the visible answer; check: how it would be graded, None where it cannot be
    """
    thinking = split != "train" or rng.random() >= INSTANT
    last: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        last["reasoning_content"] = thought
    return Sample(kind, [*before, {"role": "user", "content": user}, last], [], thinking, check)


def terms(text: str) -> list[str]:
    """The words of `text`, which stand between blanks: a list without quotes is easier to read."""
    return text.split()
