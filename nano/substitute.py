"""Puts made-up words in the place of real ones, everywhere in a sample at once.

A small model remembers the words that it has copied before and stumbles over others. Here a word of the user's that
comes back in the answer becomes a string of arbitrary vocabulary pieces, in the question, the tools, the thinking and
the answer alike: the sample stays right, and the only way to answer it is to copy.
"""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

from nano.sample import Sample

_WORD = re.compile(r"[A-Za-z]{4,}")

# Words that carry the form of an answer or the meaning of a question.
_KEPT_WORDS = """
about after also answer array before boolean called calls description draft enum false field first from
function functions give have integer into json know last line list looking many missing more much name need
needed none null number object only optional please properties question record required result return says
schema second string tell text than that their them then there these they this those title true type user
value want wants were what when where which whose will with word words would year your
"""
_KEPT = frozenset(_KEPT_WORDS.split())


def vocabulary_pieces(tokens: Sequence[bytes]) -> list[str]:
    """The pieces that made-up words are put together from: 2 to 7 small letters. tokens: the bytes of each rank."""
    texts = {token.decode("ascii").strip() for token in tokens if token.isascii()}
    return sorted(text for text in texts if 2 <= len(text) <= 7 and text.isalpha() and text.islower())


def substitute(rng: random.Random, sample: Sample, pieces: Sequence[str]) -> Sample:
    """The sample with one to three of its words made up; the same object where no word can be replaced."""
    asked = " ".join(message.get("content") or "" for message in sample.messages if message["role"] != "assistant")
    last = sample.messages[-1]
    told = json.dumps([last.get("reasoning_content"), last.get("content"), last.get("tool_calls")]).lower()
    words = sorted({word.lower() for word in _WORD.findall(asked)} - _KEPT)
    words = [word for word in words if word in told]
    if not words:
        return sample
    made = {word: _made_up(rng, pieces) for word in rng.sample(words, min(len(words), rng.randint(1, 3)))}
    pattern = re.compile("|".join(map(re.escape, sorted(made, key=len, reverse=True))), re.IGNORECASE)

    def replace(match: re.Match[str]) -> str:
        old, new = match[0], made[match[0].lower()]
        return new.upper() if old.isupper() else new.capitalize() if old[0].isupper() else new

    def walk(value: Any) -> Any:
        match value:
            case str():
                return pattern.sub(replace, value)
            case dict():
                return {
                    key if key in _FORM else walk(key): item if key == "role" else walk(item)
                    for key, item in value.items()
                }
            case list():
                return [walk(item) for item in value]
            case _:
                return value

    return Sample(sample.kind, walk(sample.messages), walk(sample.tools), sample.thinking, sample.check)


# Keys of OpenAI's message and tool shapes.
_FORM_WORDS = """
role content reasoning_content tool_calls tool_call_id id type function name arguments description parameters
properties required enum items
"""
_FORM = frozenset(_FORM_WORDS.split())


def _made_up(rng: random.Random, pieces: Sequence[str]) -> str:
    word = ""
    while len(word) < 4:
        word += rng.choice(pieces)
    return word + (rng.choice(pieces) if len(word) < 8 and rng.random() < 0.4 else "")
